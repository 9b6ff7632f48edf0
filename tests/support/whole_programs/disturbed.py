"""A run of a program in which every computed number is a few units in its last place from what it would be, and what is free
(signs of NaN, orders of equals) is drawn: as devices may have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HALVES = (torch.float16, torch.bfloat16)
UNITS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
AMPLITUDES = {
    torch.float32: (1, 2, 4, 8, 16, 16, 16, 16),
    torch.float16: (1, 1, 2, 2, 4, 4, 4, 4),
    torch.bfloat16: (1, 1, 2, 2, 4, 4, 4, 4),
}
"""Units that intermediate results are disturbed by, one after the other."""
ROUNDED = 4
"""Units by which two rounded numbers differ that may be equal."""
TINY = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
"""Below, devices have nothing, or one bit."""
# Operators whose results are numbers that they were given, or whole numbers: every precision has them exactly.
_EXACT = """\
floor ceil round trunc sign sgn neg abs relu clamp clamp_min clamp_max maximum minimum fmax fmin where copy
clone contiguous _to_copy lift_fresh lift_fresh_copy cat stack gather index index_select index_put
_index_put_impl _unsafe_index scatter masked_fill fill zero amax amin max min sort topk median nanmedian
kthvalue mode aminmax _aminmax cummax cummin _cummax_helper _cummin_helper repeat repeat_interleave flip roll
tril triu constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d embedding diag_embed unfold im2col pixel_shuffle pixel_unshuffle channel_shuffle
max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d max_unpool2d
max_unpool3d hardtanh threshold rot90 take heaviside copysign count_nonzero empty_like new_zeros new_ones
new_empty zeros_like ones_like full_like new_full unsqueeze_copy expand_copy index_fill index_copy _unsafe_view
resize nan_to_num slice_backward select_backward threshold_backward isfinite slice_scatter select_scatter
diagonal_scatter hardtanh_backward unbind_copy masked_scatter masked_select block_diag one_hot new_empty_strided
empty_strided set_"""
EXACT = set(_EXACT.split())


_REAL = {"exp", "exp2", "expm1", "sqrt", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh"}
_APPROXIMATED = _REAL | {
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "sigmoid",
    "gelu",
    "silu",
    "erf",
    "softplus",
    "pow",
    "rsqrt",
}
"""Functions that drivers compute by polynomials, with a few units of error."""
_FRACTIONS = {"linspace", "logspace"}
"""Operators that round what they make of nothing."""
_AT_NAN: dict[str, tuple[int, float, float | None]] = {
    "hardtanh": (1, 0.0, None),
    "softshrink": (1, 0.0, None),
    "hardshrink": (1, 0.0, None),
    "hardswish": (1, math.nan, None),
    "elu": (5, math.nan, None),
    "logit": (1, 0.0, math.nan),
}
"""Which argument of an operator's gradient is where it is taken, what torch's vectors have at NaN, and what elements have that they
leave over (None: what they have at infinity)."""
_TRUTHS = {"logical_and", "logical_or", "logical_xor", "any", "all", "count_nonzero"}
"""Operators that only ask whether a number is 0."""
_UNORDERED = {"topk", "sort", "kthvalue", "median", "nanmedian"}
"""Operators that leave open which of several equal elements they take."""


_SUMS = {
    "softshrink",  # of torch too, by where an element lies: its vectors give 0, what is left over -0
    "sum",
    "mean",
    "nansum",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addmv",
    "addbmm",
    "mv",
    "dot",
    "vdot",
    "convolution",
    "_log_softmax",
}


def _moments(x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Variance and mean."""
    dims = list(range(x.dim())) if not dim and dim != 0 else [dim] if isinstance(dim, int) else list(dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = x.mean(dims, keepdim=True)
    squares = (x - mean).square().sum(dims, keepdim=True)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return tuple(t if keepdim else t.squeeze(tuple(dims)) for t in (variance, mean))


def _unbiased(found: Callable[[Any], Any]) -> Callable[..., Any]:
    """Of the overloads of var, std and their like."""

    def run(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, (x, *args), strict=False)) | kwargs
        if "unbiased" in given:
            given["correction"] = int(given.pop("unbiased"))
        return found(_moments(x, given.get("dim"), **{k: given[k] for k in ("correction", "keepdim") if k in given}))

    return run


