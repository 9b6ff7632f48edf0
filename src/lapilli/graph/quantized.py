"""Quantized tensors in the graph: what other packages' operators become, those of `code_operators.py`, and how constants
of codes lie. Kernels see no format, only an expression of the code (`schedule/encoding.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from lapilli.code_operators import DEQUANTIZE, QUANTIZE, UNPACK, pack, pack_by_fours, type_of_codes, widths_of
from lapilli.graph.module import Module

aten = torch.ops.aten


def take_apart(module: Module) -> None:
    """Replaces parameters that are tensor subclasses by the tensors inside, which the graph asks for by name. (Nothing else may be
    removed: operators that write to their operands have no readers.)
    """
    for node in list(module.graph.nodes):
        if str(node.target) != "export.access_subclass_inner_tensor.default":
            continue
        outer, name = node.args
        inner = getattr(module.constants[outer], name).detach()
        module.replace(node, _constant(module, inner, f"{outer.name}_{name}"))
        module.graph.erase_node(node)
        if not outer.users:
            del module.constants[outer]
            module.graph.erase_node(outer)


def recognize(module: Module) -> None:
    """Replaces the quantization operators of torch and torchao by ours."""
    for node in list(module.graph.nodes):
        made = _RECOGNIZED.get(str(node.target)) if node.op == "call_function" else None
        if made is None:
            continue
        with module.graph.inserting_before(node):
            new = made(_Writer(module, node), *node.args, **node.kwargs)  # None: it has replaced what reads the node
        if new is not None:
            new.meta["val"] = node.meta["val"]
            module.replace(node, new)
        module.graph.erase_node(node)


class _Writer:
    """What the calls that replace a call have in common. size: of the tensor that it is given."""

    def __init__(self, module: Module, node: fx.Node) -> None:
        self.module, self.node = module, node
        given: Any = node.args[0]
        self.size = tuple(given.meta["val"].shape)

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.module.graph.call_function(target, args)
        node.meta["val"] = self.node.meta["val"]
        return node

    def number(self, value: float, dtype: torch.dtype, name: str) -> fx.Node:
        return _constant(self.module, torch.tensor(value, dtype=dtype), f"{self.node.name}_{name}")

    def scale(self, scale: Any) -> fx.Node:
        return scale if isinstance(scale, fx.Node) else self.number(scale, torch.float32, "scale")

    def inverse(self, scale: Any) -> fx.Node:
        """1 / scale, rounded as torch does."""
        if not isinstance(scale, fx.Node):
            return self.number(1.0 / scale, torch.float32, "inverse")
        node = self.module.graph.call_function(aten.reciprocal.default, (scale,))
        node.meta["val"] = scale.meta["val"]
        return node

    def zero(self, zero: Any) -> fx.Node | None:
        """A zero point that counts."""
        if isinstance(zero, fx.Node):
            known = self.module.constants.get(zero)
            if known is not None and not known.any():
                return None
            return zero if known is None or known.numel() else None
        return self.number(zero, torch.int32, "zero_point") if zero else None

    def blocks(self, sizes: Sequence[Any]) -> list[int]:
        """Sizes of blocks; a whole dimension is -1."""
        return [-1 if _same(b, size) else int(b) for b, size in zip(sizes, self.size, strict=True)]


def _constant(module: Module, value: Tensor, name: str) -> fx.Node:
    return module.add_constant(value, name)


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal; comparing open ones would fix them."""
    known = [s.node.expr if isinstance(s, torch.SymInt) else s for s in (a, b)]
    return bool(known[0] == known[1])


def _bounds(dtype: torch.dtype, low: Any, high: Any) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    return int(limits.min if low is None else low), int(limits.max if high is None else high)


def _dequantize_affine(
    w: _Writer, x: fx.Node, block: Sequence[Any], scale: Any, zero: Any, dtype: Any, low: Any = None, high: Any = None,
    output_dtype: torch.dtype = torch.float32,
) -> fx.Node:  # fmt: skip
    return w.call(DEQUANTIZE, x, w.scale(scale), w.zero(zero), w.blocks(block), output_dtype)


def _quantize_affine(
    w: _Writer, x: fx.Node, block: Sequence[Any], scale: Any, zero: Any, output_dtype: torch.dtype, low: Any = None,
    high: Any = None,
) -> fx.Node:  # fmt: skip
    low, high = _bounds(w.node.meta["val"].dtype, low, high)
    dtype = w.node.meta["val"].dtype
    return w.call(QUANTIZE, x, w.inverse(scale), w.zero(zero), w.blocks(block), low, high, dtype)


def _of_tensor(
    w: _Writer, x: fx.Node, scale: Any, zero: Any, low: Any, high: Any, dtype: torch.dtype, *, out_dtype: Any = None
) -> fx.Node:
    block = [-1] * len(w.size)
    if w.node.meta["val"].dtype.is_floating_point:
        return w.call(DEQUANTIZE, x, w.scale(scale), w.zero(zero), block, out_dtype or torch.float32)
    return w.call(QUANTIZE, x, w.inverse(scale), w.zero(zero), block, int(low), int(high), dtype)


