"""Calls of pointwise, special, creation and backward operators that torch's samples do not reach."""

from __future__ import annotations

import math
from typing import Any

import torch
from agreement import Case

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(11)
Cases = dict[Any, list[Case]]


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def between(low: float, high: float, n: int = 64) -> torch.Tensor:
    return torch.rand(n, generator=_generator) * (high - low) + low


EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 1e-6, 30.0, float("inf"), float("-inf"), float("nan")])

RANGES: dict[Any, tuple[float, float]] = {
    aten.erfc: (-6, 9), aten.special_erfcx: (-6, 60), aten.erfinv: (-1, 1), aten.special_ndtri: (0, 1),
    aten.lgamma: (-8, 40), aten.digamma: (-5, 30), aten.i0: (-20, 20), aten.special_i0e: (-30, 30),
    aten.special_i1: (-20, 20), aten.special_i1e: (-30, 30), aten.special_bessel_j0: (-20, 20),
    aten.special_bessel_j1: (-20, 20), aten.special_bessel_y0: (0, 20), aten.special_bessel_y1: (0.1, 20),
    aten.special_modified_bessel_i0: (-9, 9), aten.special_modified_bessel_i1: (-9, 9),
    aten.special_modified_bessel_k0: (0, 20), aten.special_modified_bessel_k1: (0.1, 20),
    aten.special_scaled_modified_bessel_k0: (0, 20), aten.special_scaled_modified_bessel_k1: (0.1, 20),
    aten.special_spherical_bessel_j0: (-20, 20), aten.special_airy_ai: (-8, 9), aten.special_ndtr: (-8, 8), aten.sinc: (-6, 6),
}  # fmt: skip
"""Special functions of one number, and where they are tested."""

POLYNOMIALS = [
    getattr(aten, f"special_{name}")
    for name in ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
                 *(f"{kind}chebyshev_polynomial_{k}" for kind in ("", "shifted_") for k in "tuvw"))
]  # fmt: skip


def special() -> Cases:
    found: Cases = {p.default: [Case(p.default, (between(*ends),))] for p, ends in RANGES.items()}
    degrees = torch.randint(-1, 7, (40,), generator=_generator).float()
    for p in POLYNOMIALS:
        found[p.default] = [Case(p.default, (f(40), degrees))]
        found[p.x_scalar] = [Case(p.x_scalar, (0.3, degrees))]
        found[p.n_scalar] = [Case(p.n_scalar, (f(9), 4))]
    remainder = aten.remainder.Scalar_Tensor
    found[remainder] = [Case(remainder, (7.5, f(40))), Case(remainder, (7, torch.tensor([2, -3, 5, 7])))]
    zeta = aten.special_zeta
    found[zeta.default] = [Case(zeta.default, (between(1, 9), between(0, 20)))]
    found[zeta.other_scalar] = [Case(zeta.other_scalar, (between(1, 9), 2.5))]
    found[zeta.self_scalar] = [Case(zeta.self_scalar, (3.0, between(-4, 20)))]
    for one, two, three in (
        (aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other),
        (aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar),
    ):
        y = torch.cat([between(-0.5, 9), torch.tensor([0.0, math.inf, math.nan])])
        x = torch.cat([f(64), torch.zeros(3)])
        found[one] = [Case(one, (x, y)), Case(one, (x.int(), y))]
        found[two], found[three] = (
            [Case(two, (0.7, y)), Case(two, (0, y))],
            [Case(three, (x, 2.5)), Case(three, (x, math.nan))],
        )
    a, x = between(0, 30), between(0, 30)
    found[aten.igamma.default] = [Case(aten.igamma.default, (a, x)), Case(aten.igamma.default, (a * 9, a * 9 + x))]
    found[aten.igammac.default] = [Case(aten.igammac.default, (a, x)), Case(aten.igammac.default, (a * 9 + x, a * 9))]
    ends = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    found[aten.polygamma.default] = [
        Case(aten.polygamma.default, (n, x)) for n in range(4) for x in (between(-3, 20), ends)
    ]
    return found


