"""Pointwise operators of one and two tensors, for tools/special_values.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from special_cases import FEW, INF, NAN, VALUES, Case, Family

_SIGNED_UNARY = [
    "neg",
    "abs",
    "sign",
    "sqrt",
    "floor",
    "ceil",
    "round",
    "trunc",
    "frac",
    "relu",
    "sin",
    "tan",
    "asin",
    "atan",
    "sinh",
    "tanh",
    "asinh",
    "atanh",
    "erf",
    "expm1",
    "log1p",
    "reciprocal",
    "sgn",
    "square",
    "nan_to_num",
    "positive",
    "relu6",
    "hardtanh",
    "rad2deg",
    "deg2rad",
    "sinc",
    "special_bessel_j1",
]
_UNARY = [
    "rsqrt",
    "exp",
    "exp2",
    "log",
    "log2",
    "log10",
    "cos",
    "acos",
    "cosh",
    "acosh",
    "sigmoid",
    "lgamma",
    "digamma",
    "erfc",
    "erfinv",
    "logit",
    "i0",
    "special_i0e",
    "special_i1",
    "special_i1e",
    "special_ndtr",
    "special_ndtri",
    "special_entr",
    "special_erfcx",
    "special_log_ndtr",
    "special_bessel_j0",
    "isnan",
    "isinf",
    "isfinite",
    "isposinf",
    "isneginf",
    "signbit",
    "logical_not",
    "silu",
    "mish",
    "softplus",
    "elu",
    "selu",
    "celu",
    "hardsigmoid",
    "hardswish",
    "leaky_relu",
    "logsigmoid",
    "softsign",
    "tanhshrink",
    "hardshrink",
    "softshrink",
    "gelu",
]
_ATOL = {
    "lgamma": 1e-6, "digamma": 2e-6, "i0": 0.0, "erfinv": 1e-7, "special_ndtri": 1e-6, "special_bessel_j0": 1e-4,
    "special_bessel_j1": 1e-4, "special_entr": 1e-8, "sinc": 1e-7, "acos": 2e-7, "log": 1e-9, "cos": 1e-7, "special_log_ndtr": 2e-6,
    "logit": 2e-7, "mish": 1e-7, "tanhshrink": 2e-7, "gelu": 1e-7, "erfc": 1e-7,
}  # fmt: skip
_IN_PLACE = frozenset(name for name in (*_SIGNED_UNARY, *_UNARY) if hasattr(torch.Tensor, f"{name}_"))


def _unary(name: str) -> Callable[[Any], Any]:
    for home in (torch, F, torch.special):
        short = name.removeprefix("special_")
        if name.startswith("special_") and home is torch:
            continue
        f = getattr(home, short if home is torch.special else name, None)
        if f is not None:
            return lambda v: f(v.x)
    raise KeyError(name)


def in_place(case: Case) -> list[Case]:
    """The same in place, on a copy; for eager tensors."""
    if case.name not in _IN_PLACE:
        return []
    return [replace(case, name=f"{case.name}_", function=lambda v: getattr(v.x.clone(), f"{case.name}_")())]


def _root_of_gelu(v: Any) -> torch.Tensor:
    """torch's 1 + tanh cancels."""
    inner = 2 * math.sqrt(2 / math.pi) * (v.x + 0.044715 * v.x**3)
    return torch.sqrt((v.x * torch.sigmoid(inner)).abs())


def _ndtr(v: Any) -> torch.Tensor:
    """torch's 1 + erf cancels."""
    return torch.special.erfc(v.x * -math.sqrt(0.5)) / 2


def _trigamma(v: Any) -> list[torch.Tensor]:
    """Poles at whole numbers, where torch has what a rounded pi leaves of them."""
    pole = (v.x <= 0) & (v.x == v.x.floor()) & v.x.isfinite()
    return [torch.where(pole, INF, torch.polygamma(1, v.x))]


