"""Special functions as compositions of arithmetic, shared by the interpreter and all kernels.

Approximations for single precision are those of S. L. Moshier's Cephes Mathematical Library 2.2 (1992) unless stated
otherwise; names in parentheses are its functions. DLMF is the NIST Digital Library of Mathematical Functions. NaN gives
NaN. Operators are elementwise, and two arguments broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, const, unary, where
from lapilli.ir.node import Node
from lapilli.lower.registry import Call, lowering

aten = torch.ops.aten
INF, NAN = math.inf, math.nan


def polynomial(x: Expr, *coefficients: float) -> Expr:
    """A polynomial by Horner's scheme, the coefficient of the highest power first."""
    return reduce(lambda total, c: total * x + c, coefficients[1:], const(coefficients[0]))


def chebyshev_series(x: Expr, coefficients: Sequence[float]) -> Expr:
    """A Chebyshev series by Clenshaw's algorithm for -2 <= x <= 2, the highest term first and the last one halved."""
    b0, b1, b2 = const(coefficients[0]), const(0.0), const(0.0)
    for c in coefficients[1:]:
        b0, b1, b2 = x * b0 - b1 + c, b0, b1
    return (b0 - b2) * 0.5


def choose(*cases: tuple[Expr, Expr], otherwise: Expr) -> Expr:
    """The value for the first condition that holds."""
    return reduce(lambda rest, case: where(case[0], case[1], rest), reversed(cases), otherwise)


def lt(a: Expr, b: Expr | float) -> Expr:
    return binary("lt", a, b)


def gt(a: Expr, b: Expr | float) -> Expr:
    return binary("gt", a, b)


def eq(a: Expr, b: Expr | float) -> Expr:
    return binary("eq", a, b)


def both(a: Expr, b: Expr) -> Expr:
    return binary("and", a, b)


def exp(x: Expr) -> Expr:
    return unary("exp", x)


def log(x: Expr) -> Expr:
    return unary("log", x)


def sqrt(x: Expr) -> Expr:
    return unary("sqrt", x)


def is_whole(x: Expr) -> Expr:
    return eq(unary("floor", x), x)


def exp_of_square(x: Expr, sign: float) -> Expr:
    """exp(sign * x^2). The square of the leading bits is exact, so that the rounding error of x^2 is not amplified."""
    head = unary("as_float", binary("bitand", unary("as_int", x), -4096))
    return exp(head * head * sign) * exp((x - head) * (x + head) * sign)


def _erfcx_tail(x: Expr) -> Expr:
    """exp(x^2) erfc(x) for x >= 1 (ndtrf)."""
    q = 1.0 / x
    y = q * q
    near = polynomial(
        y, 2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1, 6.210004621745983e-1,
        -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1,
    )  # fmt: skip
    far = polynomial(
        y, -1.047766399936249e1, 1.297719955372516e1, -7.495518717768503e0, 2.921019019210786e0, -1.015265279202700e0,
        4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1,
    )  # fmt: skip
    # the asymptotic series DLMF 7.12.1, precise enough for gradients of erfcx, which are differences from its first term
    farthest = polynomial(y, 0.75, -0.5, 1.0) * 0.56418958354775629
    return q * choose((lt(x, 2.0), near), (lt(x, 20.0), far), otherwise=farthest)


def erfc(x: Expr) -> Expr:
    """1 - erf(x), without cancellation for large x (erfcf)."""
    a = unary("abs", x)
    tail = _erfcx_tail(a) * exp_of_square(a, -1.0)
    tail = where(gt(a, 12.0), const(0.0), tail)
    return where(lt(a, 1.0), 1.0 - unary("erf", x), where(lt(x, 0.0), 2.0 - tail, tail))


def erfcx(x: Expr) -> Expr:
    """exp(x^2) erfc(x)"""
    a = unary("abs", x)
    near = exp(x * x) * (1.0 - unary("erf", x))
    far = _erfcx_tail(a)
    left = where(gt(a, 27.0), const(INF), exp_of_square(a, 1.0) * 2.0 - far)
    return where(lt(a, 1.0), near, where(lt(x, 0.0), left, far))


