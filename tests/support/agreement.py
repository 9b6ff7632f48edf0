"""How tests compare what we compute with torch: graphs of single operator calls, samples of operators, measures of error."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import opinfo
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lapilli.code_operators import DECODERS, QUANTIZE
from lapilli.compiler import assemble
from lapilli.graph.module import Module
from lapilli.ir import interpret
from lapilli.lower import lower, lowerings
from lapilli.runtime.host import OWN
from lapilli.runtime.program import Program
from lapilli.target import TARGETS

Array = NDArray[Any]
FLOAT_BOUND = 1e-5  # relative error (norm) that fp32 results may have
RANDOM = [o for o, f in lowerings.items() if f.__module__ == "lapilli.lower.random"]
COMPARABLE = [o for o in lowerings if o not in RANDOM and "empty" not in o._schema.name]
"""Operators that have a definite result: not random numbers (see test_random.py), not uninitialised memory."""


@dataclass(frozen=True)
class Case:
    """A call of an operator overload, arguments as torch.export writes them."""

    overload: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> list[torch.Tensor]:
        """torch's results, after a conversion of the tensor arguments."""
        args, kwargs = tree_map(lambda a: convert(a) if isinstance(a, torch.Tensor) else a, (self.args, self.kwargs))
        with torch.no_grad():
            return [t for t in tree_flatten(self.overload(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [a for a in tree_flatten((self.args, self.kwargs))[0] if isinstance(a, torch.Tensor)]

    def __repr__(self) -> str:
        def show(a: Any) -> Any:
            return f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" if isinstance(a, torch.Tensor) else a

        return f"{self.overload}{tree_map(show, self.args)}{tree_map(show, self.kwargs) if self.kwargs else ''}"


class Function(torch.nn.Module):
    """A module around a function, whose last arguments are these weights."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.names = tuple(f"w{k}" for k in range(len(weights)))
        for name, weight in zip(self.names, weights, strict=True):
            self.register_buffer(name, weight)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args, *(getattr(self, name) for name in self.names))


def module_of(cases: Sequence[Case]) -> Module:
    """A module that makes every call; its inputs are the tensors of all calls in order."""
    graph = fx.Graph()
    places: list[list[fx.Node]] = []
    for n, case in enumerate(cases):
        row = []
        for k, tensor in enumerate(case.tensors):
            node = graph.placeholder(f"x{n}_{k}")
            node.meta["val"] = tensor
            row.append(node)
        places.append(row)
    outputs: list[fx.Node] = []
    for case, row in zip(cases, places, strict=True):
        given = iter(row)
        args, kwargs = tree_map(
            lambda a, given=given: next(given) if isinstance(a, torch.Tensor) else a, (case.args, case.kwargs)
        )
        call = graph.call_function(case.overload, tuple(args), kwargs)
        with torch.no_grad():
            result = case.overload(*case.args, **case.kwargs)
        call.meta["val"] = result
        if isinstance(result, torch.Tensor):
            outputs.append(call)
            continue
        for k, part in enumerate(result):
            if isinstance(part, torch.Tensor) and not _is_unused(case.overload, k):
                item = graph.call_function(operator.getitem, (call, k))
                item.meta["val"] = part
                outputs.append(item)
    graph.output(tuple(outputs))
    return Module(graph, {}, outputs, {}, {}, {})


# Operators whose results from this position on only a backward pass reads.
_FOR_BACKWARD = {"_embedding_bag": 1, "_embedding_bag_forward_only": 1, "_linalg_det": 1, "_linalg_slogdet": 2}


def _is_unused(overload: torch._ops.OpOverload, position: int) -> bool:
    """Results that only a backward pass reads."""
    name = overload._schema.name
    return name.startswith("aten::") and position >= _FOR_BACKWARD.get(name.removeprefix("aten::"), position + 1)


def inputs_of(cases: Sequence[Case]) -> list[Array]:
    return [t.numpy() for case in cases for t in case.tensors]


def expected(
    cases: Sequence[Case], convert: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
) -> list[torch.Tensor]:
    """torch's results of all calls, those that only a backward pass reads left out."""
    found = []
    for case in cases:
        found += [t for k, t in enumerate(case(convert)) if not _is_unused(case.overload, k)]
    return found


def through_interpreter(cases: Sequence[Case]) -> list[Array]:
    """Results of the kernel IR run by NumPy."""
    return interpret.run(lower(module_of(cases)), inputs_of(cases))


def on_device(cases: Sequence[Case], target: str) -> list[Array]:
    """Results of kernels on the default device, by one plan."""
    data, _ = assemble(module_of(cases), "fp32", [TARGETS[target]])
    with Program(data, permission=OWN) as program:
        return program.run_flat(inputs_of(cases))


def relative_error(got: Any, want: Any) -> float:
    """Norm of the difference over the norm of what is wanted, over places where that is finite; NaN and infinity must be
    in the same places."""
    a, b = np.asarray(got), np.asarray(want)
    assert a.shape == b.shape, f"shape {a.shape} instead of {b.shape}"
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(y)
    np.testing.assert_array_equal(x[~finite], y[~finite])
    size = float(np.linalg.norm(y[finite]))
    difference = float(np.linalg.norm(x[finite] - y[finite]))
    return difference / size if size else difference


def assert_agree(got: Sequence[Array], want: Sequence[torch.Tensor], bound: float = FLOAT_BOUND) -> None:
    """Integers and booleans are equal; floats agree to a relative error, in norm."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.numpy().dtype
        if theirs.dtype.is_floating_point:
            error = relative_error(ours, theirs)
            assert error <= bound, f"relative error {error:.3g} over {bound:.3g}"
        else:
            np.testing.assert_array_equal(ours, theirs.numpy())


# -- samples of operators, from torch's own tests

# Operators that torch's samples reach under another name.
_REACHED_BY = {
    "_adaptive_avg_pool2d": "nn.functional.adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "nn.functional.adaptive_avg_pool3d",
    "_log_softmax": "log_softmax",
    "_native_batch_norm_legit_no_training": "nn.functional.batch_norm",
    "_prelu_kernel": "nn.functional.prelu",
    "_softmax": "softmax",
    "_to_copy": "to",
    "_unsafe_view": "matmul",
    "alias": "view_as_real",
    "convolution": "nn.functional.conv_transpose2d",
    "detach": "clone",
    "max_pool2d_with_indices": "nn.functional.max_pool2d",
    "max_pool3d_with_indices": "nn.functional.max_pool3d",
    **{f"reflection_pad{n}d": "nn.functional.pad" for n in (1, 2, 3)},
    **{f"replication_pad{n}d": "nn.functional.pad" for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d": "nn.functional.interpolate" for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": "nn.functional.interpolate" for n in (1, 2, 3)},
    "upsample_bilinear2d": "nn.functional.interpolate",
    "upsample_linear1d": "nn.functional.interpolate",
    "upsample_trilinear3d": "nn.functional.interpolate",
}


class _Recorder(TorchDispatchMode):
    """Keeps the calls of one overload."""

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        super().__init__()
        self.overload = overload
        self.cases: list[Case] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.overload:
            self.cases.append(Case(func, tuple(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def samples(overload: torch._ops.OpOverload, dtype: torch.dtype, limit: int) -> list[Case]:
    """Up to `limit` calls of an overload in torch's own samples, spread over them."""
    chosen = _calls(overload, dtype)[: 12 * limit] if overload not in ONLY_OURS else []
    step = max(1, len(chosen) // limit)
    return chosen[::step][:limit]


@cache
def _calls(overload: torch._ops.OpOverload, dtype: torch.dtype) -> list[Case]:
    """Calls of an overload in torch's own samples, up to 72 and a few."""
    packet = overload._schema.name.split("::")[1]
    names = (packet, f"nn.functional.{packet}", packet.replace("special_", "special."))
    infos = [info for name in dict.fromkeys(names) for info in opinfo.by_operator().get(name, [])]
    if not infos and packet in _REACHED_BY:
        infos = opinfo.by_operator().get(_REACHED_BY[packet], [])
    found: dict[str, Case] = {}
    for info in infos:
        if dtype not in info.supported_dtypes("cpu"):
            continue
        for sample in itertools.islice(opinfo.samples(info, dtype), 150):
            args, kwargs = (
                (sample.input, *sample.args),
                {k: v for k, v in sample.kwargs.items() if k != "return_indices"},
            )
            for case in _cases(overload, info, args, kwargs):
                if _is_usable(case):
                    found.setdefault(repr(case), case)
            if len(found) >= 72:
                break
    return list(found.values())


def _cases(overload: torch._ops.OpOverload, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Case]:
    direct = _bind(overload, args, kwargs)
    if direct is not None:
        yield direct
        return
    recorder = _Recorder(overload)
    try:
        with recorder, torch.no_grad():
            info.op(*args, **kwargs)
    except (RuntimeError, ValueError, NotImplementedError):
        return
    yield from recorder.cases


def _bind(overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case | None:
    """The call with arguments in their places, as torch.export writes it; None when the overload does not take them."""
    schema = overload._schema
    try:
        name = torch._C._jit_resolve_packet(schema.name, *args, **kwargs)
    except RuntimeError:
        return None
    if (name or "default") != overload._overloadname:
        return None
    positional = [a for a in schema.arguments if not a.kwarg_only]
    if len(args) > len(positional):
        return None
    values = dict(zip([a.name for a in positional], args, strict=False)) | kwargs
    placed = []
    for a in positional:
        if a.name not in values and not a.has_default_value():
            return None
        placed.append(values.pop(a.name, a.default_value if a.has_default_value() else None))
    while (
        placed
        and positional[len(placed) - 1].has_default_value()
        and _same(placed[-1], positional[len(placed) - 1].default_value)
    ):
        placed.pop()
    case = Case(overload, tuple(placed), values)
    try:
        case()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
        return None
    return case


def _same(a: Any, b: Any) -> bool:
    return not isinstance(a, torch.Tensor) and type(a) is type(b) and a == b


# Operators that may choose any of several equal elements, in torch too.
_OPEN = ("sort", "argsort", "topk", "kthvalue", "median", "nanmedian", "mode")


# Operators whose results may have other signs: their tests are in test_indexing.py.
_SIGNS_OPEN = ("_linalg_svd", "_linalg_eigh")


def _is_open(case: Case) -> bool:
    """Whether torch leaves open which of several results is right, or where the memory of an argument begins."""
    packet = case.overload._schema.name.split("::")[1]
    parts = packet.startswith("as_strided") and not all(
        t.is_contiguous() and not t.storage_offset() for t in case.tensors
    )
    return _has_ties(case) or packet in _SIGNS_OPEN or parts


def _has_ties(case: Case) -> bool:
    packet = case.overload._schema.name.split("::")[1]
    stable = case.overload._overloadname == "stable"
    return packet in _OPEN and not stable and case.tensors[0].unique().numel() < case.tensors[0].numel()


_TYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32}


def _is_usable(case: Case) -> bool:
    """Whether the GPU has the types (no float64, no complex), the sizes are those of a test, and nothing is drawn."""
    names = [a.name for a in case.overload._schema.arguments]
    if (dict(zip(names, case.args, strict=False)) | case.kwargs).get("dropout_p"):
        return False
    results = case()
    return (
        bool(results)
        and not _is_open(case)
        and all(
            t.dtype in _TYPES and t.numel() <= 20000 and t.layout is torch.strided for t in [*case.tensors, *results]
        )
    )


ONLY_FLOAT = {
    getattr(getattr(torch.ops.aten, name), kind)
    for name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
                 "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    for kind in ("default", "vec")
}  # fmt: skip
ONLY_OURS = {torch.ops.aten._int_mm.default, *DECODERS, QUANTIZE}
"""Operators of codes, of which calls with any other numbers mean nothing."""
NOT_HALF = {torch.ops.aten.nextafter.default}


def check_half(got: Sequence[Any], cases: Sequence[Case]) -> None:
    """Against float64, half-precision results are no worse than torch's own, with a floor of one rounding of a half (2^-11):
    torch may hit the nearest number by luck, and whoever rounds once can be off by that much."""
    exact = expected(cases, lambda t: t.double() if t.is_floating_point() else t)
    for ours, half, best in zip(got, expected(cases), exact, strict=True):
        if half.is_floating_point():
            finite = torch.isfinite(half.double()) == torch.isfinite(best)  # where half overflows, so may we
            theirs = relative_error(half.double()[finite], best[finite])
            assert relative_error(ours[finite.numpy()], best[finite]) <= max(theirs, 2**-11)
        else:
            np.testing.assert_array_equal(ours, half.numpy())


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -3.0, 1e30, float("inf"), float("-inf"), float("nan")])
