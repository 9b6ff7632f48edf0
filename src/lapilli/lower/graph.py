"""Lowers an exported FX graph to the kernel IR, each node by its registered lowering."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from lapilli.errors import CompileError, UnsupportedOperatorError
from lapilli.graph.integers import MULTIPLY, is_exact
from lapilli.graph.module import Module
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Load, cast_to, index, load, narrow, unary
from lapilli.ir.integer import as_int
from lapilli.ir.node import Constant, Graph, Input, Map, Node, Reduce, State, next_id
from lapilli.ir.ranges import are_codes
from lapilli.lower.int64_ranges import Checks
from lapilli.lower.norms import is_inside_norm
from lapilli.lower.pointwise import CONVERSIONS
from lapilli.lower.random import next_numbers
from lapilli.lower.registry import FROM_TORCH, Call, convert, from_torch, lowerings, rounded
from lapilli.lower.torch_sizes import Symbols
from lapilli.player import MAX_RANK

READS_NUMBER = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
"""Operators that read a number from a tensor; the host waits for its value."""


def lower(
    module: Module,
    precision: str = "fp32",
    half_storage: bool = True,
    keyed: bool = False,
    weights: str | None = None,
    checked: bool = False,
    from_host: bool = False,
) -> Graph:
    """The kernel IR of an exported module.

    precision: "fp16" stores constants of two or more dimensions in half precision and, with half_storage, intermediates
    too. weights: how constants are stored, if it differs: also "fp16-exact" or "bf16-exact", as 16 bits those whose numbers they
    hold. keyed: the key of the random numbers is two symbols instead of
    a state. checked: int64 results that may not fit into 32 bits are checked in every run (`Graph.checks`). A placeholder
    with meta["number"] ("float" or "int") is a number that kernels receive as a symbol with its 32 bits. from_host: the host gives
    the inputs. Where intermediates are stored in half precision, it rounds those that only matrix products and convolutions read.

    Raises UnsupportedOperatorError naming every operator that has no lowering.
    """
    stored = STORED[weights or precision]
    half = precision == "fp16" and half_storage
    missing = sorted({str(n.target) for n in module.graph.nodes if is_computed(n) and n.target not in lowerings})
    if missing:
        raise UnsupportedOperatorError(
            f"{len(missing)} operator(s) of this model have no GPU lowering: {', '.join(missing)}. "
            "Replace them in the model, or cut the model before them."
        )
    symbols = Symbols(module.ranges)
    symbols.shared.keyed = keyed
    values: dict[fx.Node, Any] = {}
    inputs: list[Input] = []
    outputs: list[Node] = []
    kept = {state.new for state in module.states.values()}  # not rounded to half precision between runs
    checks = Checks(module.states)
    converted: dict[tuple[Any, torch.dtype] | None, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            given = values[node] = _placeholder(module, node, symbols, stored, inputs)
            checks.given(given)
            if half and from_host and isinstance(given, Input) and _is_multiplied(node):
                values[node] = _in_half(given)
        elif node.op == "call_function":
            first = next_id()
            again = (node.args[0], node.meta["val"].dtype) if node.target in CONVERSIONS and node not in kept else None
            if again in converted:  # autocast inserts a conversion for every use of a value
                values[node] = converted[again]
                continue
            rounded = half and node not in kept and not is_inside_norm(node) and not is_exact(node)
            values[node] = _call(node, values, symbols, rounded)
            if again is not None:
                converted[again] = values[node]
            if checked and is_computed(node):
                checks.computed(node, values[node], [values[n] for n in node.all_input_nodes], first)
        elif node.op == "output":
            outputs = [_as_output(values, arg) for arg in module.outputs]
    stores = [
        (values[node], _as_output(values, state.new)) for node, state in module.states.items() if state.new is not None
    ]
    if symbols.shared.random is not None:
        stores.append(next_numbers(symbols.shared.random))
    shared = symbols.shared
    graph = Graph(inputs, outputs, symbols.known, stores, shared.limits, shared.least, checks.names, checks.limit)
    check = checks.output()
    if check is not None:
        graph.outputs.append(check)
    _widen(graph, half_storage)
    _ranks(graph)
    return graph


def _ranks(graph: Graph) -> None:
    """Raises CompileError for an input, output or state with more dimensions than the player accepts; other values have no
    such limit.
    """
    states = [state for state, _ in graph.stores]
    for what, found in (("Input", graph.inputs), ("Output", graph.outputs), ("State", states)):
        for node in found:
            if node.rank > MAX_RANK:
                raise CompileError(
                    f"{what} {node.name} has {node.rank} dimensions; a program takes and gives at most {MAX_RANK}. "
                    "Flatten some of them before and after."
                )


def _widen(graph: Graph, half_storage: bool) -> None:
    """Stores intermediates of 16-bit types as float32 where a device would have to pack them into words: faster, and
    rounded less.
    """
    results = {n.id for n in graph.results}
    for n in graph.nodes():
        if isinstance(n, Map | Reduce) and n.dtype.is_short_float and n.id not in results and not half_storage:
            n.dtype = DType.float32


def refusals(module: Module) -> dict[fx.Node, str]:
    """Why calls of a module cannot run on the GPU, by call. Each call is lowered on its own; whatever a lowering accepts
    runs.
    """
    symbols = Symbols(module.ranges)
    values: dict[fx.Node, Any] = {}
    reasons: dict[fx.Node, str] = {}
    seen: set[str] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder" and node in module.constants:
            values[node] = _stand_in(module.constants[node], symbols)
        elif node.op != "call_function":
            values[node] = _stand_in(node.meta.get("val"), symbols)
        elif node.target is operator.getitem and node.args[0] not in reasons:
            values[node] = values[node.args[0]][node.args[1]]
        else:
            large = [a for a in node.all_input_nodes if a in module.constants and _is_large(module.constants[a])]
            reason = _LARGE.format(large[0].name) if large else _refusal(node, values, symbols)
            if reason is None and _unbacked(node.meta.get("val")) - seen:
                reason = "the size of its result depends on data"
            if reason is not None:
                reasons[node] = reason
                values[node] = _stand_in(node.meta.get("val"), symbols)
        seen |= _unbacked(node.meta.get("val"))
    return {n: r for n, r in reasons.items() if n.target is not operator.getitem}


_LARGE = "{} has integers that do not fit into the 32 bits in which the GPU computes them"


def _is_large(constant: torch.Tensor) -> bool:
    """Whether a constant has integers that do not fit into 32 bits."""
    if constant.dtype is not torch.int64 or not constant.numel():
        return False
    low, high = constant.aminmax()
    return int(low) < -(2**31) or int(high) >= 2**31


def _places(constant: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
    """The first element and the step along each dimension, if integers are as regular as the numbers of places are: kernels then
    compute them instead of reading them, and know which places a mask leaves.
    """
    if constant.dtype not in (torch.int32, torch.int64) or not constant.numel():
        return None
    first, steps = int(constant.flatten()[0]), []
    for d, size in enumerate(constant.shape):
        line = constant
        for other in reversed(range(constant.dim())):
            line = line if other == d else line.select(other, 0)
        steps.append(int(line[1]) - first if size > 1 else 0)
        if abs(steps[-1]) >= 2**31 or not torch.equal(line, _progression(first, steps[-1], size, constant.dtype)):
            return None
    whole = torch.full_like(constant, first)
    for d, (size, step) in enumerate(zip(constant.shape, steps, strict=True)):
        whole += _progression(0, step, size, constant.dtype).reshape(-1, *(1,) * (constant.dim() - d - 1))
    return (first, tuple(steps)) if torch.equal(whole, constant) else None


def _progression(first: int, step: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) * step + first).to(dtype)


def _unbacked(val: Any) -> set[str]:
    """Names of the data-dependent sizes in a value; torch calls them `u0`, `u1`, ..."""
    listed = val if isinstance(val, list | tuple) else [val]
    numbers: list[Any] = [n for v in listed for n in (list[Any](v.shape) if isinstance(v, torch.Tensor) else [v])]
    found = {a.name for n in numbers if isinstance(n, torch.SymInt) for a in n.node.expr.free_symbols}
    return {name for name in found if name.startswith("u")}


def _refusal(node: fx.Node, values: dict[fx.Node, Any], symbols: Symbols) -> str | None:
    """Lowers a call into `values`. Returns None on success, otherwise the reason for the failure."""
    if node.target in READS_NUMBER:
        return "reads a number on the host"
    if is_computed(node) and node.target not in lowerings:
        return "no GPU lowering"
    for operand in (node, *node.all_input_nodes):
        reason = _type_refusal(operand.meta.get("val"))
        if reason is not None:
            return reason
    try:
        values[node] = _call(node, values, symbols, False)
    except Exception as error:  # any error of a lowering is a reason to run the call elsewhere
        return (
            str(error)
            if isinstance(error, TypeError | UnsupportedOperatorError)
            else f"{type(error).__name__}: {error}"
        )
    return None


def _type_refusal(val: Any) -> str | None:
    """Why a value's type is not supported on the GPU; None if it is."""
    for v in val if isinstance(val, list | tuple) else [val]:
        if isinstance(v, torch.Tensor) and (v.dtype not in FROM_TORCH or v.dtype is torch.float64):
            return f"{str(v.dtype).removeprefix('torch.')} is not supported on the GPU"
    return None