def _log_of_sum(exp: Callable[[torch.Tensor], torch.Tensor], unit: float) -> Callable[..., torch.Tensor]:
    """logaddexp and logaddexp2: near 0 the difference of two numbers, each of which is rounded."""

    def run(func: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        most = torch.maximum(a, b)
        return torch.where(a.isinf() & (a == b), a, most + exp(-(a - b).abs()).log1p() / unit)

    return run


def _nll(
    func: Any, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """nll_loss, of which a mean is a quotient of two sums."""
    counts = (target != ignored).to(x.dtype)
    place = torch.where(target != ignored, target, 0)
    w = counts if weight is None else weight[place] * counts
    terms = -x.gather(-1 if x.dim() == 1 else 1, place.unsqueeze(-1 if x.dim() == 1 else 1)).reshape(w.shape) * w
    total = w.sum()
    return (terms, total * 0) if reduction == 0 else (terms.sum() / total if reduction == 1 else terms.sum(), total)


_TAKEN_APART: dict[str, Callable[..., Any]] = {
    "logaddexp": _log_of_sum(torch.exp, 1),
    "logaddexp2": _log_of_sum(torch.exp2, math.log(2)),
    "var": _unbiased(lambda m: m[0]),
    "std": _unbiased(lambda m: m[0].sqrt()),
    "var_mean": _unbiased(lambda m: m),
    "std_mean": _unbiased(lambda m: (m[0].sqrt(), m[1])),
    "nll_loss_forward": _nll,
    "nll_loss2d_forward": _nll,
}
for _name in (
    "native_layer_norm", "native_group_norm", "native_batch_norm", "native_layer_norm_backward",
    "native_group_norm_backward", "native_batch_norm_backward", "linalg_cross", "_softmax_backward_data",
    "_log_softmax_backward_data", "gelu",
):  # fmt: skip
    _TAKEN_APART[_name] = lambda func, *args, **kwargs: decomposition_table[func](*args, **kwargs)


def _resized(
    func: Any, x: torch.Tensor, size: Sequence[int], align_corners: bool, *scales: float | None
) -> torch.Tensor:
    """Linear interpolation, one dimension after the other, that copies those whose size stays. PyTorch multiplies these by 1
    and 0 and adds: infinities become NaN.
    """
    for d, n in enumerate(size, 2):
        if n != x.shape[d]:
            lines = x.movedim(d, -1)
            made = torch.ops.aten.upsample_linear1d.default(
                lines.reshape(-1, 1, x.shape[d]), [n], align_corners, *scales[d - 2 : d - 1]
            )
            x = made.reshape(*lines.shape[:-1], n).movedim(-1, d)
    return x.clone()


def _resized_backward(
    func: Any, grad: torch.Tensor, size: Sequence[int], given: Sequence[int], align_corners: bool, *scales: float | None
) -> torch.Tensor:
    """The gradient of `_resized`."""
    for d, n in enumerate(given[2:], 2):
        if n != grad.shape[d]:
            lines = grad.movedim(d, -1)
            flat = lines.reshape(-1, 1, grad.shape[d])
            made = torch.ops.aten.upsample_linear1d_backward.default(
                flat, [grad.shape[d]], [len(flat), 1, n], align_corners, *scales[d - 2 : d - 1]
            )
            grad = made.reshape(*lines.shape[:-1], n).movedim(-1, d)
    return grad.clone()


_LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
_RESIZED: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(_LINEAR, _resized),
    **dict.fromkeys([f"{name}_backward" for name in _LINEAR], _resized_backward),
}


class Disturbed(TorchDispatchMode):
    """Multiplies every computed floating-point number by 1 + units of a precision, at random."""

    def __init__(self, seed: int, amplitude: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)
        self.run, self.index = seed, amplitude
        self.precision = torch.float32
        self.halves = False  # whether values are kept in float16, whatever a step computes in
        self.loudness = 1.0
        self.signs: dict[int, torch.Tensor] = {}  # of the differences that the run's comparisons are of, in their order
        self.compared = 0
        self.rounded = (
            0.0  # how many of the values are rounded to float16, instead of disturbed: what differs becomes equal
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _UNORDERED and func._overloadname != "stable":
            return self.with_any_order(func, args, kwargs or {})
        if name in ("eq", "ne", "logical_not"):
            return self.equality(name, func(*args, **(kwargs or {})), args[0], args[1] if len(args) > 1 else 0)
        if name in _TRUTHS:
            args = tuple(self.truth(a) for a in args)
        if name == "mode" and args[0].ndim:
            return self.with_equals(func, args, kwargs or {})
        if name == "_euclidean_dist":  # squares less twice a product, whose rounding is large where points are near
            with self:
                a, b = args
                squares = a.square().sum(-1, keepdim=True) + b.square().sum(-1, keepdim=True).mT
                return (squares - 2 * (a @ b.mT)).clamp_min(0).sqrt()
        if (
            name == "linalg_cross" and self.index % 2
        ):  # products that are equal may be so exactly, or not in a fused multiply-add
            result = decomposition_table[func](*args, **(kwargs or {}))
            self.disturb(result)
            return result
        if name in _RESIZED and self.index % 2:
            result = _RESIZED[name](func, *args, **(kwargs or {}))
            self.disturb(result)
            return result
        if name.removesuffix("_backward") in _AT_NAN and name.endswith("_backward"):
            return self.at_nan(func, args, *_AT_NAN[name.removesuffix("_backward")])
        if name in _TAKEN_APART:  # what is subtracted is rounded first, and equal numbers become unequal to it
            with self:
                return _TAKEN_APART[name](func, *args, **(kwargs or {}))
        if self.index % 2 and self.precision in HALVES:  # a bound such as hardshrink's 0.3 is rounded too
            args = tuple(float(torch.tensor(a, dtype=self.precision)) if type(a) is float else a for a in args)
        args = tuple(self.as_number(a, name) for a in args)
        result = func(*args, **(kwargs or {}))
        if name == "_to_copy" and result.dtype is torch.bool:
            return self.truth(args[0])
        if name == "_to_copy" and not result.is_floating_point() and args[0].is_floating_point():
            self.undefined(args[0], result)
        writes = func._schema.is_mutable
        adds = name.strip("_") in ("index_put", "index_put_impl", "unsafe_index_put") and True in (
            *args[3:],
            *(kwargs or {}).values(),
        )
        if (name.rstrip("_") in EXACT and not adds) or (name.endswith("_") and name[:-1] in EXACT):
            if not any(r.alias_info is not None for r in func._schema.returns):
                self.store(result)
            return result
        if not writes and any(r.alias_info is not None for r in func._schema.returns):
            return result
        if name not in _FRACTIONS and not any(isinstance(a, torch.Tensor) for a in tree_leaves((args, kwargs))):
            return result
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                size = _size(func, name, args, kwargs or {})
                self.disturb(t, _terms(name, args, t), size, name in _APPROXIMATED)
                self.cancel(t, name, args, size)
                self.sign(t, name)
        return result

    def at_nan(self, func: Any, args: Any, place: int, vectors: float, left: float | None) -> torch.Tensor:
        """The gradient of a function in pieces, whose piece for NaN depends in torch on where the element lies."""
        x = args[place]
        result = func(*args)
        far = func(*args[:place], torch.full_like(x, math.inf), *args[place + 1 :])
        rest = far if left is None else torch.full_like(far, left)
        either = torch.where(torch.rand(result.shape, generator=self.random) < 0.5, rest, vectors)
        result.copy_(torch.where(x.isnan(), either, result))
        if func._schema.name.endswith(("hardswish_backward", "elu_backward")):  # the others copy
            self.disturb(result)
        else:
            self.store(result)
        return result

    def cancel(self, t: torch.Tensor, name: str, args: Any, size: torch.Tensor | None) -> None:
        """In every second run, a difference or sum that is less than a few units of what it is of is 0, as in a device's
        precision, or exactly. size: of a sum's terms."""
        given = args[0]
        if name in ("add", "sub") and isinstance(given, torch.Tensor) and given.is_floating_point():
            size = given.abs()
        elif size is None or size.shape != t.shape:
            return
        if self.index % 2:
            small = t.abs() <= ROUNDED * UNITS[self.precision] * size
            t.copy_(torch.where(small & size.isfinite(), 0.0, t))

    def equality(self, name: str, found: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
        """Numbers whose difference has another sign than in the first run may be equal: in a device's precision they may be rounded
        to the same, which disturbed ones never are. So may those that are a few units apart (as the largest of numbers that are
        nearly equal), in every second run."""
        if not any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in (x, y)):
            return found
        sign = (x - y).sign().nan_to_num(0.0)
        first = self.signs.setdefault(self.compared, sign)
        self.compared += 1
        equal = first * sign < 0 if first.shape == sign.shape else torch.zeros_like(found)
        if self.index % 2 and self.index > 1 and isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            units = max(ROUNDED, 2 * AMPLITUDES[self.precision][self.index])
            equal = equal | ((x - y).abs() <= units * UNITS[self.precision] * x.abs())
        return torch.where(equal, name != "ne", found)

    def truth(self, x: Any) -> Any:
        """Whether a number is not 0, and the number if it is of no real type."""
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return self.equality("ne", x != 0, x, 0)

    def store(self, copied: Any) -> None:
        """A copy of a number is stored in half precision, where the program keeps its values so, or is read where the number was:
        `x.triu() == x` may be false."""
        for t in tree_leaves(copied) if self.halves or self.precision is torch.float16 else ():
            if isinstance(t, torch.Tensor) and t.is_floating_point() and torch.rand((), generator=self.random) < 0.5:
                t.copy_(t.to(torch.float16))

    def undefined(self, x: torch.Tensor, made: torch.Tensor) -> None:
        """Conversions of what no integer is: any integer, in place."""
        beyond = ~(x.abs() < (2.0**63 if made.dtype is torch.int64 else 2.0**31))
        if beyond.any():
            made.copy_(torch.where(beyond, torch.randint(0, 100, x.shape, generator=self.random), made))

    def sign(self, t: torch.Tensor, name: str) -> None:
        """What has no sign to rely on gets one at random, in place: NaN, and zeros that are sums, for a sum may begin
        with 0 or with its first term."""
        none = t.isnan() | (t == 0) if name in _SUMS else t.isnan()
        if none.any():
            ones = torch.randint(0, 2, t.shape, generator=self.random, dtype=t.dtype) * 2 - 1
            t.copy_(torch.where(none, torch.copysign(t, ones), t))

    def as_number(self, a: Any, name: str) -> Any:
        """An integer that a function of real numbers takes is a number like any other there."""
        if name not in _REAL or not isinstance(a, torch.Tensor) or a.is_floating_point():
            return a
        number = a.double()
        self.disturb(number)
        return number

    def with_any_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Equal elements may come in any order: first the first of equals, then the last of equals, then in turn from another one
        on, or any. Those that would be equal had they not been disturbed count too, and elements stay as they are."""
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        x, dim = args[0], given.get("dim", -1)
        away = torch.rand(x.shape, generator=self.random, dtype=torch.float64)
        numbers = x if x.is_floating_point() else x.double()
        if (
            "median" not in func._schema.name
        ):  # infinities and NaN are equal to their like too; a median does not order NaN
            numbers = torch.where(x.isnan(), 1e301, numbers)  # shortened, 2 to the power of 21 larger
        numbers = torch.where(x.isinf(), x.sign() * 1e300, numbers)
        turn = self.run // 1000
        if (self.index < 2 or turn % 3) and x.ndim:  # by turns each element has every place among its equals
            ramp = torch.arange(x.shape[dim]) / max(x.shape[dim], 1)
            ramp = (ramp + turn / 12) % 1 if self.index > 1 else ramp
            away = (ramp if self.index else 1 - ramp).view(-1, *[1] * (x.ndim - 1 - dim % x.ndim)).expand(x.shape)
        if (self.index < 2 or self.rounded) and x.ndim and x.is_floating_point():
            numbers = self.shortened(numbers)
        apart = numbers + away * (numbers.abs() * 2.0**-45 + 1e-40) if x.is_floating_point() else numbers + away / 4
        found = func(apart, *args[1:], **kwargs)
        if not isinstance(found, tuple) or not x.ndim:
            return func(*args, **kwargs)
        at = found[-1]
        values = x.gather(dim, at) if at.ndim == x.ndim else x.gather(dim, at.unsqueeze(dim)).squeeze(dim)
        return values, at

    def with_equals(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Elements that differ by a few units may be equal: which is counted, the result is an element as it is. Its place is the
        first, the last or any of those that are equal."""
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        x, dim, keeps = args[0], given.get("dim", -1), given.get("keepdim", False)
        counted = self.shortened(x) if self.index % 2 and self.index > 1 and x.is_floating_point() else x
        common = func(counted, dim, True)[0]
        equal = (counted == common) | ((counted != counted) & (common != common))
        order = torch.rand(x.shape, generator=self.random)
        if self.index < 2:
            ramp = torch.arange(float(x.shape[dim])) + 1
            order = (ramp if self.index else ramp.flip(0)).view(-1, *[1] * (x.ndim - 1 - dim % x.ndim)).expand(x.shape)
        at = torch.where(equal, order, -1.0).argmax(dim, True)
        values = x.gather(dim, at)
        return (values, at) if keeps else (values.squeeze(dim), at.squeeze(dim))

    def shortened(self, x: torch.Tensor) -> torch.Tensor:
        """With three bits less than the precision has."""
        fraction, exponent = torch.frexp(x)
        scale = 1 / (8 * UNITS[self.precision])
        return torch.ldexp((fraction * scale).round(), exponent) / scale

    def disturb(
        self, t: torch.Tensor, terms: float = 1, size: torch.Tensor | None = None, smooth: bool = False
    ) -> None:
        """In place. terms: of the sums that these are, whose error grows with the root of their number; size: root of the sum of
        their squares, for a sum may be much smaller than what it is made of; smooth: as an approximation of a
        function errs, alike for numbers that are alike, so that sums of many do not even it out (in every second run)."""
        if not t.numel():
            return
        if self.rounded:
            if torch.rand((), generator=self.random) < self.rounded:
                t.copy_(t.to(torch.float16))
            return
        amplitude = self.loudness * AMPLITUDES[self.precision][self.index] * UNITS[self.precision]
        amplitude *= max(1.0, math.sqrt(terms) / 4)  # of 16 terms and fewer, no more than of one
        random = 2 * torch.rand(t.shape, generator=self.random, dtype=torch.float64) - 1
        if smooth and self.index % 2:
            random = torch.sin(8 * t.abs().clamp_min(1e-300).log() + 7 * random.flatten()[0]).nan_to_num(0.0)
        away = amplitude * random
        moved = t * (1 + away)
        if size is not None and size.shape == t.shape:
            moved += away * (size - t.abs()).clamp_min(0).nan_to_num(0.0, 0.0)
        t.copy_(self.stored(moved))

    def stored(self, t: torch.Tensor) -> torch.Tensor:
        """As a type with few exponents may keep it, or may not."""
        if self.precision is not torch.float16:  # denormals are kept or not, above all by functions such as exp
            return torch.where(t.abs() < TINY[self.precision], t * 0, t) if self.index % 2 else t
        away = (2 * torch.rand(t.shape, generator=self.random, dtype=torch.float64) - 1) * TINY[torch.float16]
        t = torch.where((t != 0) & (t.abs() < 2.0**-13), t + away, t)
        return torch.where(t.abs() > 60000, t * float("inf"), t) if self.index % 2 else t


def _terms(name: str, args: Any, result: torch.Tensor) -> float:
    """Of the sums that an operator makes."""
    if name in ("sum", "mean", "nansum"):
        return float(args[0].numel() / max(result.numel(), 1))
    if name in ("mm", "bmm", "mv", "dot"):
        return float(args[0].shape[-1])
    return float(args[1].shape[-1]) if name in ("addmm", "baddbmm", "addmv") else 1.0


def _size(func: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Root of the sum of the squares of the terms of each sum."""
    count = {"sum": 1, "nansum": 1, "mean": 1, "mm": 2, "bmm": 2, "mv": 2, "dot": 2, "convolution": 2}.get(name, 0)
    if name in ("addmm", "baddbmm", "addmv"):
        count = 3
    if not count or not all(isinstance(a, torch.Tensor) and a.dtype is torch.float64 for a in args[:count]):
        return None
    rest = list(args[count:])
    if name == "convolution" and rest[0] is not None:
        rest[0] = rest[0].square()
    squares: torch.Tensor = func(*(a.square() for a in args[:count]), *rest, **kwargs)
    if name == "mean":
        squares = squares / max(args[0].numel() // max(squares.numel(), 1), 1)
    return squares.abs().sqrt()
