"""A quantizer whose calls are those of ExecuTorch's of this name. Convolutions are quantized as well, and what lies between them
keeps the scale of its operand, so that a network of convolutions stays in integers.
"""

from __future__ import annotations

import warnings
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
_TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
_LINEAR = (aten.linear.default,)
_LAYERS = _CONVOLUTIONS + _TRANSPOSED + _LINEAR
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
    """How activations and weights are quantized. activation None: they stay floats. If weights have a scale for each channel, those
    of transposed convolutions have another specification, and those of groups of these one scale; without it they stay floats.
    """

    activation: Any
    weight: Any
    is_dynamic: bool = False
    is_qat: bool = False
    transposed_weight: Any = None
    whole_weight: Any = None


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
    eps = 2.0**-12
    if is_qat:
        of_values = pt2e.FusedMovingAvgObsFakeQuantize.with_args(observer=pt2e.MovingAverageMinMaxObserver, eps=eps)
    else:
        of_values = pt2e.HistogramObserver.with_args(eps=eps)
    if is_dynamic:
        of_values = pt2e.PlaceholderObserver.with_args(eps=eps)
    activation = QuantizationSpec(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_affine, is_dynamic=is_dynamic,
        observer_or_fake_quant_ctr=of_values,
    )  # fmt: skip
    axes = (0, 1, None) if is_per_channel else (None, None, None)
    weight, transposed, whole = (_spec_of_weight(axis, is_qat, weight_bits, eps) for axis in axes)
    return QuantizationConfig(activation, weight, is_dynamic, is_qat, transposed, whole)


def _spec_of_weight(axis: int | None, is_qat: bool, bits: int, eps: float) -> Any:
    """axis: of the channels that have a scale each; torchao tells observers of it, but no fake quantization."""
    most = (1 << (bits - 1)) - 1
    of_channels: dict[str, Any] = {} if axis is None else {"ch_axis": axis}
    if is_qat:
        observer = pt2e.MovingAverageMinMaxObserver if axis is None else pt2e.MovingAveragePerChannelMinMaxObserver
        made = pt2e.FakeQuantize.with_args(observer=observer, eps=eps, **of_channels)
    else:
        made = (pt2e.MinMaxObserver if axis is None else pt2e.PerChannelMinMaxObserver).with_args(
            eps=eps, **of_channels
        )
    return QuantizationSpec(
        dtype=torch.int8, quant_min=-most, quant_max=most, ch_axis=axis, observer_or_fake_quant_ctr=made,
        qscheme=torch.per_tensor_symmetric if axis is None else torch.per_channel_symmetric,
    )  # fmt: skip


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
        self._global = _checked(config, "set_global")
        return self

    def set_module_name(self, name: str, config: QuantizationConfig | None) -> VulkanQuantizer:
        """The configuration of a module and those inside it; None: they are not quantized."""
        if not isinstance(name, str):
            raise CompileError(f"set_module_name takes a module's name, as named_modules() gives it, and not {name!r}")
        self._names[name] = _checked(config, "set_module_name")
        return self

    def set_module_type(self, kind: type[torch.nn.Module], config: QuantizationConfig | None) -> VulkanQuantizer:
        """The configuration of modules of a class; None: they are not quantized."""
        if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module):
            raise CompileError(f"set_module_type takes a class of modules, as torch.nn.Linear, and not {kind!r}")
        config = _checked(config, "set_module_type")
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
        """Marks the nodes of a graph (`meta["quantization_annotation"]`). Warns of names and types that it lacks."""
        self._warn_of_unused(model.graph)
        wanted = _wanted_as_codes(model.graph)
        for node in model.graph.nodes:
            config = self._config(node) if node.op == "call_function" and not _is_marked(node) else None
            if config is None:
                continue
            if node.target in _LAYERS:
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

    def _warn_of_unused(self, graph: fx.Graph) -> None:
        modules = {pair for node in graph.nodes for pair in _modules(node)}
        names, kinds = {name for name, _ in modules}, {kind for _, kind in modules}
        unused = [f"named {name!r}" for name in self._names if name not in names]
        unused += [f"of type {kind}" for kind in self._types if kind not in kinds]
        if unused:
            warnings.warn(
                f"VulkanQuantizer: the model calls no module {', and none '.join(unused)}; the configuration is not used.",
                stacklevel=2,
            )

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


def _checked(config: Any, name: str) -> QuantizationConfig | None:
    if config is not None and not isinstance(config, QuantizationConfig):
        raise CompileError(
            f"{name} takes what get_symmetric_quantization_config returns, or None: no quantization. It was given {config!r}"
        )
    return config


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
            is_read = user.target in _LAYERS and user.args[0] is node
            passes = user.target in (*_SUMS, *_SHARING, *_ACTIVATIONS, aten.cat.default) and user in wanted
            if user.op == "output" or is_read or passes:
                wanted.add(node)
    return wanted


def _mark_layer(node: fx.Node, config: QuantizationConfig, wanted: set[fx.Node]) -> None:
    x, weight = node.args[:2]
    kind = weight.meta["val"].dtype if isinstance(weight, fx.Node) and "val" in weight.meta else None
    if kind in (torch.float16, torch.bfloat16):
        raise CompileError(
            f"VulkanQuantizer: the weight of {node.name} is {kind}, and scales are found in float32. Quantize model.float(); "
            'lapilli.compile(..., precision="fp16") stores what stays floats as halves.'
        )
    if not _is_float(x) or not _is_float(weight) or (config.is_dynamic and node.target not in _LINEAR):
        return
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    last = node if config.is_dynamic else _followed(node)
    output = None if config.is_dynamic or last not in wanted else config.activation
    of_weight = _of_weight(config, node)
    if of_weight is None:
        return
    inputs = {x: config.activation, weight: of_weight}
    _mark(node, inputs, output if last is node else None)
    if last is not node:
        _mark(last, {}, output)


def _of_weight(config: QuantizationConfig, node: fx.Node) -> Any:
    """A weight of a transposed convolution has the results' channels second, and those of groups share an index there: such a
    weight takes one scale.
    """
    if node.target not in _TRANSPOSED or config.weight.ch_axis is None:
        return config.weight
    return config.transposed_weight if _groups(node) == 1 else config.whole_weight


def _groups(node: fx.Node) -> int:
    """Of a transposed convolution."""
    given: Any = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    return int(given)


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