def _stand_in(val: Any, symbols: Symbols) -> Any:
    """A placeholder for a value that is computed elsewhere."""
    if isinstance(val, torch.Tensor):
        if _type_refusal(val) is not None:
            return None
        return Input(tuple(symbols.size(s) for s in val.shape), from_torch(val.dtype), "stand_in", "input")
    if isinstance(val, list | tuple):
        return [_stand_in(v, symbols) for v in val]
    return symbols.size(val) if isinstance(val, torch.SymInt) else val


def is_computed(node: fx.Node) -> bool:
    """Whether a node is a call that returns tensors."""
    return node.op == "call_function" and node.target is not operator.getitem and not is_size(node.meta.get("val"))


def is_size(value: Any) -> bool:
    """Whether a value is a number rather than a tensor."""
    return isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_dense(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (value.is_contiguous() and value.storage_offset() == 0)


STORED: dict[str, tuple[torch.dtype | None, bool]] = {
    "fp32": (None, False),
    "fp16": (torch.float16, False),
    "fp16-exact": (torch.float16, True),
    "bf16-exact": (torch.bfloat16, True),
}
"""The type of constants of two or more dimensions, and whether it is for those alone whose numbers it holds."""


def _placeholder(
    module: Module, node: fx.Node, symbols: Symbols, stored: tuple[torch.dtype | None, bool], inputs: list[Input]
) -> Any:
    constant = module.constants.get(node)
    if constant is not None:
        if _is_large(constant):
            raise TypeError(_LARGE.format(node.name))
        dtype = from_torch(constant.dtype)
        shape = tuple(as_int(s) for s in constant.shape)
        places = _places(constant)
        if places is not None:
            axes, at = fresh_axes(shape)
            first, steps = places
            place = sum((i * step for i, step in zip(at, steps, strict=True)), as_int(first))
            return Map(shape, dtype, node.name, "constant", axes=axes, body=index(place))
        short, exactly = stored
        if (
            short is None
            or dtype is not DType.float32
            or constant.dim() < 2
            or (exactly and not module.holds(node, short))
        ):
            short = None
        value = module.array(node, short)
        # A float64 constant does not promote its readers; operators that compute in float64 declare it.
        if dtype is DType.float64:
            dtype, value = DType.float32, value.astype(np.float32)
        return Constant(shape, dtype if short is None else from_torch(short), node.name, "constant", value=value)
    val = node.meta["val"]
    if "number" in node.meta:
        word = symbols.shared.word(node.name)
        number = unary("as_float", word) if node.meta["number"] == "float" else word
        return Map((), number.dtype, node.name, "number", body=number) if isinstance(val, torch.Tensor) else number
    if node in module.states:
        state = module.states[node]
        dtype = from_torch(state.value.dtype)
        if dtype is DType.float64:
            raise TypeError(
                f"{state.name} is float64, which is not supported on the GPU; convert the model with .float()"
            )
        shape = tuple(as_int(s) for s in val.shape)
        if state.given:
            return State(shape, dtype, state.name, "state", given=True)
        return State(shape, dtype, state.name, "state", value=module.array(node))
    if isinstance(val, torch.SymInt):
        return symbols.size(val)
    if not isinstance(val, torch.Tensor):
        return val
    dtype = from_torch(val.dtype)
    if dtype is DType.float64 and node.users:
        raise TypeError(
            f"{node.name}: float64 is not supported on the GPU; convert the model with .float(), and give this as float32"
        )
    shape = tuple(symbols.size(s) for s in val.shape)
    made = Input(shape, dtype, node.name, "input", index=len(inputs), decoded=node.meta.get("decoded", False))
    inputs.append(made)
    return made


def _is_multiplied(node: fx.Node) -> bool:
    """Whether only matrix products and convolutions read a float32 value."""
    is_float32 = node.meta["val"].dtype is torch.float32
    return is_float32 and bool(node.users) and all(user.target in MULTIPLY for user in node.users)


def _in_half(given: Input) -> Map:
    """An input, rounded to float16 (see `schedule/rounded_inputs.py`)."""
    axes, at = fresh_axes(given.shape)
    body = narrow(load(given, at), DType.float16)
    return Map(given.shape, DType.float16, f"{given.name}_half", "round", axes=axes, body=body)


def _call(node: fx.Node, values: Mapping[fx.Node, Any], symbols: Symbols, half: bool) -> Any:
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt):
        return symbols.size(val)
    if is_size(val):
        return val  # becomes an expression where it is used
    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]  # type: ignore[index]

    results = [v for v in (val if isinstance(val, list | tuple) else [val]) if isinstance(v, torch.Tensor)]
    kinds = {r.dtype for r in results}
    call = Call(
        node.name,
        str(node.target),
        tuple(tuple(symbols.size(s) for s in r.shape) for r in results),
        tuple(from_torch(r.dtype) for r in results),
        half,
        "as_strided" not in str(node.target) or all(_is_dense(n.meta.get("val")) for n in node.all_input_nodes),
        symbols.shared,
        tuple(a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args),
    )
    target: Any = node.target
    args = _argument(node.args, values, symbols, kinds)
    made = lowerings[target](call, *args, **{k: _argument(v, values, symbols, kinds) for k, v in node.kwargs.items()})
    if isinstance(val, list | tuple):
        return [_as_narrow(v, m) for v, m in zip(val, made, strict=False)]
    return _as_codes(node, _as_narrow(val, made))


