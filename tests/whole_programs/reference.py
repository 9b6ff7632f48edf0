"""What a program means: torch in float64 on the CPU, and how far its results move when every intermediate result is disturbed by
a few units in its last place. Nobody can ask more of a computation in that precision, and a result that jumps (a comparison, a
rounding, an index) has no definite value at all."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whole_programs.generate import run_step
from whole_programs.program import Program, Step, Values

HALVES = (torch.float16, torch.bfloat16)
UNITS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
AMPLITUDES = {
    torch.float32: (1, 2, 4, 8, 16, 16, 16, 16),
    torch.float16: (1, 1, 2, 2, 4, 4, 4, 4),
    torch.bfloat16: (1, 1, 2, 2, 4, 4, 4, 4),
}
"""Units that intermediate results are disturbed by, one after the other."""
RUNS = 8
FACTOR = 4.0
"""A result may differ by so many times what it moved by."""
LOUD = 3
"""Further runs, disturbed FACTOR times as much: what jumps there (a comparison, a rounding, a sign) has no definite value."""
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
_UNORDERED = {"topk", "sort", "kthvalue", "median", "nanmedian"}
"""Operators that leave open which of several equal elements they take."""


_SUMS = {
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
    "nll_loss_forward",
    "nll_loss2d_forward",
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


_TAKEN_APART: dict[str, Callable[..., Any]] = {
    "var": _unbiased(lambda m: m[0]),
    "std": _unbiased(lambda m: m[0].sqrt()),
    "var_mean": _unbiased(lambda m: m),
    "std_mean": _unbiased(lambda m: (m[0].sqrt(), m[1])),
}
for _name in (
    "native_layer_norm", "native_group_norm", "native_batch_norm", "native_layer_norm_backward",
    "native_group_norm_backward", "native_batch_norm_backward", "linalg_cross", "_softmax_backward_data",
    "_log_softmax_backward_data",
):  # fmt: skip
    _TAKEN_APART[_name] = lambda func, *args, **kwargs: decomposition_table[func](*args, **kwargs)


class Disturbed(TorchDispatchMode):
    """Multiplies every computed floating-point number by 1 + units of a precision, at random."""

    def __init__(self, seed: int, amplitude: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)
        self.run, self.index = seed, amplitude
        self.precision = torch.float32
        self.loudness = 1.0
        self.rounded = (
            0.0  # how many of the values are rounded to float16, instead of disturbed: what differs becomes equal
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _UNORDERED and func._overloadname != "stable":
            return self.with_any_order(func, args, kwargs or {})
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
        if name in _TAKEN_APART:  # what is subtracted is rounded first, and equal numbers become unequal to it
            with self:
                return _TAKEN_APART[name](func, *args, **(kwargs or {}))
        args = tuple(self.as_number(a, name) for a in args)
        result = func(*args, **(kwargs or {}))
        if name == "_to_copy" and not result.is_floating_point() and args[0].is_floating_point():
            self.undefined(args[0], result)
        writes = func._schema.is_mutable
        adds = name.strip("_") in ("index_put", "index_put_impl", "unsafe_index_put") and True in (
            *args[3:],
            *(kwargs or {}).values(),
        )
        if (name.rstrip("_") in EXACT and not adds) or (name.endswith("_") and name[:-1] in EXACT):
            return result
        if not writes and any(r.alias_info is not None for r in func._schema.returns):
            return result
        if not any(isinstance(a, torch.Tensor) for a in tree_leaves((args, kwargs))):
            return result
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.disturb(t, _terms(name, args, t), _size(func, name, args, kwargs or {}), name in _APPROXIMATED)
                self.sign(t, name)
        return result

    def undefined(self, x: torch.Tensor, made: torch.Tensor) -> None:
        """Conversions of what no integer is: any integer, in place."""
        if made.dtype is torch.bool:
            return
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
        """Equal elements may come in any order: first the first of equals, then the last of equals, then any. Those that would be
        equal had they not been disturbed count too, and elements stay as they are."""
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        x, dim = args[0], given.get("dim", -1)
        away = torch.rand(x.shape, generator=self.random, dtype=torch.float64)
        numbers = x if x.is_floating_point() else x.double()
        if (
            "median" not in func._schema.name
        ):  # infinities and NaN are equal to their like too; a median does not order NaN
            numbers = torch.where(x.isnan(), 1e305, numbers)
        numbers = torch.where(x.isinf(), x.sign() * 1e300, numbers)
        if self.index < 2 and x.ndim:
            ramp = torch.arange(x.shape[dim]) / max(x.shape[dim], 1)
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
        counted = self.shortened(x) if self.index % 2 and x.is_floating_point() else x
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


def _meant(step: Step) -> str:
    """The text of a call where float64 stands for every floating-point type."""
    found = re.fullmatch(r"\{0\}\.to\(torch\.(float16|bfloat16)\)", step.text)
    if found:
        return f"{{0}}.to(torch.{found[1]}).to(torch.float64)"
    return step.text.replace("torch.float32", "torch.float64").replace(".float()", ".double()")


@dataclass(frozen=True)
class Expected:
    """Results in float64, and by how much others may differ from them, element by element (inf: by anything). logical: the
    dtype that torch gives."""

    value: torch.Tensor
    bound: torch.Tensor
    logical: torch.dtype
    shape: tuple[int, ...]


def native(program: Program, values: Values) -> tuple[list[torch.Tensor], Values]:
    """torch's own results in the program's types; the values are changed. And all values, by name, at the end."""
    env = dict(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in program.steps:
            env.update(zip(step.out, run_step(step, env), strict=False))
    return [env[name] for name in program.outputs], env


Run = Callable[[Values, "Disturbed | None"], list[torch.Tensor]]


def forward(program: Program, n: int) -> tuple[Run, Values, list[torch.dtype], list[torch.Tensor]]:
    """How to run a program in float64, on what; the types and values torch itself gives: of the outputs, then of the arguments
    as they are afterwards."""
    values = program.make(n)
    types: list[set[torch.dtype]] = []
    env = dict(values)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for step in program.steps:
            made = run_step(step, env)
            env.update(zip(step.out, made, strict=False))
            types.append({t.dtype for t in (*made, *(env[a] for a in step.args))})
    names = [*program.outputs, *(leaf.name for leaf in program.arguments)]
    plain = [env[name] for name in names]

    def run(env: Values, mode: Disturbed | None) -> list[torch.Tensor]:
        env = dict(env)
        for step, kinds in zip(program.steps, types, strict=True):
            if mode is not None and mode.precision is torch.float32:
                mode.precision = next((k for k in (torch.bfloat16, torch.float16) if k in kinds), torch.float32)
                env.update(zip(step.out, run_step(step, env, text=_meant(step)), strict=False))
                mode.precision = torch.float32
            else:
                env.update(zip(step.out, run_step(step, env, text=_meant(step)), strict=False))
        return [env[name] for name in names]

    return run, program.make(n), [t.dtype for t in plain], plain  # steps may have changed the first ones in place


def widened(values: Values) -> Values:
    """Copies in float64, the same tensors where they were the same."""
    made: dict[int, torch.Tensor] = {}
    for t in values.values():
        if id(t) not in made:
            copied = t.clone() if not t.is_floating_point() else t.to(torch.float64)
            made[id(t)] = copied if copied is not t else t.clone()
    return {name: made[id(t)] for name, t in values.items()}


def expected(program: Program, n: int, half: bool = False) -> list[Expected]:
    """Of the outputs, then of the arguments after the run. half: everything may be stored in float16."""
    run, values, types, plain = forward(program, n)
    return _spread(run, values, types, plain, half, program, torch.float32)


def _spread(
    run: Run,
    values: Values,
    types: Sequence[torch.dtype],
    plain: Sequence[torch.Tensor],
    half: bool,
    program: Program,
    least: torch.dtype,
) -> list[Expected]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        # attention as products and a softmax, each of which is disturbed
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            exact = [t.detach() for t in run(widened(values), None)]
            moved, loud = [], []
            # Numbers with equals among them: where they are disturbed too, jumps do not count.
            whole = {leaf.name for leaf in program.leaves if leaf.kind in ("ties", "literal") and not half}
            few = RUNS * (2 if torch.bfloat16 in types else 1)  # which moves by rare, large steps
            rounding = range(few, few + 6 * half)  # all, then some; equals in their order, in the reverse, and in any
            definite = few + len(rounding)  # runs whose jumps count
            quiet = definite + 4 if whole else definite
            for k in range(quiet + LOUD):
                place = (0, 1, RUNS - 1)[(k - few) % 3] if k in rounding else k
                mode = Disturbed(1000 * k + 7, min(place, RUNS - 1))
                mode.rounded = 0.0 if k not in rounding else 1.0 if k < few + 3 else 0.5
                mode.loudness = 1 if k < quiet else FACTOR
                mode.precision = torch.float16 if half and least is torch.float32 else least
                given = widened(values)
                done: set[int] = set()
                for name, t in given.items():
                    same = k < 2 or (name in whole and not definite <= k < quiet)
                    if t.is_floating_point() and not same and id(t) not in done:
                        mode.disturb(t)
                        done.add(id(t))
                with mode:
                    (moved if k < quiet else loud).append([t.detach() for t in run(given, mode)])
    finally:
        torch.set_default_dtype(default)
    results = []
    for k, (value, logical, own) in enumerate(zip(exact, types, plain, strict=True)):
        others = [m[k] for m in moved]
        if not value.is_floating_point():
            bound = torch.zeros(value.shape, dtype=torch.float64)
            for other in [*others[:definite], *(m[k] for m in loud), own]:
                bound[(other != value) if other.shape == value.shape else ...] = float("inf")
        else:
            bound = torch.zeros(value.shape, dtype=torch.float64)
            largest = value[value.isfinite()].abs().max() if value.isfinite().any() else value.new_zeros(())
            for run_number, other in enumerate(others):
                apart = (other - value).abs()
                same = (other == value) | (other.isnan() & value.isnan())
                if run_number >= definite:
                    same |= ~(apart < largest * 1000 * UNITS[least])
                bound = torch.maximum(bound, torch.where(same, 0.0, apart.nan_to_num(nan=float("inf"))))
            stored = torch.float16 if half and logical is torch.float32 else logical
            # A few draws may all be small for one element: its neighbours say what to expect.
            usual = bound[bound.isfinite()].median() if bound.isfinite().any() else bound.new_zeros(())
            bound = (
                torch.maximum(FACTOR * bound, usual)
                + value.abs().nan_to_num(posinf=0.0) * 4 * UNITS[stored]
                + TINY[stored] * 4
            )
            if logical in HALVES:
                bound += value.abs().nan_to_num(posinf=0.0) * UNITS[logical]
            for other in (m[k] for m in loud):
                jumps = ~_within(other, value, 16 * bound)
                bound[jumps] = float("inf")
            # Where torch itself is elsewhere in these types, the disturbances have missed something.
            unlike = ~_within(own.detach().double(), value, bound)
            bound[unlike] = float("inf")
        results.append(Expected(value, bound, logical, tuple(own.shape)))
    return results


def _within(found: torch.Tensor, value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    same = (found == value) | (found.isnan() & value.isnan())
    return same | ((found - value).abs() <= bound) | (bound == float("inf"))


def complaint(found: Any, wanted: Expected, what: str) -> str | None:
    """What is wrong with a result; None when nothing is."""
    if not isinstance(found, torch.Tensor):
        return f"{what} is {type(found).__name__}"
    if tuple(found.shape) != wanted.shape:
        return f"{what} has shape {tuple(found.shape)}, torch's has {wanted.shape}"
    if found.dtype != wanted.logical:
        return f"{what} is {found.dtype}, torch's is {wanted.logical}"
    if wanted.value.shape != wanted.shape:
        return None
    found = found.detach().cpu()
    if not wanted.value.is_floating_point():
        wrong = (found != wanted.value) & (wanted.bound == 0)
    else:
        wrong = ~_within(found.double(), wanted.value, wanted.bound)
    if not wrong.any():
        return None
    place = tuple(int(k) for k in wrong.nonzero()[0])
    return (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {place}: {found[place].item()!r} for "
        f"{wanted.value[place].item()!r} ± {float(wanted.bound[place]):.2g}"
    )


# Gradients


def weights_for(tensors: Sequence[torch.Tensor], level: int) -> list[torch.Tensor]:
    """Eighths in [0.5, 1.5] for each, to be multiplied with it: every type has them."""
    made = []
    for k, t in enumerate(tensors):
        random = torch.Generator().manual_seed(100 * level + k)
        made.append((torch.randint(4, 13, t.shape, generator=random) / 8).to(t.device, t.dtype))
    return made


def differentiable(program: Program) -> list[str]:
    """The leaves that gradients are taken for."""
    given = {name for pair in program.twice for name in pair}
    return [
        x.name
        for x in program.leaves
        if x.dtype in ("float32", "float16", "bfloat16") and x.name not in given and x.layout != "expanded"
    ]


Function = Callable[..., Sequence[torch.Tensor]]


def gradients(f: Function, leaves: Sequence[torch.Tensor], places: Sequence[int], order: int) -> list[torch.Tensor]:
    """Of the weighted sum of a function's floating-point results for some of its arguments; of second order, the gradient of the
    weighted sum of these. Zeros where nothing depends on one."""
    given = [t.detach().clone().requires_grad_(k in places) for k, t in enumerate(leaves)]
    wanted = [given[k] for k in places]
    outs: list[torch.Tensor | None] = [t for t in f(*given) if t.is_floating_point()]
    for level in range(order):
        full = [t if t is not None else x for t, x in zip(outs, wanted, strict=True)] if level else outs
        pairs = [
            (t, w) for t, w in zip(outs, weights_for(full, level), strict=True) if t is not None and t.requires_grad
        ]
        if not pairs:
            break
        seen, weights = zip(*pairs, strict=True)
        more = level + 1 < order
        # The second time too: after a change through a view, torch reads what it saved twice, and whether before it is let go of
        # depends on the thread (CUDA has that as well). Compiled graphs do not allow it.
        outs = list(torch.autograd.grad(seen, wanted, weights, order > 1, create_graph=more, allow_unused=True))
        if level + 1 == order:
            return [torch.zeros_like(x) if t is None else t for t, x in zip(outs, wanted, strict=True)]
    return [torch.zeros_like(x) for x in wanted]


def _overlaps(t: torch.Tensor) -> bool:
    """Whether windows of `unfold` overlap: AOTAutograd (aot_eager too) gives other gradients where such a view is a result."""
    moved = [(size, step) for size, step in zip(t.shape, t.stride(), strict=True) if step]
    return math.prod(size for size, _ in moved) > 1 + sum((size - 1) * step for size, step in moved)


def with_derivatives(program: Program, order: int) -> Program | None:
    """The part of a program whose results torch has gradients of: one operator without a derivative would spoil the rest.
    None where there is none."""

    def has(candidate: Program) -> bool:
        names, wanted = [leaf.name for leaf in candidate.leaves], differentiable(candidate)

        def whole(*leaves: torch.Tensor) -> list[torch.Tensor]:
            return native(candidate, dict(zip(names, (t.clone() for t in leaves), strict=True)))[0]

        try:
            for n in candidate.sizes:
                gradients(whole, list(candidate.make(n).values()), [names.index(name) for name in wanted], order)
        except (RuntimeError, NotImplementedError):
            return False
        return bool(wanted)

    def only(outputs: Sequence[str]) -> Program:
        return replace(program, outputs=tuple(outputs)).used()

    made = dict(zip(program.outputs, native(program, program.make(program.sizes[0]))[0], strict=True))
    dense = [name for name in program.outputs if not _overlaps(made[name])]
    if len(dense) < len(program.outputs):
        program = only(dense)
    if program.outputs and has(program):
        return program
    part = only([name for name in program.outputs if has(only([name]))])
    return part if part.outputs and has(part) else None


def expected_gradients(program: Program, n: int, order: int) -> list[Expected] | None:
    """None where torch has none."""
    names = differentiable(program)
    if not names:
        return None
    values = program.make(n)
    all_names = [leaf.name for leaf in program.leaves]
    places = [all_names.index(name) for name in names]
    run, _, types, _ = forward(program, n)
    seen = set(types) | {t.dtype for t in values.values()}
    env = native(program, program.make(n))[1]
    seen |= {t.dtype for t in env.values() if isinstance(t, torch.Tensor)}
    least = next((k for k in (torch.bfloat16, torch.float16) if k in seen), torch.float32)

    def whole(*leaves: torch.Tensor) -> list[torch.Tensor]:
        fresh = dict(zip(all_names, (t.clone() for t in leaves), strict=True))
        return native(program, fresh)[0]

    try:
        plain = gradients(whole, list(values.values()), places, order)
    except (RuntimeError, NotImplementedError):
        return None

    def differentiated(env: Values, mode: Disturbed | None) -> list[torch.Tensor]:
        def f(*leaves: torch.Tensor) -> list[torch.Tensor]:
            fresh = dict(zip(all_names, (t.clone() for t in leaves), strict=True))
            kept = mode.precision if mode is not None else None
            made = run(fresh, mode)[: len(program.outputs)]
            if mode is not None and kept is not None:
                mode.precision = kept
            return made

        return gradients(f, [env[name] for name in all_names], places, order)

    try:
        return _spread(differentiated, values, [t.dtype for t in plain], plain, False, program, least)
    except (RuntimeError, NotImplementedError):
        return None