def ndtr(x: Expr) -> Expr:
    """The cumulative distribution function of the standard normal distribution."""
    return erfc(x * -math.sqrt(0.5)) * 0.5


def erfinv(x: Expr) -> Expr:
    """The inverse of erf (M. Giles, Approximating the erfinv function, GPU Computing Gems 2, 2010)."""
    w = -unary("log1p", -(x * x))
    near = polynomial(
        w - 2.5, 2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
        -0.00417768164, 0.246640727, 1.50140941,
    )  # fmt: skip
    far = polynomial(
        sqrt(w) - 3.0, -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
        0.00943887047, 1.00167406, 2.83297682,
    )  # fmt: skip
    return where(eq(unary("abs", x), 1.0), x * INF, where(lt(w, 5.0), near, far) * x)


def ndtri(p: Expr) -> Expr:
    """The quantile function of the standard normal distribution (ndtri)."""
    low = math.exp(-2)
    y = where(gt(p, 1 - low), 1.0 - p, p)
    middle = y - 0.5
    z = middle * middle
    central = middle + middle * (
        z
        * polynomial(z, -5.99633501014107895267e1, 9.80010754185999661536e1, -5.66762857469070293439e1,
                     1.39312609387279679503e1, -1.23916583867381258016e0)
        / polynomial(z, 1.0, 1.95448858338141759834e0, 4.67627912898881538453e0, 8.63602421390890590575e1,
                     -2.25462687854119370527e2, 2.00260212380212060660e2, -8.20372256168333339912e1,
                     1.59056225126211695515e1, -1.18331621121330003142e0)
    )  # fmt: skip
    x = sqrt(log(y) * -2.0)
    q = 1.0 / x
    near = (
        polynomial(q, 4.05544892305962419923e0, 3.15251094599893866154e1, 5.71628192246421288162e1, 4.40805073893200834700e1,
                   1.46849561928858024014e1, 2.18663306850790267539e0, -1.40256079171354495875e-1,
                   -3.50424626827848203418e-2, -8.57456785154685413611e-4)
        / polynomial(q, 1.0, 1.57799883256466749731e1, 4.53907635128879210584e1, 4.13172038254672030440e1,
                     1.50425385692907503408e1, 2.50464946208309415979e0, -1.42182922854787788574e-1,
                     -3.80806407691578277194e-2, -9.33259480895457427372e-4)
    )  # fmt: skip
    far = (
        polynomial(q, 3.23774891776946035970e0, 6.91522889068984211695e0, 3.93881025292474443415e0, 1.33303460815807542389e0,
                   2.01485389549179081538e-1, 1.23716634817820021358e-2, 3.01581553508235416007e-4,
                   2.65806974686737550832e-6, 6.23974539184983293730e-9)
        / polynomial(q, 1.0, 6.02427039364742014255e0, 3.67983563956160859403e0, 1.37702099489081330271e0,
                     2.16236993594496635890e-1, 1.34204006088543189037e-2, 3.28014464682127739104e-4,
                     2.89247864745380683936e-6, 6.79019408009981274425e-9)
    )  # fmt: skip
    tail = x - log(x) / x - q * where(lt(x, 8.0), near, far)
    inside = where(gt(y, low), central * math.sqrt(2 * math.pi), where(gt(p, 1 - low), tail, -tail))
    return choose((eq(p, 0.0), const(-INF)), (eq(p, 1.0), const(INF)), otherwise=inside)