def _argument(a: Any, values: Mapping[fx.Node, Any], symbols: Symbols, kinds: set[torch.dtype]) -> Any:
    """What a lowering is given for an argument. kinds: the dtypes of the call's results."""
    if isinstance(a, fx.Node):
        return _rounded(a, _as_bools(a, _argument(values[a], values, symbols, kinds)), kinds)
    if isinstance(a, list | tuple):
        return [_argument(x, values, symbols, kinds) for x in a]
    if isinstance(a, torch.SymBool):
        raise TypeError("an argument is a condition on sizes")
    if isinstance(a, torch.SymInt):
        return symbols.size(a)
    return symbols.number(a) if isinstance(a, torch.SymFloat) else a


_FOUR = 4
"""Codes of a word."""
_IMAGES = 4
"""Dimensions of a batch of images."""


def _as_codes(node: fx.Node, made: Any) -> Any:
    """A result that is known to have at most 256 integers takes a byte each, if kernels can store four at a time or it is an image.

    Others are floats.
    """
    limits = node.meta.get("limits")
    if limits is None or not isinstance(made, Map | Reduce):
        return made
    low, high = limits
    channels = made.shape[1] if made.rank > 1 else as_int(1)
    innermost = (channels,) if made.rank >= _IMAGES else (channels, *made.shape[-1:])  # those of images are channels
    fours = any(size % _FOUR == 0 for size in innermost)
    if are_codes(low, high) and (fours or (channels.value or _FOUR) < _FOUR):
        made.dtype, made.least = DType.code, low
    return made


