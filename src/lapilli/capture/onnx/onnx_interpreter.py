"""Runs an ONNX graph on torch's tensors: fake ones under torch.export, or real ones.

What is known at capture is computed at capture: a node whose inputs are constants gives constants, and one whose inputs are numbers
and symbols gives numbers and symbols, where it has a rule for them.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.onnx.onnx_casts import wrapped
from lapilli.capture.onnx.onnx_graph import OnnxGraph, OnnxNode
from lapilli.capture.onnx.onnx_registry import OPERATORS, SYMBOLIC, OnnxCall
from lapilli.capture.onnx.onnx_values import ConstantTensor, Numbers, array, is_small, numbers
from lapilli.errors import CompileError

Environment = MutableMapping[str, Any]

_SYM_ITE: Any = torch.sym_ite  # which has no types

MOST_CALLS = 1 << 18
"""Nodes that one capture computes, each turn of an unrolled loop counted."""
MOST_FOLDED = 1 << 24
"""Elements that a node which makes a tensor larger may have and still be computed at capture."""

_GROWING = frozenset(
    {"CenterCropPad", "ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"}
)
_NOT_FOLDED = frozenset(
    {
        "Bernoulli",
        "DequantizeLinear",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
"""Random operators, and what makes integers floats: the compiler decides whether to store those."""
_PASS_ANYTHING = frozenset({"If", "Loop", "Scan", "Identity", "Optional", "OptionalHasElement", "OptionalGetElement"})


class OnnxInterpreter:
    """buffer: gives the module's buffer of a name. kinds: element types of values that are computed in wider dtypes."""

    def __init__(self, buffer: Callable[[str], torch.Tensor], kinds: Mapping[str, int]) -> None:
        self.buffer, self.kinds = buffer, kinds
        self.calls = 0
        self.placed: list[Callable[[ConstantTensor], torch.Tensor | None]] = []
        """Inside a branch or a loop body: where constants come from."""
        self._tensors: dict[int, tuple[ConstantTensor, torch.Tensor]] = {}

    def graph(self, graph: OnnxGraph, values: Sequence[Any], outer: Environment | None = None) -> list[Any]:
        """The outputs of a graph for its inputs. outer: values of the graphs around it."""
        env: Environment = dict(zip((x.name for x in graph.inputs), values, strict=True))
        if outer is not None:
            env = ChainMap(env, *(outer.maps if isinstance(outer, ChainMap) else [outer]))
        env.update({name: ConstantTensor(t, None) for name, t in graph.constants.items() if name not in env})
        for node in graph.nodes:
            self._node(node, env)
        return [env[name] if name else None for name in graph.outputs]

    def _node(self, node: OnnxNode, env: Environment) -> None:
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise CompileError(f"unrolled, the loops of this model have more than {MOST_CALLS} calls")
        try:
            results = self._results(node, [env[name] if name else None for name in node.inputs], env)
        except CompileError as error:
            if not error.located:
                error = CompileError(f"node {node.shown}: {error}")
                error.located = True
            raise error from None
        except GuardOnDataDependentSymNode as error:
            raise CompileError(
                f"node {node.shown}: sizes depend on the values of a tensor ({error.cond}), which are not known before the program "
                "runs. If an input decides them, give its example as a list of Python's numbers: that compiles it in"
            ) from error
        except (
            ValueError,
            IndexError,
            TypeError,
            RuntimeError,
            KeyError,
            AssertionError,
            NotImplementedError,
        ) as error:
            raise CompileError(f"node {node.shown}: {str(error).strip() or type(error).__name__}") from error
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                env[name] = result

    def _results(self, node: OnnxNode, values: list[Any], env: Environment) -> Sequence[Any]:
        call = OnnxCall(node, values, self)
        rule = OPERATORS[node.domain, node.op]
        if node.domain == "" and node.op in _PASS_ANYTHING:
            result = rule(call, env)
            return result if isinstance(result, tuple) else (result,)
        deciding = values[:1] if node.op == "CastLike" else values  # of the other input it is the type that matters
        known = all(v is None or isinstance(v, ConstantTensor | Numbers) for v in deciding)
        symbols = any(isinstance(v, Numbers) for v in values)
        if symbols and not node.domain and node.op in SYMBOLIC and all(map(_is_numbers, values)):
            made = SYMBOLIC[node.op](call, *(None if v is None else numbers(v).array for v in values))
            if made is not None:
                return tuple(simplified(m) for m in (made if isinstance(made, tuple) else (made,)))
        if known and node.op not in _NOT_FOLDED and all(not isinstance(v, Numbers) for v in deciding):
            folded = self._folded(call, rule)
            if folded is not None:
                return folded
        tensors = [self.tensor(v) for v in values]
        return self._finished(call, rule(call, *tensors))

    def _finished(self, call: OnnxCall, result: Any) -> Sequence[Any]:
        """The outputs, those of narrow types reduced to their range."""
        results = result if isinstance(result, tuple) else (result,)
        kinds = [self.kinds.get(name) for name in call.node.outputs]
        return tuple(
            wrapped(r, kind) if kind is not None and isinstance(r, torch.Tensor) else r
            for r, kind in zip(results, [*kinds, *[None] * len(results)], strict=False)
        )

    def _folded(self, call: OnnxCall, rule: Any) -> Sequence[Any] | None:
        """The constants that a node with constant inputs gives; None if they are to be computed by the program."""
        values = [v.tensor if isinstance(v, ConstantTensor) else v for v in call.values]
        with _disable_current_modes():
            if call.node.op in _GROWING and _elements(rule, call, values) > MOST_FOLDED:
                return None
            results = self._finished(call, rule(call, *values))
            return tuple(_constant(r, call) for r in results)

    def tensor(self, value: Any) -> Any:
        """A value as a tensor, or a list of tensors, of the present trace."""
        if isinstance(value, list):
            return [self.tensor(v) for v in value]
        if isinstance(value, Numbers):
            return self._of_numbers(value)
        if not isinstance(value, ConstantTensor):
            return value
        for place in reversed(self.placed):
            found = place(value)
            if found is not None:
                return found
        return value.tensor if value.buffer is None else self.buffer(value.buffer)

    def _of_numbers(self, value: Numbers) -> torch.Tensor:
        if value.is_constant:
            with _disable_current_modes():
                made = torch.tensor(value.array.tolist(), dtype=value.dtype).reshape(value.array.shape)
            result: torch.Tensor = self.tensor(ConstantTensor(made))
            return result
        scalars = [torch.scalar_tensor(_plain(x), dtype=value.dtype) for x in value.array.reshape(-1)]
        return torch.stack(scalars).reshape(value.array.shape) if value.array.ndim else scalars[0]