def pointwise() -> Family:
    family = Family("pointwise", {"x": VALUES}, differentiable=True)
    flat = {"sign", "floor", "ceil", "round", "trunc", "sgn"}
    for name in (*_SIGNED_UNARY, *_UNARY):
        smooth = not name.startswith(("is", "sign", "logical")) and name not in flat
        family.cases.append(
            Case(
                name,
                _unary(name),
                _ATOL.get(name, 0.0),
                signed=name in _SIGNED_UNARY,
                differentiable=smooth,
                reference=_ndtr if name == "special_ndtr" else None,
                slope=_trigamma if name == "digamma" else None,
            )
        )
    more: dict[str, Callable[[Any], Any]] = {
        "gelu tanh": lambda v: F.gelu(v.x, approximate="tanh"),
        "sqrt of gelu tanh": lambda v: torch.sqrt(F.gelu(v.x, approximate="tanh").abs()),
        "clamp 0 1": lambda v: v.x.clamp(0, 1),
        "clamp min": lambda v: v.x.clamp(min=-2.0),
        "clamp max": lambda v: v.x.clamp(max=0.25),
        "clamp nan": lambda v: v.x.clamp(min=NAN),
        "clamp inf": lambda v: v.x.clamp(-INF, INF),
        "threshold": lambda v: F.threshold(v.x, 0.1, 20.0),
        "relu twice": lambda v: torch.relu(torch.relu(v.x) - 1),
        "x != x": lambda v: v.x != v.x,
        "x == x": lambda v: v.x == v.x,
        "x < inf": lambda v: v.x < INF,
        "x > 0": lambda v: v.x > 0,
        "x >= 0": lambda v: v.x >= 0,
        "x < 0": lambda v: v.x < 0,
        "not x < 0": lambda v: ~(v.x < 0),
        "x == 0": lambda v: v.x == 0,
        "x != 0": lambda v: v.x != 0,
        "bool": lambda v: v.x.bool(),
        "x <= nan": lambda v: v.x <= NAN,
        "where x > 0": lambda v: torch.where(v.x > 0, v.x, 0.5),
        "where nan": lambda v: torch.where(v.x.isnan(), 1.0, v.x),
        "where not finite": lambda v: torch.where(v.x.isfinite(), v.x, -1.0),
        "x * 0": lambda v: v.x * 0,
        "x * -0.0": lambda v: v.x * -0.0,
        "x - x": lambda v: v.x - v.x,
        "x + -x": lambda v: v.x + -v.x,
        "-x + x": lambda v: -v.x + v.x,
        "-x - -x": lambda v: -v.x - -v.x,
        "x / x": lambda v: v.x / v.x,
        "-x / x": lambda v: -v.x / v.x,
        "x / -x": lambda v: v.x / -v.x,
        "0 / x": lambda v: 0 / v.x,
        "1 / x": lambda v: 1 / v.x,
        "x / 0": lambda v: v.x / 0.0,
        "x + 0": lambda v: v.x + 0.0,
        "x + inf": lambda v: v.x + INF,
        "x * inf": lambda v: v.x * INF,
        "x - inf": lambda v: v.x - INF,
        "0 - x": lambda v: 0.0 - v.x,
        "x * 1e38 / 1e38": lambda v: v.x * 1e38 / 1e38,
        "x * mask": lambda v: v.x * (v.x > 0),
        "x * mask float": lambda v: v.x * (v.x > 0).float(),
        "max of 0": lambda v: torch.maximum(v.x, torch.zeros_like(v.x)),
        "masked fill": lambda v: v.x.masked_fill(v.x.isnan(), 3.0),
        "pow 2": lambda v: v.x**2,
        "pow 3": lambda v: v.x**3,
        "pow -1": lambda v: v.x**-1,
        "pow -2": lambda v: v.x**-2,
        "pow 0.5": lambda v: v.x**0.5,
        "pow -0.5": lambda v: v.x**-0.5,
        "pow 2.5": lambda v: v.x**2.5,
        "pow 0": lambda v: v.x**0,
        "pow inf": lambda v: v.x**INF,
        "pow -inf": lambda v: v.x**-INF,
        "pow nan": lambda v: v.x**NAN,
        "2 pow": lambda v: 2.0**v.x,
        "-1 pow": lambda v: torch.pow(-1.0, v.x),
        "1 pow": lambda v: torch.pow(1.0, v.x),
        "0 pow": lambda v: torch.pow(0.0, v.x),
        "celu": lambda v: F.celu(v.x, 0.7),
        "softplus 2": lambda v: F.softplus(v.x, 2.0, 10.0),
        "xlogy 2": lambda v: torch.xlogy(v.x, 2.0),
        "hardtanh": lambda v: F.hardtanh(v.x, -0.3, 0.7),
        "rrelu": lambda v: F.rrelu(v.x, training=False),
        "square sqrt": lambda v: (v.x * v.x).sqrt(),
        "mvlgamma": lambda v: torch.mvlgamma(v.x.abs() + 2, 2),
        "polygamma 1": lambda v: torch.polygamma(1, v.x.abs() + 0.5),
        "fmod 3": lambda v: torch.fmod(v.x, 3.0),
        "remainder 3": lambda v: torch.remainder(v.x, 3.0),
        "remainder -3": lambda v: torch.remainder(v.x, -3.0),
        "floor divide 3": lambda v: torch.div(v.x, 3.0, rounding_mode="floor"),
        "round 2": lambda v: torch.round(v.x.clamp(-1e4, 1e4), decimals=2),
        "frexp": lambda v: torch.frexp(v.x),
        "ldexp": lambda v: torch.ldexp(v.x, torch.tensor(3)),
        "erf exp": lambda v: torch.exp(-torch.erf(v.x)),
        "sin of clamp": lambda v: torch.sin(v.x.clamp(-(2.0**120), 2.0**120)),
        "glu": lambda v: F.glu(v.x, 0),
        "angle": lambda v: torch.angle(v.x),
        "to int": lambda v: v.x.nan_to_num(0, 0, 0).clamp(-2e9, 2e9).to(torch.int32),
        "normalize": lambda v: F.normalize(v.x.clamp(-1e15, 1e15).nan_to_num(), dim=0),
        "normalize 100": lambda v: F.normalize(v.x.clamp(-100, 100).nan_to_num(), dim=0),
        "half and back": lambda v: v.x.half().float(),
        "bfloat16 and back": lambda v: v.x.bfloat16().float(),
        "relu6 of hardswish": lambda v: F.relu6(F.hardswish(v.x)),
        "dropout": lambda v: F.dropout(v.x, 0.5, training=False),
        "clone": lambda v: v.x.clone(),
        "flip": lambda v: v.x.flip(0),
        "view as int": lambda v: v.x.view(torch.int32),
    }
    signed = (
        "clamp",
        "relu",
        "x *",
        "x + 0",
        "0 - x",
        "1 / x",
        "0 / x",
        "pow 3",
        "pow -1",
        "fmod",
        "clone",
        "half and",
        "bfloat16",
    )
    no_half = ("half and", "bfloat16", "view as", "frexp", "ldexp", "mvlgamma", "polygamma", "x * 1e38")
    if not torch.full((64,), 1.0).clamp(min=NAN).isnan().all():
        del more["clamp nan"]  # torch before 2.13 takes NaN for no bound
    edges = (
        "to int",
        "frexp",
        "ldexp",
        "view as",
        "bool",
        "x !=",
        "x ==",
        "x <",
        "x >",
        "not x",
        "floor div",
        "round",
        "angle",
        "mask",
    )
    for name, f in more.items():
        family.cases.append(
            Case(
                name,
                f,
                1e-7 if name in ("gelu tanh", "mvlgamma", "softplus 2") else 0.0,
                rtol=2e-5 if "pow" in name or "gamma" in name else 0.0,
                signed=name.startswith(signed),
                half=not name.startswith(no_half) and name != "normalize",  # which needs 1e15
                reference=_root_of_gelu if name == "sqrt of gelu tanh" else None,
                exact=name not in ("half and back", "bfloat16 and back"),
                differentiable=not name.startswith(edges) and not name.startswith(no_half),
            )
        )
    return family