def _as_narrow(val: Any, made: Any) -> Any:
    """A result of a narrow integer type, wrapped to its range, whether a reader loads it from memory or recomputes it.
    16-bit floats are not rounded here, only when they are stored and by `_rounded`.
    """
    if not isinstance(val, torch.Tensor) or not isinstance(made, Map | Reduce) or made.dtype.compute is not DType.int32:
        return made
    axes, at = fresh_axes(made.shape)
    body = convert(load(made, at), from_torch(val.dtype))
    return made if isinstance(body, Load) else Map(made.shape, made.dtype, made.name, made.origin, axes=axes, body=body)


def _as_bools(arg: fx.Node, made: Any) -> Any:
    """Computed bool tensors are stored as integers. An operator must get them as bools, because it treats masks and
    indices, `not` and `bitnot` differently.
    """
    val = arg.meta.get("val")
    if not (isinstance(val, torch.Tensor) and val.dtype is torch.bool and isinstance(made, Node)):
        return made
    if made.dtype is DType.bool:
        return made
    axes, at = fresh_axes(made.shape)
    return Map(made.shape, DType.bool, made.name, made.origin, axes=axes, body=cast_to(load(made, at), DType.bool))


def _rounded(arg: fx.Node, made: Any, kinds: set[torch.dtype]) -> Any:
    """An operand of an operator with results of the types `kinds`. 16-bit floats are computed in float32; where one is used
    in another type, it must first be rounded to its own.
    """
    val = arg.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype in kinds or not isinstance(made, Map | Reduce):
        return made
    dtype = from_torch(val.dtype)
    axes, at = fresh_axes(made.shape)
    read = load(made, at)
    body = rounded(read, dtype)
    return made if body is read else Map(made.shape, dtype, made.name, made.origin, axes=axes, body=body)


def _as_output(values: Mapping[fx.Node, Any], arg: fx.Node) -> Node:
    """The value of an output in torch's dtype, dense, as a Map of its own."""
    node = values[arg]
    dtype = from_torch(arg.meta["val"].dtype)
    if dtype is DType.float64:
        raise TypeError(f"{arg.name} is float64, which is not supported on the GPU")
    axes, at = fresh_axes(node.shape)
    body = cast_to(load(node, at), dtype.compute)
    return Map(node.shape, dtype, f"{node.name}_out", "output", axes=axes, body=body)