def _of_channels(
    w: _Writer, x: fx.Node, scale: Any, zero: Any, axis: int, low: Any, high: Any, dtype: torch.dtype, *, out_dtype: Any = None
) -> fx.Node:  # fmt: skip
    block = [1 if d == axis % len(w.size) else -1 for d in range(len(w.size))]
    if w.node.meta["val"].dtype.is_floating_point:
        return w.call(DEQUANTIZE, x, w.scale(scale), w.zero(zero), block, out_dtype or torch.float32)
    return w.call(QUANTIZE, x, w.inverse(scale), w.zero(zero), block, int(low), int(high), dtype)


def _of_tokens(
    w: _Writer, x: fx.Node, scale: Any, zero: Any, low: Any, high: Any, dtype: torch.dtype, out_dtype: Any = None
) -> fx.Node:
    block = [1] * (len(w.size) - 1) + [-1]
    if w.node.meta["val"].dtype.is_floating_point:
        return w.call(DEQUANTIZE, x, w.scale(scale), w.zero(zero), block, out_dtype or torch.float32)
    return w.call(QUANTIZE, x, w.inverse(scale), w.zero(zero), block, int(low), int(high), dtype)


def _of_groups(
    w: _Writer, x: fx.Node, scale: Any, zero: Any, low: Any, high: Any, dtype: torch.dtype, group: int = 128,
    out_dtype: Any = torch.float32,
) -> fx.Node:  # fmt: skip
    columns = w.size[-1]
    block = w.blocks([1, columns if group > columns else group])
    if w.node.meta["val"].dtype.is_floating_point:
        return w.call(DEQUANTIZE, x, w.scale(scale), w.zero(zero), block, out_dtype or torch.float32)
    return w.call(QUANTIZE, x, w.inverse(scale), w.zero(zero), block, int(low), int(high), dtype)


def _chosen(symmetric: bool) -> Callable[..., fx.Node | None]:
    """Parameters for all values of a tensor, in float32 (torch says float64, and computes in float32). What is no quantization
    gets them in torch's types and shape.
    """

    def write(w: _Writer, x: fx.Node, low: int, high: int, eps: float, dtype: torch.dtype) -> None:
        of_all = x.meta["val"].new_empty((), dtype=torch.float32)

        def call(target: Any, *args: Any) -> fx.Node:
            node = w.module.graph.call_function(target, args)
            node.meta["val"] = of_all
            return node

        least = call(aten.clamp.default, call(aten.amin.default, x), None, 0.0)
        most = call(aten.clamp.default, call(aten.amax.default, x), 0.0)
        if symmetric:
            most = call(aten.maximum.default, call(aten.neg.default, least), most)
            scale = call(aten.div.Tensor, most, float(high - low) / 2)
        else:
            scale = call(aten.div.Tensor, call(aten.sub.Tensor, most, least), float(high - low))
        scale = call(aten.clamp.default, scale, eps)
        if symmetric:
            zero = w.module.graph.call_function(aten.full.default, ([1], 128 if dtype is torch.uint8 else 0))
            zero.kwargs = {"dtype": torch.int32}
        else:
            steps = call(aten.round.default, call(aten.div.Tensor, least, scale))
            zero = call(aten.clamp.default, call(aten.sub.Tensor, float(low), steps), float(low), float(high))
            zero = w.module.graph.call_function(aten._to_copy.default, (zero,), {"dtype": torch.int32})
        zero.meta["val"] = of_all.new_empty((1,) if symmetric else (), dtype=torch.int32)
        for user in list(w.node.users):
            found = (scale, zero)[user.args[1]]  # type: ignore[index]
            others = [u for u in user.users if str(u.target) not in _RECOGNIZED]
            if others:
                dtype = user.meta["val"].dtype
                converted = w.module.graph.call_function(aten._to_copy.default, (found,), {"dtype": dtype})
                converted.meta["val"] = found.meta["val"].to(dtype)
                shaped = w.module.graph.call_function(aten.view.default, (converted, [1]))
                shaped.meta["val"] = user.meta["val"]
                for other in others:
                    other.replace_input_with(user, shaped)
            w.module.replace(user, found)
            w.module.graph.erase_node(user)

    return write