def lgamma(x: Expr) -> Expr:
    """log |gamma(x)| (lgamf): polynomials around 1 and 2, Stirling's series from 2.5 on, reflection for negative
    numbers.
    """
    a = unary("abs", x)
    small, middle = lt(a, 0.75), lt(a, 1.25)
    # recurrence into 1.5 .. 2.5, where log gamma(2 + t) is a polynomial
    t = where(lt(a, 0.5), a, where(lt(a, 1.5), a - 1.0, a - 2.0))
    factor = where(lt(a, 0.5), a * (a + 1.0), where(lt(a, 1.5), a, const(1.0)))
    about_two = t * polynomial(
        t, 6.055172732649237e-4, -1.311620815545743e-3, 2.863437556468661e-3, -7.366775108654962e-3, 2.058355474821512e-2,
        -6.735323259371034e-2, 3.224669577325661e-1, 4.227843421859038e-1,
    )  # fmt: skip
    s = a - 1.0
    about_one = s * polynomial(
        s, 1.369488127325832e-1, -1.590086327657347e-1, 1.692415923504637e-1, -2.067882815621965e-1, 2.705806208275915e-1,
        -4.006931650563372e-1, 8.224670749082976e-1, -5.772156501719101e-1,
    )  # fmt: skip
    low = where(both(unary("not", small), middle), about_one, about_two - log(factor))
    shifted = where(lt(a, 6.5), a + 4.0, a)
    rising = where(lt(a, 6.5), a * (a + 1.0) * (a + 2.0) * (a + 3.0), const(1.0))
    q = 1.0 / shifted
    series = q * polynomial(q * q, 6.789774945028216e-4, -2.769887652139868e-3, 8.333316229807355e-2)
    high = (shifted - 0.5) * log(shifted) - shifted + 0.91893853320467274 + series - log(rising)
    positive = where(lt(a, 2.5), low, high)
    z = a - unary("round", a)
    reflected = log(math.pi / unary("abs", a * unary("sin", z * math.pi))) - positive
    pole = both(is_whole(x), binary("le", x, 0.0))
    value = where(lt(x, 0.0), reflected, positive) + 0.0  # of 1, it is no -0
    about_zero = -log(a) - x * 0.57721566490153286
    return choose((unary("isinf", x), const(INF)), (pole, const(INF)), (lt(a, 1e-5), about_zero), otherwise=value)


