"""A quantizer whose calls are those of ExecuTorch's of this name. Convolutions are quantized as well, and what lies between them
keeps the scale of its operand, so that a network of convolutions stays in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lapilli.errors import CompileError

try:
    from torchao.quantization import pt2e
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )
except ImportError as error:
    raise ImportError("lapilli.quantization needs torchao: pip install --no-deps torchao") from error

aten = torch.ops.aten

_CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
)
_LINEAR = (aten.linear.default,)
_ACTIVATIONS = (
    aten.relu.default, aten.relu_.default, aten.hardtanh.default, aten.hardtanh_.default, aten.relu6.default, aten.clamp.default,
)  # fmt: skip
"""What may follow a layer before its result is quantized."""
_SUMS = (aten.add.Tensor, aten.add_.Tensor, aten.mul.Tensor, aten.mul_.Tensor)
_SHARING = (
    aten.max_pool1d.default, aten.max_pool2d.default, aten.avg_pool1d.default, aten.avg_pool2d.default,
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim, aten.mean.default, aten.flatten.using_ints,
    aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.dropout.default, aten.slice.Tensor, aten.pad.default, aten.constant_pad_nd.default,
    aten.hardtanh.default, aten.hardtanh_.default, aten.relu.default, aten.relu_.default, aten.relu6.default,
    aten.upsample_nearest2d.vec, aten.pixel_shuffle.default,
)  # fmt: skip
"""Operators whose results have the scale of their operand."""


@dataclass(frozen=True)
class QuantizationConfig:
    """How activations and weights are quantized. activation None: they stay floats."""

    activation: Any
    weight: Any
    is_dynamic: bool = False
    is_qat: bool = False


def get_symmetric_quantization_config(
    is_per_channel: bool = False,
    is_dynamic: bool = False,
    is_qat: bool = False,
    weight_bits: int = 8,
    act_bits: int = 8,
) -> QuantizationConfig:
    """Weights without zero points; activations int8 with one.

    is_per_channel: a scale for each channel of a weight. is_dynamic: activations of linear layers are quantized while the model
    runs, and nothing else is. is_qat: observers learn while the model trains. Raises CompileError for other bits than 8 or 4 of
    weights and 8 of activations.
    """
    if weight_bits not in (4, 8) or act_bits != 8:
        raise CompileError(
            f"weight_bits is {weight_bits} and act_bits {act_bits}: weights may have 4 or 8 bits, activations have 8"
        )
    least = -(1 << (weight_bits - 1))
    eps = 2.0**-12
    scheme = torch.per_channel_symmetric if is_per_channel else torch.per_tensor_symmetric
    if is_qat:
        observer = pt2e.MovingAveragePerChannelMinMaxObserver if is_per_channel else pt2e.MovingAverageMinMaxObserver
        of_weight = pt2e.FakeQuantize.with_args(observer=observer, eps=eps)
        of_values = pt2e.FusedMovingAvgObsFakeQuantize.with_args(observer=pt2e.MovingAverageMinMaxObserver, eps=eps)
    else:
        of_weight = (pt2e.PerChannelMinMaxObserver if is_per_channel else pt2e.MinMaxObserver).with_args(eps=eps)
        of_values = pt2e.HistogramObserver.with_args(eps=eps)
    if is_dynamic:
        of_values = pt2e.PlaceholderObserver.with_args(eps=eps)
    activation = QuantizationSpec(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_affine, is_dynamic=is_dynamic,
        observer_or_fake_quant_ctr=of_values,
    )  # fmt: skip
    weight = QuantizationSpec(
        dtype=torch.int8, quant_min=least + 1, quant_max=-least - 1, qscheme=scheme, ch_axis=0 if is_per_channel else None,
        observer_or_fake_quant_ctr=of_weight,
    )  # fmt: skip
    return QuantizationConfig(activation, weight, is_dynamic, is_qat)


class VulkanQuantizer(Quantizer):  # type: ignore[misc]
    """Marks what is quantized, for `prepare_pt2e` and `prepare_qat_pt2e`: convolutions, linear layers, sums, products,
    concatenations, and operators between them that keep a scale.

    The configuration of a module's name precedes that of its type, and that the global one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._global: QuantizationConfig | None = None
        self._names: dict[str, QuantizationConfig | None] = {}
        self._types: dict[str, QuantizationConfig | None] = {}
        self._filter: Callable[[fx.Node], bool] | None = None

    def set_global(self, config: QuantizationConfig | None) -> VulkanQuantizer:
        """The configuration of all modules that have no other."""
        self._global = config
        return self

    def set_module_name(self, name: str, config: QuantizationConfig | None) -> VulkanQuantizer:
        """The configuration of a module and those inside it; None: they are not quantized."""
        self._names[name] = config
        return self

    def set_module_type(self, kind: type[torch.nn.Module], config: QuantizationConfig | None) -> VulkanQuantizer:
        """The configuration of modules of a class; None: they are not quantized."""
        self._types[f"{kind.__module__}.{kind.__qualname__}"] = config
        return self

    def set_filter_function(self, accepts: Callable[[fx.Node], bool]) -> VulkanQuantizer:
        """Only nodes for which the function returns True are quantized."""
        self._filter = accepts
        return self

    def validate(self, model: fx.GraphModule) -> None:
        """Every marking is possible."""

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """The graph needs no changes."""
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Marks the nodes of a graph (`meta["quantization_annotation"]`)."""
        wanted = _wanted_as_codes(model.graph)
        for node in model.graph.nodes:
            config = self._config(node) if node.op == "call_function" and not _is_marked(node) else None
            if config is None:
                continue
            if node.target in _CONVOLUTIONS + _LINEAR:
                _mark_layer(node, config, wanted)
            elif config.is_dynamic or (node.target not in _SHARING and node not in wanted):
                continue
            elif node.target in _SUMS:
                _mark_sum(node, config)
            elif node.target is aten.cat.default:
                _mark_concatenation(node, config)
            elif node.target in _SHARING:
                _mark_sharing(node)
        return model

    def _config(self, node: fx.Node) -> QuantizationConfig | None:
        if self._filter is not None and not self._filter(node):
            return None
        modules = list(_modules(node))
        for name, _ in reversed(modules):
            if name in self._names:
                return self._names[name]
        for _, kind in reversed(modules):
            if kind in self._types:
                return self._types[kind]
        return self._global


def _modules(node: fx.Node) -> Iterator[tuple[str, str]]:
    """Names and classes of the modules that a node comes from, outermost first."""
    for path, kind in node.meta.get("nn_module_stack", {}).values():
        name = str(path).removeprefix("L['self'].").removeprefix("L__self___")
        yield (
            name.replace("slice(None, None, None)", ""),
            kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}",
        )


def _is_marked(node: fx.Node) -> bool:
    marks = node.meta.get("quantization_annotation")
    return marks is not None and marks._annotated


def _mark(node: fx.Node, inputs: dict[fx.Node, Any], output: Any = None) -> None:
    node.meta["quantization_annotation"] = QuantizationAnnotation(
        input_qspec_map=inputs, output_qspec=output, _annotated=True
    )


def _is_float(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _followed(node: fx.Node) -> fx.Node:
    """The activation after a node, if it is all that reads it; otherwise the node."""
    users = list(node.users)
    norm = users[0] if len(users) == 1 and str(users[0].target).startswith("aten.batch_norm") else None
    if norm is not None:
        _mark(norm, {})
        users = list(norm.users)
    if len(users) == 1 and users[0].target in _ACTIVATIONS:
        return users[0]
    return norm if norm is not None else node


def _wanted_as_codes(graph: fx.Graph) -> set[fx.Node]:
    """The values that a layer reads, perhaps by sums and operators that keep its scale, or that are results of the model. Norms,
    softmax and attention compute with floats: rounding what only they read costs accuracy, and gains nothing.
    """
    wanted: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for user in node.users:
            is_read = user.target in _CONVOLUTIONS + _LINEAR and user.args[0] is node
            passes = user.target in (*_SUMS, *_SHARING, *_ACTIVATIONS, aten.cat.default) and user in wanted
            if user.op == "output" or is_read or passes:
                wanted.add(node)
    return wanted


def _mark_layer(node: fx.Node, config: QuantizationConfig, wanted: set[fx.Node]) -> None:
    x, weight = node.args[:2]
    if not _is_float(x) or not _is_float(weight) or (config.is_dynamic and node.target not in _LINEAR):
        return
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    last = node if config.is_dynamic else _followed(node)
    output = None if config.is_dynamic or last not in wanted else config.activation
    inputs = {x: config.activation, weight: config.weight}
    _mark(node, inputs, output if last is node else None)
    if last is not node:
        _mark(last, {}, output)


def _mark_sum(node: fx.Node, config: QuantizationConfig) -> None:
    operands = [a for a in node.args[:2] if isinstance(a, fx.Node)]
    if len(operands) != 2 or not all(map(_is_float, operands)):
        return
    last = _followed(node)
    _mark(node, dict.fromkeys(operands, config.activation), config.activation if last is node else None)
    if last is not node:
        _mark(last, {}, config.activation)


def _mark_concatenation(node: fx.Node, config: QuantizationConfig) -> None:
    parts: Any = node.args[0]
    if not parts or not all(map(_is_float, parts)):
        return
    shared = SharedQuantizationSpec((parts[0], node))
    _mark(node, {p: config.activation if p is parts[0] else shared for p in parts}, shared)


def _mark_sharing(node: fx.Node) -> None:
    """The result has the scale of the operand, if that is quantized."""
    x = node.args[0]
    marks = x.meta.get("quantization_annotation") if isinstance(x, fx.Node) else None
    if marks is None or marks.output_qspec is None or not _is_float(node):
        return
    assert isinstance(x, fx.Node)
    _mark(node, {x: SharedQuantizationSpec(x)}, SharedQuantizationSpec((x, node)))