def simplified(value: Numbers) -> ConstantTensor | Numbers:
    """Numbers without symbols as a constant."""
    if not value.is_constant:
        return value
    with _disable_current_modes():
        return ConstantTensor(torch.tensor(value.array.tolist(), dtype=value.dtype).reshape(value.array.shape))


def sizes(values: Sequence[Any]) -> ConstantTensor | Numbers:
    """A list of sizes as the value of a node: an int64 tensor of one axis."""
    return simplified(Numbers(array(values), torch.int64))


def _plain(x: Any) -> Any:
    return _SYM_ITE(x, 1, 0) if isinstance(x, torch.SymBool) else x


def _is_numbers(value: Any) -> bool:
    return value is None or is_small(value)


def _constant(result: Any, call: OnnxCall) -> Any:
    if isinstance(result, torch.Tensor):
        # A view would keep the whole of what it shows a part of.
        return ConstantTensor(result.contiguous().clone() if result._base is not None else result.contiguous())
    return [_constant(r, call) for r in result] if isinstance(result, list) else result


def _elements(rule: Any, call: OnnxCall, values: list[Any]) -> int:
    """The elements of the first output, found without computing it."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        result = rule(call, *values)
    first = result[0] if isinstance(result, tuple) else result
    return int(first.numel()) if isinstance(first, torch.Tensor) else 0