def digamma(x: Expr) -> Expr:
    """The logarithmic derivative of gamma: recurrence up to 10, the asymptotic series DLMF 5.11.2, and reflection for
    negative numbers.
    """
    negative = lt(x, 0.0)
    y = where(negative, 1.0 - x, x)
    steps = const(0.0)
    for k in range(10):
        here = y + float(k)
        steps = where(lt(here, 10.0), steps + 1.0 / here, steps)
    s = where(lt(y, 10.0), y + binary("max", unary("ceil", 10.0 - y), 0.0), y)
    z = 1.0 / (s * s)
    series = z * polynomial(z, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
    value = log(s) - 0.5 / s - series - steps
    fraction = (x - unary("round", x)) * math.pi  # precise near poles, where it matters
    reflected = value - math.pi / unary("tan", fraction)
    tiny = lt(unary("abs", x), 1e-20)
    whole = both(negative, is_whole(x))
    return choose((tiny, -(1.0 / x)), (whole, const(NAN)), (negative, reflected), (eq(x, INF), x), otherwise=value)


_I0_NEAR = (
    -1.30002500998624804212e-8, 6.04699502254191894932e-8, -2.67079385394061173391e-7, 1.11738753912010371815e-6,
    -4.41673835845875056359e-6, 1.64484480707288970893e-5, -5.75419501008210370398e-5, 1.88502885095841655729e-4,
    -5.76375574538582365885e-4, 1.63947561694133579842e-3, -4.32430999505057594430e-3, 1.05464603945949983183e-2,
    -2.37374148058994688156e-2, 4.93052842396707084878e-2, -9.49010970480476444210e-2, 1.71620901522208775349e-1,
    -3.04682672343198398683e-1, 6.76795274409476084995e-1,
)  # fmt: skip
_I0_FAR = (
    3.39623202570838634515e-9, 2.26666899049817806459e-8, 2.04891858946906374183e-7, 2.89137052083475648297e-6,
    6.88975834691682398426e-5, 3.36911647825569408990e-3, 8.04490411014108831608e-1,
)  # fmt: skip
_I1_NEAR = (
    9.38153738649577178388e-9, -4.44505912879632808065e-8, 2.00329475355213526229e-7, -8.56872026469545474066e-7,
    3.47025130813767847674e-6, -1.32731636560394358279e-5, 4.78156510755005422638e-5, -1.61760815825896745588e-4,
    5.12285956168575772895e-4, -1.51357245063125314899e-3, 4.15642294431288815669e-3, -1.05640848946261981558e-2,
    2.47264490306265168283e-2, -5.29459812080949914269e-2, 1.02643658689847095384e-1, -1.76416518357834055153e-1,
    2.52587186443633654823e-1,
)  # fmt: skip
_I1_FAR = (
    -3.83538038596423702205e-9, -2.63146884688951950684e-8, -2.51223623787020892529e-7, -3.88256480887769039346e-6,
    -1.10588938762623716291e-4, -9.76109749136146840777e-3, 7.78576235018280120474e-1,
)  # fmt: skip
_K0_NEAR = (
    1.90451637722020886025e-9, 2.53479107902614945675e-7, 2.28621210311945178607e-5, 1.26461541144692592338e-3,
    3.59799365153615016266e-2, 3.44289899924628486886e-1, -5.35327393233902768720e-1,
)  # fmt: skip
_K0_FAR = (
    -1.69753450938905987466e-9, 8.57403401741422608519e-9, -4.66048989768794782956e-8, 2.76681363944501510342e-7,
    -1.83175552271911948767e-6, 1.39498137188764993662e-5, -1.28495495816278026384e-4, 1.56988388573005337491e-3,
    -3.14481013119645005427e-2, 2.44030308206595545468e0,
)  # fmt: skip
_K1_NEAR = (
    -2.21338763073472585583e-8, -2.43340614156596823496e-6, -1.73028895751305206302e-4, -6.97572385963986435018e-3,
    -1.22611180822657148235e-1, -3.53155960776544875667e-1, 1.52530022733894777053e0,
)  # fmt: skip
_K1_FAR = (
    2.01504975519703286596e-9, -1.03457624656780970260e-8, 5.74108412545004946722e-8, -3.50196060308781257119e-7,
    2.40648494783721712015e-6, -1.93619797416608296024e-5, 1.95215518471351631108e-4, -2.85781685962277938680e-3,
    1.03923736576817238437e-1, 2.72062619048444266945e0,
)  # fmt: skip


def i0e(x: Expr) -> Expr:
    """exp(-|x|) I0(x), the scaled modified Bessel function of order 0 (i0ef)."""
    a = unary("abs", x)
    far = chebyshev_series(32.0 / binary("max", a, 8.0) - 2.0, _I0_FAR) / sqrt(a)
    return where(gt(a, 8.0), far, chebyshev_series(a * 0.5 - 2.0, _I0_NEAR))


def i1e(x: Expr) -> Expr:
    """exp(-|x|) I1(x), the scaled modified Bessel function of order 1 (i1ef)."""
    a = unary("abs", x)
    far = chebyshev_series(32.0 / binary("max", a, 8.0) - 2.0, _I1_FAR) / sqrt(a)
    value = where(gt(a, 8.0), far, chebyshev_series(a * 0.5 - 2.0, _I1_NEAR) * a)
    return where(lt(x, 0.0), -value, value)


def _with_growth(f: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    """f(x) exp(|x|), with the exponential as two factors: otherwise it would overflow before the product does."""

    def g(x: Expr) -> Expr:
        half = exp(unary("abs", x) * 0.5)
        return f(x) * half * half

    return g


i0, i1 = _with_growth(i0e), _with_growth(i1e)


def _modified_second(near: Callable[[Expr], Expr], far: Sequence[float], scaled: bool) -> Callable[[Expr], Expr]:
    """K0 or K1, modified Bessel functions of the second kind (k0f, k1f), given the series for x <= 2 and for larger x.
    scaled: times exp(x).
    """

    def k(x: Expr) -> Expr:
        low, high = near(x), chebyshev_series(8.0 / binary("max", x, 2.0) - 2.0, far) / sqrt(x)
        value = where(gt(x, 2.0), high if scaled else exp(-x) * high, low * exp(x) if scaled else low)
        return choose((lt(x, 0.0), const(NAN)), (eq(x, 0.0), const(INF)), otherwise=value)

    return k


def _k0_near(x: Expr) -> Expr:
    return chebyshev_series(x * x - 2.0, _K0_NEAR) - log(x * 0.5) * i0(x)


def _k1_near(x: Expr) -> Expr:
    return chebyshev_series(x * x - 2.0, _K1_NEAR) / x + log(x * 0.5) * i1(x)


def _phase(a: Expr, amplitude: Sequence[float], angle: Sequence[float], shift: float) -> tuple[Expr, Expr]:
    """Amplitude and phase of Bessel functions for large arguments (j0f, j1f)."""
    q = 1.0 / a
    return sqrt(q) * polynomial(q, *amplitude), q * polynomial(q * q, *angle) - shift + a


def _phase0(a: Expr) -> tuple[Expr, Expr]:
    return _phase(
        a,
        (-6.838999669318810e-2, 1.864949361379502e-1, -2.145007480346739e-1, 1.197549369473540e-1, -3.560281861530129e-3,
         -4.969382655296620e-2, -3.355424622293709e-6, 7.978845717621440e-1),
        (3.242077816988247e1, -3.630592630518434e1, 1.756221482109099e1, -4.974978466280903e0, 1.001973420681837e0,
         -1.939906941791308e-1, 6.490598792654666e-2, -1.249992184872738e-1),
        math.pi / 4,
    )  # fmt: skip


def _phase1(a: Expr) -> tuple[Expr, Expr]:
    return _phase(
        a,
        (6.913942741265801e-2, -2.284801500053359e-1, 3.138238455499697e-1, -2.102302420403875e-1, 5.435364690523026e-3,
         1.493389585089498e-1, 4.976029650847191e-6, 7.978845453073848e-1),
        (-4.497014141919556e1, 5.073465654089319e1, -2.485774108720340e1, 7.222973196770240e0, -1.544842782180211e0,
         3.503787691653334e-1, -1.637986776941202e-1, 3.749989509080821e-1),
        3 * math.pi / 4,
    )  # fmt: skip


def j0(x: Expr) -> Expr:
    """The Bessel function of the first kind of order 0 (j0f)."""
    a = unary("abs", x)
    z = a * a
    near = (z - 5.78318596294678452118) * polynomial(
        z,
        -6.068350350393235e-8,
        6.388945720783375e-6,
        -3.969646342510940e-4,
        1.332913422519003e-2,
        -1.729150680240724e-1,
    )
    size, angle = _phase0(a)
    return where(gt(a, 2.0), size * unary("cos", angle), near)


def j1(x: Expr) -> Expr:
    """The Bessel function of the first kind of order 1 (j1f)."""
    a = unary("abs", x)
    z = a * a
    near = (z - 14.6819706421238932572) * x * polynomial(
        z, -4.878788132172128e-9, 6.009061827883699e-7, -4.541343896997497e-5, 1.937383947804541e-3, -3.405537384615824e-2
    )  # fmt: skip
    size, angle = _phase1(a)
    far = size * unary("cos", angle)
    return where(gt(a, 2.0), where(lt(x, 0.0), -far, far), near)


def _second_kind(x: Expr, near: Expr, phase: tuple[Expr, Expr]) -> Expr:
    """Y0 or Y1: `near` up to 2, from amplitude and phase beyond; -inf at 0, and NaN for negative numbers."""
    value = where(gt(x, 2.0), phase[0] * unary("sin", phase[1]), near)
    return choose((lt(x, 0.0), const(NAN)), (eq(x, 0.0), const(-INF)), otherwise=value)


def y0(x: Expr) -> Expr:
    """The Bessel function of the second kind of order 0 (y0f)."""
    z = x * x
    near = (z - 0.43221455686510834878) * polynomial(
        z,
        9.454583683980369e-8,
        -9.413212653797057e-6,
        5.344486707214273e-4,
        -1.584289289821316e-2,
        1.707584643733568e-1,
    ) + log(x) * j0(x) * (2 / math.pi)
    return _second_kind(x, near, _phase0(x))


def y1(x: Expr) -> Expr:
    """The Bessel function of the second kind of order 1 (y1f)."""
    z = x * x
    near = (z - 4.66539330185668857532) * x * polynomial(
        z, 8.061978323326852e-9, -9.496460629917016e-7, 6.719543806674249e-5, -2.641785726447862e-3, 4.202369946500099e-2
    ) + (j1(x) * log(x) - 1.0 / x) * (2 / math.pi)  # fmt: skip
    return _second_kind(x, near, _phase1(x))


def spherical_j0(x: Expr) -> Expr:
    """sin(x) / x, by Taylor's series near zero."""
    z = x * x
    series = polynomial(z, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1.0)
    return choose(
        (lt(unary("abs", x), 0.5), series), (eq(unary("abs", x), INF), const(0.0)), otherwise=unary("sin", x) / x
    )


def sinc(x: Expr) -> Expr:
    """sin(pi x) / (pi x), by Taylor's series near zero."""
    angle = x * math.pi
    near = 1.0 - x * x * (math.pi**2 / 6)
    return where(lt(unary("abs", x), 1e-3), near, unary("sin", angle) / angle)


def _times_logarithm(name: str) -> Callable[[Expr, Expr], Expr]:
    """x * log(y) or x * log1p(y), and 0 for x = 0. A denormal x times an infinite logarithm is infinite, also on devices
    that flush denormals to zero.
    """

    def f(x: Expr, y: Expr) -> Expr:
        logarithm = unary(name, y)
        factor = where(unary("isinf", logarithm), unary("sign", x), x)
        return choose((unary("isnan", y), y), (eq(x, 0.0), const(0.0)), otherwise=factor * logarithm)

    return f


def airy_ai(x: Expr) -> Expr:
    """The Airy function Ai: Maclaurin series DLMF 9.4.1 near zero, asymptotic rational functions elsewhere (airyf)."""
    a = unary("abs", x)
    root = sqrt(a)
    zeta = a * root * (2 / 3)
    q = 1.0 / zeta
    size = 0.564189583547756287 / sqrt(root)
    decay = (
        polynomial(q, 3.46538101525629032477e-1, 1.20075952739645805542e1, 7.62796053615234516538e1, 1.68089224934630576269e2,
                   1.59756391350164413639e2, 7.05360906840444183113e1, 1.40264691163389668864e1, 1.0)
        / polynomial(q, 5.67594532638770212846e-1, 1.47562562584847203173e1, 8.45138970141474626562e1,
                     1.77318088145400459522e2, 1.64234692871529701831e2, 7.14778400825575695274e1,
                     1.40959135607834029598e1, 1.0)
    )  # fmt: skip
    right = size * 0.5 * exp(-zeta) * decay
    z = q * q
    f = 1.0 + z * (
        polynomial(z, -1.31696323418331795333e-1, -6.26456544431912369773e-1, -6.93158036036933542233e-1,
                   -2.79779981545119124951e-1, -4.91900132609500318020e-2, -4.06265923594885404393e-3,
                   -1.59276496239262096340e-4, -2.77649108155232920844e-6, -1.67787698489114633780e-8)
        / polynomial(z, 1.0, 1.33560420706553243746e1, 3.26825032795224613948e1, 2.67367040941499554804e1,
                     9.18707402907259625840e0, 1.47529146771666414581e0, 1.15687173795188044134e-1,
                     4.40291641615211203805e-3, 7.54720348287414296618e-5, 4.51850092970580378464e-7)
    )  # fmt: skip
    g = q * (
        polynomial(z, 1.97339932091685679179e-2, 3.91103029615688277255e-1, 1.06579897599595591108e0,
                   9.39169229816650230044e-1, 3.51465656105547619242e-1, 6.33888919628925490927e-2,
                   5.85804113048388458567e-3, 2.82851600836737019778e-4, 6.98793669997260967291e-6,
                   8.11789239554389293311e-8, 3.41551784765923618484e-10)
        / polynomial(z, 1.0, 9.30892908077441974853e0, 1.98352928718312140417e1, 1.55646628932864612953e1,
                     5.47686069422975497931e0, 9.54293611618961883998e-1, 8.64580826352392193095e-2,
                     4.12656523824222607191e-3, 1.01259085116509135510e-4, 1.17166733214413521882e-6,
                     4.91834570062930015649e-9)
    )  # fmt: skip
    angle = zeta + math.pi / 4
    left = size * (unary("sin", angle) * f - unary("cos", angle) * g)
    cube = x * x * x
    even, odd = [1.0], [1.0]
    for k in range(1, 9):
        even.append(even[-1] / ((3 * k - 1) * (3 * k)))
        odd.append(odd[-1] / ((3 * k) * (3 * k + 1)))
    near = (
        polynomial(cube, *reversed(even)) * 0.355028053887817239
        - x * polynomial(cube, *reversed(odd)) * 0.258819403792806798
    )
    return choose((eq(a, INF), const(NAN)), (gt(x, 2.09), right), (lt(x, -2.09), left), otherwise=near)


_UNARY: dict[Any, Callable[[Expr], Expr]] = {
    aten.erfc: erfc, aten.special_erfcx: erfcx, aten.erfinv: erfinv, aten.special_ndtri: ndtri, aten.lgamma: lgamma,
    aten.digamma: digamma, aten.i0: i0, aten.special_i0e: i0e, aten.special_i1: i1, aten.special_i1e: i1e,
    aten.special_bessel_j0: j0, aten.special_bessel_j1: j1, aten.special_bessel_y0: y0, aten.special_bessel_y1: y1,
    aten.special_modified_bessel_i0: i0, aten.special_modified_bessel_i1: i1,
    aten.special_modified_bessel_k0: _modified_second(_k0_near, _K0_FAR, False),
    aten.special_modified_bessel_k1: _modified_second(_k1_near, _K1_FAR, False),
    aten.special_scaled_modified_bessel_k0: _modified_second(_k0_near, _K0_FAR, True),
    aten.special_scaled_modified_bessel_k1: _modified_second(_k1_near, _K1_FAR, True),
    aten.special_spherical_bessel_j0: spherical_j0, aten.special_airy_ai: airy_ai, aten.sinc: sinc, aten.special_ndtr: ndtr,
}  # fmt: skip


def _register() -> None:
    def of_one(f: Callable[[Expr], Expr]) -> Any:
        return lambda call, x: call.pointwise(f, x, compute=DType.float32)

    def of_two(f: Callable[[Expr, Expr], Expr]) -> Any:
        return lambda call, a, b: call.pointwise(f, a, b, compute=DType.float32)

    def named(name: str) -> Callable[[Expr, Expr], Expr]:
        return lambda a, b: binary(name, a, b)

    def shifted(name: str) -> Callable[[Expr, Expr], Expr]:
        return lambda a, n: binary(name, a * 2.0 - 1.0, n)

    for packet, f in _UNARY.items():
        lowering(packet.default)(of_one(f))
    lowering(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)(of_two(_times_logarithm("log")))
    packet = aten.special_xlog1py
    lowering(packet.default, packet.self_scalar, packet.other_scalar)(of_two(_times_logarithm("log1p")))
    lowering(aten.igamma.default)(of_two(named("igamma")))
    lowering(aten.igammac.default)(of_two(named("igammac")))
    families = {name: named(name) for name in ("hermite_h", "hermite_he", "laguerre_l", "legendre_p")}
    for kind in "tuvw":
        families[f"chebyshev_{kind}"] = named(f"chebyshev_{kind}")
        families[f"shifted_chebyshev_{kind}"] = shifted(f"chebyshev_{kind}")
    two = {"special_zeta": named("zeta")}
    for name, g in families.items():
        head, kind = name.rsplit("_", 1)
        two[f"special_{head}_polynomial_{kind}"] = g
    for name, g in two.items():
        packet = getattr(aten, name)
        scalars = [o for o in packet.overloads() if o.endswith("_scalar")]
        lowering(packet.default, *(getattr(packet, o) for o in scalars))(of_two(g))


_register()


@lowering(aten.polygamma.default)
def polygamma(call: Call, n: int, x: Node) -> Node:
    """(-1)^(n+1) n! zeta(n+1, x) (DLMF 5.15.1), and digamma for n = 0; elementwise."""
    if n == 0:
        return call.pointwise(digamma, x, compute=DType.float32)
    factor = float((-1) ** (n + 1) * math.factorial(n))

    def f(a: Expr) -> Expr:
        value = binary("zeta", const(n + 1.0), a) * factor
        if n > 1:
            return value
        return where(eq(a, INF), const(0.0), where(eq(a, -INF), const(NAN), value))  # torch's trigamma

    return call.pointwise(f, x, compute=DType.float32)