def _numpy(f: Any, v: Any) -> torch.Tensor:
    """Exact, where torch's vectors give NaN for quotients of more than 2^128."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(f(v.a.double().numpy(), v.b.double().numpy())))


def binary() -> Family:
    n = len(FEW)
    family = Family("binary", {"a": FEW.repeat_interleave(n), "b": FEW.repeat(n)}, differentiable=True)
    plain = [
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "pow",
        "atan2",
        "fmod",
        "remainder",
        "hypot",
        "copysign",
        "xlogy",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_xor",
        "logaddexp",
        "logaddexp2",
        "floor_divide",
        "heaviside",
    ]
    signed = {"mul", "div", "copysign", "fmod", "remainder", "add", "sub", "atan2"}
    ordered = {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_xor",
        "floor_divide",
        "heaviside",
        "remainder",
        "fmod",
    }
    for name in plain:
        f = getattr(torch, name)
        family.cases.append(
            Case(
                name,
                lambda v, f=f: f(v.a, v.b),
                rtol=1e-4 if name == "pow" else 0.0,
                atol=1e-6 if "logadd" in name else 0.0,
                signed=name in signed,
                differentiable=name not in ordered,
                exact=name != "floor_divide",
                reference={"fmod": lambda v: _numpy(np.fmod, v), "remainder": lambda v: _numpy(np.remainder, v)}.get(
                    name
                ),
            )
        )
    more: dict[str, Callable[[Any], Any]] = {
        "clamp tensors": lambda v: torch.clamp(v.a, v.b - 1, v.b),
        "where a < b": lambda v: torch.where(v.a < v.b, v.a, v.b),
        "where not a < b": lambda v: torch.where(~(v.a < v.b), v.a, v.b),
        "a > b or a <= b": lambda v: (v.a > v.b) | (v.a <= v.b),
        "max of three": lambda v: torch.maximum(torch.maximum(v.a, v.b), v.a - v.b),
        "lerp": lambda v: torch.lerp(v.a, v.b, 0.25),
        "addcmul": lambda v: torch.addcmul(v.a, v.a, v.b),
        "addcdiv": lambda v: torch.addcdiv(v.a, v.a, v.b),
        "prelu": lambda v: F.prelu(v.a.reshape(-1, 1), v.b[:1]),
        "isclose": lambda v: torch.isclose(v.a, v.b, equal_nan=True),
        "nextafter": lambda v: torch.nextafter(v.a, v.b),
        "gather max": lambda v: torch.stack([v.a, v.b]).amax(0),
        "gather argmax": lambda v: torch.stack([v.a, v.b]).argmax(0),
        "gather sum": lambda v: torch.stack([v.a, v.b]).sum(0),
        "scatter copysign": lambda v: torch.copysign(
            v.a.scatter_add(0, torch.arange(v.a.shape[0]).to(v.a.device) % 7, v.b), v.b
        ),
        "a * 0 + b": lambda v: v.a * 0 + v.b,
        "a / b * b": lambda v: torch.where(v.b == 0, v.a, v.a / v.b),
        "a * b + -a * b": lambda v: v.a * v.b + -v.a * v.b,
        "a / b + a / -b": lambda v: v.a / v.b + v.a / -v.b,
        "a - b + (b - a)": lambda v: v.a - v.b + (v.b - v.a),
        "nan of a + b - b": lambda v: (v.a + v.b - v.b).isnan(),
        "nan of a - (a - b)": lambda v: (v.a - (v.a - v.b)).isnan(),
        "nan of a + b - a - b": lambda v: (v.a + v.b - v.a - v.b).isnan(),
        "nan of a * b / b": lambda v: (v.a * v.b / v.b).isnan(),
        "nan of a / b * b": lambda v: (v.a / v.b * v.b).isnan(),
        "nan of a * b - b * a": lambda v: (v.a * v.b - v.b * v.a).isnan(),
    }
    for name, f in more.items():
        flat = name in (
            "isclose",
            "nextafter",
            "gather argmax",
            "a > b or a <= b",
            "scatter copysign",
            "prelu",
            "clamp tensors",
        ) or name.startswith("nan of")
        family.cases.append(
            Case(
                name,
                f,
                exact=name not in ("nextafter", "lerp"),
                half=name not in ("nextafter", "scatter copysign", "prelu") and not name.startswith("nan of"),
                differentiable=not flat,
            )
        )
    return family
