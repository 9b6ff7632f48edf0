"""Codes of weights that are chosen by what layers compute of data, rather than by the nearest number.

Rounding to the nearest code makes each weight as exact as can be, and the sums of a layer not at all: their errors add up as if
they were drawn. Here a layer is rounded an input at a time, and what that costs is taken up by the weights that are left, as far
as its inputs go together (Frantar et al., "GPTQ", 2022). Before it is rounded, its weights are fitted to inputs that the layers
before it have rounded already, so that its results are those of the float model (as in Li et al., "GPTAQ", 2025). Scales stay
as they are, and so do the size and the speed of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lapilli.errors import CompileError
from lapilli.runtime.notice import Work, working

aten = torch.ops.aten

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv1d.padding, aten.conv2d.padding)
_PULL, _DAMPING = 0.1, 0.01
"""Of the mean square of an input: what holds weights to their place when they are fitted, and when errors are passed on."""
_FITTING = Work("fitting weights to data", "fitted weights to data")
_BLOCK = 64
"""Inputs whose errors are passed on together to those after them."""


def fit_weights(
    prepared: fx.GraphModule, batches: Iterable[Any], progress: Callable[[int, int], None] | None = None
) -> int:
    """Chooses the codes of a calibrated model's weights by data; call it between calibration and `convert_pt2e`:

        prepared = prepare_pt2e(exported.module(), quantizer)
        for x in batches:
            prepared(x)
        fit_weights(prepared, batches)
        converted = convert_pt2e(prepared)

    Linear layers and convolutions in one and two dimensions get new weights, which round to the chosen codes by the scales that
    calibration found: of 8 or of 4 bits, of a tensor or of channels. Other layers, and those that share a weight, keep theirs.

    Args:
        prepared: of `prepare_pt2e`, after calibration. It is changed.
        batches: inputs as the model takes them: a tensor, or a tuple of arguments. A few dozen pictures or sentences are
            enough. All batches are kept in memory, with what two models compute of them at one place in the graph.
        progress: is told how many layers are done, and how many there are.

    Returns:
        the number of layers.

    Raises:
        CompileError: there is no batch, or one with another number of tensors than the model takes; or the model was not
            calibrated, or is prepared for training, or is converted already; or what a layer reads is not finite.
    """
    given = [pytree.tree_leaves(batch if isinstance(batch, tuple) else (batch,)) for batch in batches]
    if not given:
        raise CompileError("fit_weights was given no batch: give it those that the model was calibrated with")
    wanted = sum(node.op == "placeholder" for node in prepared.graph.nodes)
    if any(len(leaves) != wanted for leaves in given):
        counts = sorted({len(leaves) for leaves in given})
        raise CompileError(
            f"The model takes {wanted} tensors, and batches have {counts}: a batch is a tensor, or a tuple of arguments"
        )
    if not any(_observer(prepared, node) for node in prepared.graph.nodes):
        raise CompileError(
            "fit_weights takes what prepare_pt2e gave, after calibration, and nothing in this model has observers: "
            "convert_pt2e takes them out, also of the model that it is given, so call fit_weights before it"
        )
    layers = _layers(prepared)
    walk = _Walk(prepared, layers, progress)
    with torch.no_grad(), working(_FITTING) if progress is None else nullcontext():
        walk.run(given)
    for layer, value in walk.found.items():  # new tensors: the old ones may be those of the float model, too
        path, _, last = layer.weight.rpartition(".")
        owner, old = prepared.get_submodule(path), _tensor(prepared, layer.weight)
        if isinstance(old, torch.nn.Parameter):
            owner.register_parameter(last, torch.nn.Parameter(value, old.requires_grad))
        else:
            vars(owner).pop(last, None)  # a tensor that was not registered
            owner.register_buffer(last, value)
    return len(walk.found)


@dataclass(frozen=True)
class _Layer:
    """A layer of the graph; weight: the name of its weight. observer: that knows the weight's scale."""

    node: fx.Node
    weight: str
    observer: Any