_RECOGNIZED: dict[str, Callable[..., fx.Node | None]] = {
    "quantized_decomposed.choose_qparams.tensor": _chosen(False),
    "quantized_decomposed.choose_qparams_symmetric.tensor": _chosen(True),
    "torchao.dequantize_affine.default": _dequantize_affine, "torchao.quantize_affine.default": _quantize_affine,
    **{f"quantized_decomposed.{kind}_per_tensor.{form}": _of_tensor for kind in ("quantize", "dequantize")
       for form in ("default", "tensor", "tensor2")},
    **{f"quantized_decomposed.{kind}_per_channel.default": _of_channels for kind in ("quantize", "dequantize")},
    **{f"quantized_decomposed.{kind}_per_token.default": _of_tokens for kind in ("quantize", "dequantize")},
    **{f"quantized_decomposed.{kind}_per_channel_group.default": _of_groups for kind in ("quantize", "dequantize")},
}  # fmt: skip


def narrow_zero_points(module: Module) -> None:
    """Constant zero points take as few bytes as they need; those that are all 0 vanish."""
    for node in list(module.graph.nodes):
        zero: Any = node.args[2] if node.target in (DEQUANTIZE, QUANTIZE) else None
        value = module.constants.get(zero)
        if value is None or value.is_floating_point() or not value.numel():
            continue
        low, high = value.aminmax()
        narrow = next(
            t
            for t in (torch.int8, torch.int16, torch.int32)
            if low >= torch.iinfo(t).min and high <= torch.iinfo(t).max
        )
        new = (
            zero
            if narrow.itemsize >= value.dtype.itemsize
            else module.add_constant(value.to(narrow), f"{zero.name}_narrow")
        )
        node.args = (*node.args[:2], new if value.any() else None, *node.args[3:])
    module.clean()


_NIBBLE, _BYTE, _LINE = 4, 8, 32
"""Bits; and columns that are whole words of codes, whatever bits these have."""
_MATRIX = 2
_READ_CODES = (DEQUANTIZE, aten._to_copy.default)
_LAYERS = (aten.linear.default, aten.embedding.default)


def _widths(node: fx.Node, codes: Tensor, width: int) -> tuple[int, ...]:
    """How many bits each tensor has that codes of so many bits are packed in; none, if they stay as they are. Weights of layers
    take as many as they need; what else there is, scales that are codes for one, is read a byte at a time.
    """
    found = widths_of(width)
    of_layers = all(user.target is DEQUANTIZE and all(u.target in _LAYERS for u in user.users) for user in node.users)
    if sum(found) < _BYTE and of_layers and codes.dim() == _MATRIX and codes.shape[1] % _LINE == 0:
        return found
    return (_NIBBLE,) if width <= _NIBBLE else ()


def _least(low: int, high: int, count: int) -> int:
    """The code that is stored as 0, of so many, which must all be numbers of one type of bytes."""
    if -count // 2 <= low and high < count // 2:
        return -count // 2
    if low >= 0 and high < count:
        return 0
    ends = (torch.iinfo(torch.int8).max + 1, 1 << _BYTE)
    return min(low, next(end for end in ends if high < end) - count)


def pack_codes(module: Module) -> int:
    """Packs constants of few neighbouring integers that are only dequantized or converted, as `lapilli::unpack` reads them: 16 of
    any shape, 64 and fewer of matrices. Returns their number.
    """
    packed = 0
    for node, value in list(module.constants.items()):
        if not any(user.target is DEQUANTIZE or "codes" in user.meta for user in node.users):
            continue
        if value.dtype not in (torch.int8, torch.uint8) or value.dim() == 0 or not value.numel():
            continue
        if node in module.outputs or not node.users:
            continue
        if any(user.target not in _READ_CODES or user.args[0] is not node for user in node.users):
            continue
        low, high = (int(v) for v in value.aminmax())
        widths = _widths(node, value, (high - low).bit_length())
        if not widths:
            continue
        width = sum(widths)
        low = _least(low, high, 1 << width)
        rows = value.flatten(1) if value.dim() > _MATRIX else value  # filters have few or odd columns
        codes = np.pad((rows.to(torch.int16) - low).numpy(), ((0, 0),) * (rows.dim() - 1) + ((0, -rows.shape[-1] % 2),))
        by_fours, place = widths != (_NIBBLE,), 0
        given: list[Any] = []
        for bits in widths:
            part = codes >> place & (1 << bits) - 1
            part = pack_by_fours(part, bits) if by_fours else pack(part, bits)
            given += [module.add_constant(torch.from_numpy(part), f"{node.name}_packed{place or ''}"), bits]
            place += bits
        first = next(n for n in module.graph.nodes if n.op != "placeholder")
        with module.graph.inserting_before(first):
            both, bits, upper, above = [*given, None, 0][:4]
            new = module.graph.call_function(UNPACK, (both, low, rows.shape[-1], bits, upper, above, by_fours))
            new.meta["val"] = torch.empty_like(rows, dtype=type_of_codes(low, width), device="meta")
            if rows is not value:
                new = module.graph.call_function(aten.reshape.default, (new, list(value.shape)))
                new.meta["val"] = torch.empty_like(value, dtype=type_of_codes(low, width), device="meta")
        for user in list(node.users):
            user.args = (new, *user.args[1:])
        packed += 1
    module.clean()
    return packed
