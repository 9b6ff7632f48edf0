"""Special functions that need a loop, for the interpreter: the algorithms of kernels/lapilli_special.slang, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
_BERNOULLI = (
    12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10, -2.950130727918164224e12,
    1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17, -7.1661652561756670113e18,
)  # fmt: skip


def _vectorized(f: Callable[[float, float], float]) -> Callable[[Array, Array], Array]:
    return np.vectorize(f, otypes=[float])


def _power(x: float, y: float) -> float:
    try:
        return math.inf if x == 0 and y < 0 else float(x**y)
    except OverflowError:
        return math.inf


def _zeta(x: float, q: float) -> float:
    """The Hurwitz zeta function by the Euler-Maclaurin formula."""
    if x == 1 or (x > 1 and q == -math.inf):
        return math.inf
    if not x > 1 or math.isnan(q) or q == math.inf or (q <= 0 and q != math.floor(q) and x != math.floor(x)):
        return math.nan
    if q <= 0 and q == math.floor(q):
        return math.inf
    terms = max(10, 11 - math.floor(q))
    s = sum(_power(q + k, -x) for k in range(terms))
    a = q + terms - 1
    b = _power(a, -x)
    s += b * a / (x - 1) - 0.5 * b
    factor, k = 1.0, 0.0
    for divisor in _BERNOULLI:
        factor, b = factor * (x + k), b / a
        s += factor * b / divisor
        factor, b, k = factor * (x + k + 1), b / a, k + 2
    return s


def _incomplete_gamma(a: float, x: float) -> tuple[float, float]:
    """The regularised lower and upper incomplete gamma functions: a series below the mean, a continued fraction above."""
    if math.isnan(a) or math.isnan(x) or a < 0 or x < 0 or (a == 0 and x == 0) or (math.isinf(a) and math.isinf(x)):
        return math.nan, math.nan
    if a == 0 or math.isinf(x):
        return 1.0, 0.0
    if x == 0 or math.isinf(a):
        return 0.0, 1.0
    density = math.exp(max(a * math.log(x) - x - math.lgamma(a + 1), -745.0))
    if x < a + 1:
        term = total = 1.0
        for k in range(1, 2000):
            term *= x / (a + k)
            total += term
        p = min(total * density, 1.0)
        return p, 1 - p
    b, c, d = x + 1 - a, 1e300, 1 / (x + 1 - a)
    h = d
    for k in range(1, 2000):
        n, b = -k * (k - a), b + 2
        d = 1 / ((n * d + b) or 1e-300)
        c = (b + n / c) or 1e-300
        h *= c * d
    q = min(h * a * density, 1.0)
    return 1 - q, q


def _recurrence(
    first: Callable[[float], float], step: Callable[[float, float, float, int], float], limit: int = 30000
) -> Callable[[Array, Array], Array]:
    """A polynomial of degree n by the three-term recurrence p[k+1] = step(x, p[k], p[k-1], k), p[0] = 1, p[1] =
    first(x).
    """

    def polynomial(x: float, n: float) -> float:
        m = int(n) if math.isfinite(n) else -1
        if m < 0:
            return 0.0
        if m > limit:
            return math.nan
        p, q = 1.0, first(x)
        for k in range(1, m):
            p, q = q, step(x, q, p, k)
        return q if m else p

    return _vectorized(polynomial)


def _chebyshev(x: float, q: float, p: float, k: int) -> float:
    return 2 * x * q - p


FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "zeta": _vectorized(_zeta),
    "igamma": _vectorized(lambda a, x: _incomplete_gamma(a, x)[0]),
    "igammac": _vectorized(lambda a, x: _incomplete_gamma(a, x)[1]),
    "chebyshev_t": _recurrence(lambda x: x, _chebyshev),
    "chebyshev_u": _recurrence(lambda x: 2 * x, _chebyshev),
    "chebyshev_v": _recurrence(lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_w": _recurrence(lambda x: 2 * x + 1, _chebyshev),
    "hermite_h": _recurrence(lambda x: 2 * x, lambda x, q, p, k: 2 * (x * q - k * p), 128),
    "hermite_he": _recurrence(lambda x: x, lambda x, q, p, k: x * q - k * p, 128),
    "laguerre_l": _recurrence(lambda x: 1 - x, lambda x, q, p, k: ((2 * k + 1 - x) * q - k * p) / (k + 1)),
    "legendre_p": _recurrence(lambda x: x, lambda x, q, p, k: ((2 * k + 1) * x * q - k * p) / (k + 1)),
}