def _tensor(module: fx.GraphModule, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    return cast(Tensor, getattr(module.get_submodule(path), last))


def _observer(module: fx.GraphModule, node: Any) -> Any:
    """The observer that a node calls, if it does."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    called = module.get_submodule(str(node.target))
    return called if hasattr(called, "calculate_qparams") else None


def _layers(module: fx.GraphModule) -> dict[fx.Node, _Layer]:
    readers: dict[str, int] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            readers[str(node.target)] = readers.get(str(node.target), 0) + len(node.users)
    found = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target not in (*_CONVOLUTIONS, aten.linear.default):
            continue
        observer = _observer(module, node.args[1])
        if observer is None:
            continue
        if hasattr(observer, "fake_quant_enabled"):
            raise CompileError("fit_weights is for models that are not trained on, and this one is of prepare_qat_pt2e")
        weight = node.args[1].args[0]
        if weight.op == "get_attr" and readers[str(weight.target)] == 1 and len(node.args[1].users) == 1:
            found[node] = _Layer(node, str(weight.target), observer)
    return found


class _Walk:
    """Both models, the float one and the one that is rounded so far, node by node for all batches.

    values: of a node, for each batch what either model has computed.
    """

    def __init__(
        self, module: fx.GraphModule, layers: Mapping[fx.Node, _Layer], progress: Callable[[int, int], None] | None
    ) -> None:
        self.module, self.layers, self.progress = module, layers, progress
        self.found: dict[_Layer, Tensor] = {}
        self.values: dict[fx.Node, list[tuple[Any, Any]]] = {}
        self.count = 0

    def run(self, batches: Sequence[Sequence[Any]]) -> None:
        self.count = len(batches)
        last = {n: user for user in self.module.graph.nodes for n in user.all_input_nodes}
        inputs = zip(*batches, strict=True)
        for node in self.module.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                self.values[node] = [(x, x) for x in next(inputs)]
            elif node.op == "get_attr":
                value = _tensor(self.module, str(node.target))
                self.values[node] = [(value, value)] * self.count
            else:
                self.values[node] = self._computed(node)
            for n in node.all_input_nodes:
                if last[n] is node:
                    del self.values[n]

    def _arguments(self, node: fx.Node) -> list[tuple[Any, Any]]:
        """For each batch the arguments of either model: (args, kwargs)."""

        def of(batch: int, model: int) -> Any:
            return fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n][batch][model])

        return [(of(k, 0), of(k, 1)) for k in range(self.count)]

    def _computed(self, node: fx.Node) -> list[tuple[Any, Any]]:
        if (observer := _observer(self.module, node)) is not None:
            return [(x, _rounded(y, observer, node)) for x, y in self.values[cast(fx.Node, node.args[0])]]
        call: Any = self.module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        arguments = self._arguments(node)
        if node in self.layers:
            self._fit(self.layers[node], arguments)
            new = self.found[self.layers[node]]
            arguments = [(a, ((b[0][0], new, *b[0][2:]), b[1])) for a, b in arguments]
        return [(call(*a[0], **a[1]), call(*b[0], **b[1])) for a, b in arguments]

    def _fit(self, layer: _Layer, arguments: Sequence[tuple[Any, Any]]) -> None:
        node, weight = layer.node, cast(Tensor, arguments[0][0][0][1])
        groups = _groups(node)
        size = weight[0].numel()
        squares = torch.zeros(groups, size, size, dtype=torch.float64)
        shifts = torch.zeros_like(squares)
        count = 0
        for a, b in arguments:
            exact, rounded = (_inputs(node, args, weight, groups).cpu() for args in (a[0], b[0]))
            squares += (rounded.mT @ rounded).double()
            shifts += ((exact - rounded).mT @ rounded).double()
            count += rounded.shape[1]
        if not (squares.isfinite().all() and shifts.isfinite().all()):
            raise CompileError(f"The inputs of {node.name} have NaN or infinities, of which nothing can be learned")
        scale, zero = (
            t.cpu().reshape(-1).expand(len(weight)).reshape(groups, -1) for t in layer.observer.calculate_qparams()
        )
        limits = int(layer.observer.quant_min), int(layer.observer.quant_max)
        # Of few places it is not known how inputs go together, but how large they are.
        known = count / (count + size)
        squares, shifts = squares / max(count, 1), known * shifts / max(count, 1)
        squares = known * squares + (1 - known) * torch.diag_embed(squares.diagonal(dim1=1, dim2=2))
        fitted = _fitted(weight.cpu().reshape(groups, -1, size).double(), squares, shifts)
        made = _codes(fitted, squares, scale.double(), zero.double(), limits)
        self.found[layer] = made.reshape(weight.shape).to(weight.device, weight.dtype)
        if self.progress is not None:
            self.progress(len(self.found), len(self.layers))


def _rounded(y: Any, observer: Any, node: fx.Node) -> Any:
    """An activation as its codes stand for; weights, and what is quantized while the model runs, as they are."""
    source = cast(fx.Node, node.args[0])
    if source.op == "get_attr" or getattr(observer, "is_dynamic", False) or not y.is_floating_point():
        return y
    least = getattr(observer, "min_val", None)
    if least is None or not torch.isfinite(least).all() or least.numel() == 0:
        raise CompileError("The model was not calibrated: run it on some batches, then call fit_weights")
    scale, zero = observer.calculate_qparams()
    if scale.numel() != 1:
        return y
    return torch.fake_quantize_per_tensor_affine(y, float(scale), int(zero), observer.quant_min, observer.quant_max)


_DEFAULTS: tuple[Any, ...] = (None, 1, 0, 1, 1)
"""Of a convolution: bias, stride, padding, dilation, groups."""


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    rest = tuple(node.args[2:])
    return (*rest, *_DEFAULTS[len(rest) :])


def _groups(node: fx.Node) -> int:
    return 1 if node.target is aten.linear.default else int(_geometry(node)[4])


def _pair(value: Any) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * 2 if len(numbers) == 1 else numbers


def _inputs(node: fx.Node, args: Sequence[Any], weight: Tensor, groups: int) -> Tensor:
    """What a layer multiplies by its weights: [groups, places, inputs of a result]."""
    x: Tensor = args[0]
    if node.target is aten.linear.default:
        return x.reshape(1, -1, x.shape[-1]).float()
    _, stride, padding, dilation, _ = _geometry(node)
    kernel = list(weight.shape[2:])
    if len(kernel) == 1:  # a picture of one row
        x = x.unsqueeze(-2)
        kernel, stride, dilation = [1, *kernel], [1, *_pair(stride)[:1]], [1, *_pair(dilation)[:1]]
        padding = padding if isinstance(padding, str) else [0, *_pair(padding)[:1]]
    x = x if x.dim() == 4 else x[None]
    stride, dilation = _pair(stride), _pair(dilation)
    if padding == "same":
        around = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        x = F.pad(x, [around[1] // 2, around[1] - around[1] // 2, around[0] // 2, around[0] - around[0] // 2])
    padding = [0, 0] if isinstance(padding, str) else _pair(padding)
    found = aten.im2col(x.float(), kernel, dilation, padding, stride)  # [n, channels * window, places]
    windows: Tensor = found.view(len(x), groups, -1, found.shape[-1]).permute(1, 0, 3, 2).flatten(1, 2)
    return windows


def _fitted(weight: Tensor, squares: Tensor, shifts: Tensor) -> Tensor:
    """The weights [groups, outputs, inputs] whose results of rounded inputs are nearest to those of exact ones."""
    eye = torch.eye(squares.shape[-1], dtype=squares.dtype)
    pull = _PULL * squares.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + torch.finfo(torch.float32).tiny
    fitted: Tensor = weight + torch.linalg.solve(squares + pull * eye, (weight @ shifts).mT).mT
    return fitted


def _codes(weight: Tensor, squares: Tensor, scale: Tensor, zero: Tensor, limits: tuple[int, int]) -> Tensor:
    """Weights [groups, outputs, inputs] as their codes stand for: inputs of the largest squares first, each one's error made up
    for by those after it. scale, zero: [groups, outputs].
    """
    size = squares.shape[-1]
    diagonal = squares.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1, keepdim=True)
    mean = torch.where(mean > 0, mean, 1.0)  # an input that is always 0
    squares = squares + torch.diag_embed((_DAMPING * mean).expand(-1, size))
    order = diagonal.argsort(1, descending=True)
    along = order[:, None, :]
    left = weight.gather(2, along.expand_as(weight))
    turned = squares.gather(1, order[:, :, None].expand_as(squares)).gather(2, along.expand_as(squares))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(turned))
    factor = torch.linalg.cholesky(inverse, upper=True)
    found = torch.empty_like(left)
    for first in range(0, size, _BLOCK):
        end = min(first + _BLOCK, size)
        errors = torch.zeros(*left.shape[:2], end - first, dtype=left.dtype)
        for k in range(first, end):
            code = torch.clamp(torch.round(left[..., k] / scale) + zero, *limits)
            found[..., k] = (code - zero) * scale
            errors[..., k - first] = (left[..., k] - found[..., k]) / factor[:, k, k, None]
            left[..., k + 1 : end] -= errors[..., k - first, None] * factor[:, None, k, k + 1 : end]
        left[..., end:] -= errors @ factor[:, first:end, end:]
    return torch.empty_like(found).scatter_(2, along.expand_as(found), found)