def bits() -> Cases:
    words = torch.tensor([1, -1, 2**31 - 1, -(2**31), 77, -1234567], dtype=torch.int32)
    counts = torch.tensor([0, 1, 31, 5, 32, -1], dtype=torch.int32)
    found: Cases = {}
    for name in ("left", "right"):
        packet = getattr(aten, f"bitwise_{name}_shift")
        found[packet.Tensor] = [Case(packet.Tensor, (words, counts))]
        found[packet.Tensor_Scalar] = [Case(packet.Tensor_Scalar, (words, 3))]
        found[packet.Scalar_Tensor] = [Case(packet.Scalar_Tensor, (9, counts.abs() % 20))]
        dunder = getattr(aten, f"__{name[0]}shift__")
        found[dunder.Scalar] = [Case(dunder.Scalar, (words, 3))]
        found[dunder.Tensor] = [Case(dunder.Tensor, (words, counts.abs() % 20))]
    pairs = torch.cartesian_prod(EDGES, EDGES)
    found[aten.nextafter.default] = [Case(aten.nextafter.default, (f(9), f(9)))]
    found[aten.copysign.Scalar] = [Case(aten.copysign.Scalar, (EDGES, -0.0))]
    found[aten.copysign.Tensor] = [Case(aten.copysign.Tensor, (pairs[:, 0], pairs[:, 1]))]
    found[aten.frexp.Tensor] = [Case(aten.frexp.Tensor, (f(9) * 1000,)), Case(aten.frexp.Tensor, (EDGES[:9],))]
    found[aten.gcd.default] = [Case(aten.gcd.default, (words[4:], words[4:] * 6 - 3))]
    for packet in (aten.fmax, aten.fmin, aten.hypot):
        found[packet.default] = [Case(packet.default, (pairs[:, 0], pairs[:, 1]))]
    for packet in (aten.isfinite, aten.signbit, aten.angle):
        found[packet.default] = [Case(packet.default, (EDGES,))]
    found[aten.round.decimals] = [Case(aten.round.decimals, (f(9) * 100,), {"decimals": d}) for d in (2, 0, -1)]
    return found


def creation() -> Cases:
    x = f(2, 3)
    return {
        aten.copy.default: [Case(aten.copy.default, (torch.zeros(2, 3, dtype=torch.int32), f(3) * 9))],
        aten.fill.Scalar: [Case(aten.fill.Scalar, (x, 2.5))],
        aten.fill.Tensor: [Case(aten.fill.Tensor, (x, torch.tensor(3)))],
        aten.new_full.default: [Case(aten.new_full.default, (x, [4], 1e30))],
        aten.full.default: [Case(aten.full.default, ([2, 3], 7))],
        aten.full_like.default: [Case(aten.full_like.default, (x, float("-inf")))],
        aten.logspace.default: [
            Case(aten.logspace.default, (0, 4, 5)), Case(aten.logspace.default, (-1.5, 2, 7, 2.0)),
            Case(aten.logspace.default, (0, 4, 5), {"dtype": torch.int64}),
        ],
        aten.eye.default: [Case(aten.eye.default, (4,))],
        aten.eye.m: [Case(aten.eye.m, (3, 5), {"dtype": torch.int64})],
        aten.arange.start_step: [
            Case(aten.arange.start_step, (1, 9, 2)), Case(aten.arange.start_step, (0.5, 3.0, 0.25)),
        ],
        aten.rrelu_with_noise_functional.default: [
            Case(aten.rrelu_with_noise_functional.default, (f(9), torch.ones(9), 0.1, 0.3, False))
        ],
    }  # fmt: skip


def backward() -> Cases:
    found: Cases = {}

    def add(packet: Any, *args: Any) -> None:
        found.setdefault(packet.default, []).append(Case(packet.default, args))

    image, volume = f(2, 3, 9, 10), f(1, 2, 5, 6, 7)
    for include_pad in (True, False):
        grad = f(*aten.avg_pool2d(image, [3, 2], [2, 2], [1, 1], True, include_pad).shape)
        add(aten.avg_pool2d_backward, grad, image, [3, 2], [2, 2], [1, 1], True, include_pad, None)
    grad = f(*aten.avg_pool3d(volume, [2, 3, 2], [2, 1, 2]).shape)
    add(aten.avg_pool3d_backward, grad, volume, [2, 3, 2], [2, 1, 2], [0, 0, 0], False, True, 5)
    value, places = aten.max_pool2d_with_indices(image, [3, 3], [2, 1], [1, 1], [1, 2])
    add(aten.max_pool2d_with_indices_backward, f(*value.shape), image, [3, 3], [2, 1], [1, 1], [1, 2], False, places)
    value, places = aten.max_pool3d_with_indices(volume, [2, 2, 3], [1, 2, 2], [0, 1, 1])
    add(aten.max_pool3d_with_indices_backward, f(*value.shape), volume, [2, 2, 3], [1, 2, 2], [0, 1, 1], [1, 1, 1], False,
        places)  # fmt: skip
    for size in ([4, 3], [9, 5], [12, 13]):
        value, places = aten.adaptive_max_pool2d(image, size)
        add(aten._adaptive_avg_pool2d_backward, f(*value.shape), image)
        add(aten.adaptive_max_pool2d_backward, f(*value.shape), image, places)
    value, places = aten.adaptive_max_pool3d(volume, [3, 4, 2])
    add(aten._adaptive_avg_pool3d_backward, f(*value.shape), volume)
    add(aten.adaptive_max_pool3d_backward, f(*value.shape), volume, places)
    return found


def sampling() -> Cases:
    found: Cases = {}
    x, volume = f(1, 2, 6, 5), f(1, 2, 4, 3, 5)
    grid, grid3 = f(1, 4, 3, 2), f(1, 2, 3, 2, 3)
    modes = [(m, p, c) for m in range(3) for p in range(3) for c in (True, False)]
    two, three = aten.grid_sampler_2d.default, aten.grid_sampler_3d.default
    found[two] = [Case(two, (x, grid, *mode)) for mode in modes]
    found[three] = [Case(three, (volume, grid3, *mode)) for mode in modes if mode[0] < 2]
    for name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
        plain, vec = getattr(aten, name).default, getattr(aten, name).vec
        found[plain] = [
            Case(plain, (x, size, corners)) for size in ([9, 3], [2, 2], [1, 12]) for corners in (True, False)
        ]
        found[vec] = [Case(vec, (x, None, False, [factor, factor])) for factor in (1.7, 0.4)]
    samples = torch.rand(2, 3, 2, generator=_generator)
    pool = aten.fractional_max_pool2d.default
    found[pool] = [Case(pool, (f(2, 3, 9, 8), [2, 3], [4, 5], samples))]
    pool = aten.fractional_max_pool3d.default
    found[pool] = [Case(pool, (f(1, 3, 7, 8, 6), [2, 2, 2], [3, 4, 3], torch.rand(1, 3, 3, generator=_generator)))]
    return found


def norms() -> Cases:
    legit = aten._native_batch_norm_legit.no_stats
    composite = aten.batch_norm.default
    return {
        legit: [Case(legit, (f(*s), f(s[1]), f(s[1]), True, 0.1, 1e-5)) for s in ((2, 5, 3, 3), (6, 4))],
        composite: [Case(composite, (f(2, 3, 7), None, None, None, None, True, 0.1, 1e-5, False))],
    }


def attention() -> Cases:
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    q, k, v = f(2, 3, 7, 8), f(2, 3, 9, 8), f(2, 3, 9, 8)
    return {
        flash: [
            Case(flash, (q, k, v)), Case(flash, (k, k, v, 0.0, True)), Case(flash, (q, k, v), {"attn_mask": f(7, 9)}),
        ],
    }  # fmt: skip


CASES: Cases = {}
for _group in (special(), bits(), creation(), backward(), sampling(), norms(), attention()):
    for _overload, _cases in _group.items():
        CASES.setdefault(_overload, []).extend(_cases)
