"""Linear layers and convolutions of two quantized operands are computed in integers.

sum (q - z) s * c t = s t * sum (q - z) c, where x = (q - z) s is the input and w = c t the weight. The scales, with what else
follows, are the epilogue of the sum. Where no partial sum can exceed 2^24, float32 holds it exactly in any order, and kernels
compute in float32, which no device does slowly; the weights are known, so that this is nearly every layer. Longer sums are cut
into a few such parts, added as integers; others are summed in 32-bit integers. Sums that a model itself states in integers
(`lapilli::integer_product`, `integer_convolution`) are computed in the same way. What cannot be taken so keeps its dequantized
operands: scales that differ along the sum, as those of groups, and sums that might not fit into 32 bits.

Values between layers are kept as q - z, so that no kernel meets a zero point (`center`). Their limits go with them, so that they
take a byte each where they are stored (`lower/graph.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lapilli.code_operators import DEQUANTIZE, INTEGER_CONVOLUTION, INTEGER_PRODUCT, QUANTIZE
from lapilli.graph.module import Module

aten = torch.ops.aten

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default)
LARGEST = 2**31 - 1
_EXACT = 2**24
"""Integers up to which float32 has all."""


def center(module: Module) -> None:
    """Quantized values that are only dequantized become q - z, as floats: clamp(round(x / s) + z, low, high) - z =
    clamp(round(x / s), low - z, high - z).
    """
    for node in module.graph.nodes:
        if node.target is not QUANTIZE or node in module.outputs or not node.users:
            continue
        x, inverse, zero, block, low, high, _, *divides = node.args
        shift = _number(module, zero)
        if shift is None or any(b != -1 for b in block):
            continue
        if any(
            u.target is not DEQUANTIZE or u.args[0] is not node or _number(module, u.args[2]) != shift
            for u in node.users
        ):
            continue
        node.args = (x, inverse, None, block, low - shift, high - shift, torch.float32, *divides)
        node.meta["limits"] = (low - shift, high - shift)
        node.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape, dtype=torch.float32)
        for user in list(node.users):
            user.args = (*user.args[:2], None, *user.args[3:])
    module.clean()


_VIEWS = (
    aten.flatten.using_ints, aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.slice.Tensor, aten.expand.default, aten.clone.default,
    aten.pixel_shuffle.default,
)  # fmt: skip
"""Operators whose results are values of their operand."""
_MOVES = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.relu.default, *_VIEWS)
"""Operators whose results are values of their operand, or 0."""


def move(module: Module) -> int:
    """Operators that only move values, between numbers and codes of one scale, move the codes: quantize(f(dequantize(u))) = f(u).
    Returns their number.
    """
    moved = 0
    for node in list(module.graph.nodes):
        if node.target is not QUANTIZE or not _is_centered(node):
            continue
        between, inverse, low, high = node.args[0], node.args[1], node.args[4], node.args[5]
        read = between.args[0] if between.target in _MOVES or _is_zero_padding(between) else None
        if not isinstance(read, fx.Node) or read.target is not DEQUANTIZE or read.args[2] is not None:
            continue
        codes: Any = read.args[0]
        scale, inverses = module.constants.get(read.args[1]), module.constants.get(inverse)  # type: ignore[arg-type]
        limits = _limits(codes)
        if scale is None or inverses is None or limits is None or scale.numel() != 1 or inverses.numel() != 1:
            continue
        same = float(inverses) in _inverses(node, scale)
        if not same or limits[0] < low or limits[1] > high:
            continue
        with module.graph.inserting_before(node):
            new = module.graph.call_function(between.target, (codes, *between.args[1:]), dict(between.kwargs))
        new.meta["val"] = between.meta["val"]
        new.meta["limits"] = (min(limits[0], 0), max(limits[1], 0))
        module.replace(node, new)
        moved += 1
    module.clean()
    return moved


def view_codes(module: Module) -> int:
    """Views of dequantized values that a product reads are views of the codes: f(dequantize(u)) = dequantize(f(u)). For codes of
    one scale. Returns their number.
    """
    viewed = 0
    for node in list(module.graph.nodes):
        read: Any = node.args[0] if node.target in _VIEWS else None
        if not isinstance(read, fx.Node) or not is_of_codes(read) or not _is_for_products(node):
            continue
        arguments: Any = read.args
        codes, scale, zero, block, dtype = arguments
        parameters = [p.meta["val"] for p in (scale, zero) if p is not None]
        if any(b != -1 for b in block) or any(p.numel() != 1 for p in parameters):
            continue
        with module.graph.inserting_before(node):
            new = module.graph.call_function(node.target, (codes, *node.args[1:]), dict(node.kwargs))
            value = node.meta["val"]
            new.meta["val"] = value.new_empty(value.shape, dtype=codes.meta["val"].dtype)
            if (limits := _limits(codes)) is not None:
                new.meta["limits"] = limits
            made = module.graph.call_function(DEQUANTIZE, (new, scale, zero, [-1] * value.dim(), dtype))
            made.meta["val"] = value
        module.replace(node, made)
        viewed += 1
    module.clean()
    return viewed


def _is_for_products(node: fx.Node) -> bool:
    return any(u.target in _PRODUCTS or (u.target in _VIEWS and _is_for_products(u)) for u in node.users)


def divides(node: fx.Node) -> bool:
    """Whether a quantization divides by its scale, instead of multiplying with the inverse."""
    return bool(node.args[7:] and node.args[7])


def _inverses(node: fx.Node, scale: torch.Tensor) -> tuple[float, ...]:
    """What a quantization to codes of a scale may be given for it."""
    if divides(node):
        return (float(scale),)
    return float((1.0 / scale.double()).float()), float(1.0 / scale)


_NO_LIMIT = float("inf")


def absorb_limits(module: Module) -> None:
    """Activations that only limit numbers are limits of the codes that are made of these: rounding keeps their order. For codes of
    one scale.
    """
    for node in list(module.graph.nodes):
        if node.target is not QUANTIZE:
            continue
        limited = node.args[0]
        inverse, shift = module.constants.get(node.args[1]), _number(module, node.args[2])
        while inverse is not None and inverse.numel() == 1 and shift is not None and (found := _clamp_of(limited)):
            low, high = node.args[4], node.args[5]
            factor = inverse.float()
            steps = [torch.tensor(end) / factor if divides(node) else torch.tensor(end) * factor for end in found]
            ends = [float(step.round()) + shift for step in steps]
            ends = [min(max(end, low), high) for end in ends]
            if not ends[0] <= ends[1]:  # as one that is NaN is
                break
            limited = limited.args[0]
            node.args = (limited, *node.args[1:4], int(ends[0]), int(ends[1]), *node.args[6:])
            if "limits" in node.meta:
                node.meta["limits"] = (min(int(ends[0]), 0), max(int(ends[1]), 0))
    module.clean()


def _clamp_of(node: Any) -> tuple[float, float] | None:
    """Between which numbers an operator keeps its operand; None if it does something else."""
    if node.meta["val"].dtype is not torch.float32 or node.kwargs:
        return None
    given = [*node.args[1:], None, None][:2]
    if not all(end is None or isinstance(end, int | float) for end in given):
        return None
    if node.target is aten.hardtanh.default:
        usual = -1.0, 1.0
    elif node.target is aten.relu6.default:
        usual = 0.0, 6.0
    elif node.target is aten.relu.default:
        usual = 0.0, _NO_LIMIT
    elif node.target is aten.clamp.default:
        usual = -_NO_LIMIT, _NO_LIMIT
    else:
        return None
    low, high = (end if own is None else float(own) for own, end in zip(given, usual, strict=True))
    return low, high


def _is_centered(node: fx.Node) -> bool:
    return node.target is QUANTIZE and node.args[2] is None and node.args[6] is torch.float32


def _is_zero_padding(node: fx.Node) -> bool:
    args: Any = node.args
    if node.target is aten.constant_pad_nd.default:
        return len(args) < 3 or args[2] == 0
    return (
        node.target is aten.pad.default and (len(args) < 3 or args[2] == "constant") and (len(args) < 4 or not args[3])
    )


def _limits(codes: fx.Node) -> tuple[int, int] | None:
    """The range of codes less their zero points."""
    if _is_centered(codes):
        return codes.args[4], codes.args[5]  # type: ignore[return-value]
    found: tuple[int, int] | None = codes.meta.get("limits")
    return found


def _number(module: Module, zero: Any) -> int | None:
    """A zero point that is known and the same for all elements; 0 for none."""
    if zero is None:
        return 0
    value = module.constants.get(zero)
    return int(value) if value is not None and value.numel() == 1 else None


def compute_in_integers(module: Module) -> int:
    """Replaces layers whose operands are both dequantized from codes of 8 bits, and sums of integers. Returns their number. Others
    keep the reason, for `arithmetic`.
    """
    found = 0
    for node in list(module.graph.nodes):
        if node.target in (INTEGER_PRODUCT, INTEGER_CONVOLUTION):
            _replace_sum(module, node)
            found += 1
            continue
        if not _reads_dequantized(node):
            continue
        of_two = node.target in _OF_TWO and node.args[1].args[0] not in module.constants
        refused = _replace_product(module, node) if of_two else _replace(module, node)
        found += not refused
        node.meta["arithmetic"] = refused
    module.clean()
    return found


INTEGERS = "integers"
MULTIPLY = (
    aten.linear.default, *_CONVOLUTIONS, aten.bmm.default, aten.mm.default, aten.addmm.default, aten.matmul.default,
    aten.baddbmm.default,
)  # fmt: skip
"""Matrix products and convolutions."""
_PRODUCTS = (*MULTIPLY, aten.scaled_dot_product_attention.default)

_OF_TWO = (aten.bmm.default, aten.mm.default, aten.matmul.default)


def _reads_dequantized(node: fx.Node) -> bool:
    return node.target in _PRODUCTS and any(a.target is DEQUANTIZE for a in node.all_input_nodes)


def arithmetic(node: fx.Node) -> str:
    """How a contraction of quantized operands is computed: "integers", or in floats, and why; empty for all other calls."""
    if node.target is aten._int_mm.default:
        return INTEGERS
    if not _reads_dequantized(node):
        return str(node.meta.get("arithmetic", ""))
    return f"floats, {node.meta.get('arithmetic') or 'of dequantized operands'}"


def is_exact(node: fx.Node) -> bool:
    """Whether a call's result is a sum of codes, of which nothing may be rounded, in whatever precision."""
    return bool(node.meta.get("exact"))


def _is_transposed(node: fx.Node) -> bool:
    return node.target is aten.convolution.default and bool(node.args[6])


def _replace_product(module: Module, node: fx.Node) -> str:
    """A product of two activations, each quantized as a whole. Returns why it is none, or nothing."""
    if node.meta["val"].dtype is not torch.float32 or not all(map(is_of_codes, node.args)):
        return _ONE_QUANTIZED
    terms = node.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    given: list[Any] = [x.args for x in node.args]  # type: ignore[union-attr]
    if not isinstance(terms, int) or any(b != -1 for _, _, _, block, _ in given for b in block):
        return "since scales differ within an operand, or the sum's length is open"
    largest = terms
    for codes, _, zero, _, _ in given:
        low, high = range_of(module, codes, zero)
        largest *= max(abs(low), abs(high))
    if largest > LARGEST:
        return _TOO_LONG
    kind = torch.float32 if largest <= _EXACT else torch.int32
    writer = _Writer(module, node)
    with module.graph.inserting_before(node):
        sides = []
        for x in node.args:
            codes, _, zero, _, _ = x.args  # type: ignore[union-attr]
            side = writer.converted(codes, kind)
            if zero is not None:
                side = writer.call(aten.sub.Tensor, side, writer.parameter(zero, x, False, kind), like=side)  # type: ignore[arg-type]
            sides.append(side)
        value = writer.converted(writer.total(node, *sides, dtype=kind), torch.float32)
        for x, (_, scale, _, _, _) in zip(node.args, given, strict=True):
            factor = writer.parameter(scale, x, False, torch.float32)  # type: ignore[arg-type]
            value = writer.call(aten.mul.Tensor, value, factor, like=value)
    module.replace(node, value)
    module.graph.erase_node(node)
    return ""


_ONE_QUANTIZED = "since one operand is not quantized to 8 bits"
_TOO_LONG = "since a sum might not fit into 32 bits"


def _replace(module: Module, node: fx.Node) -> str:
    """A layer. Returns why it is none, or nothing."""
    if node.target is not aten.linear.default and node.target not in _CONVOLUTIONS:
        return "since this operator has no form in integers"
    x: Any = node.args[0]
    w: Any = node.args[1]
    if not is_of_codes(x) or not is_of_codes(w) or node.meta["val"].dtype is not torch.float32:
        return _ONE_QUANTIZED
    codes, scale, zero, block, _ = x.args
    weights, factor, shift, of_weight, _ = w.args
    size = weights.meta["val"].shape
    linear = node.target is aten.linear.default
    whole = all(b == -1 for b in block)
    rows = linear and all(b == 1 for b in block[:-1]) and block[-1] == -1
    along = 1 if _is_transposed(node) else 0  # the results' channels of a weight
    shared = [b for d, b in enumerate(of_weight) if d != along]
    if not (whole or rows) or any(b != -1 for b in shared) or of_weight[along] not in (-1, 1):
        return "since scales differ along its sum"
    if along and _groups(node) != 1 and (of_weight[along] != -1 or shift is not None):
        return "since groups share the scales of channels"
    if weights not in module.constants or len(size) < 2 or (shift is not None and shift not in module.constants):
        return "since its weight is computed"
    values = module.constants[weights].to(torch.int64)
    if shift is not None:
        values = values - module.constants[shift].to(torch.int64).reshape(
            [-1 if d == along else 1 for d in range(len(size))]
        )
    centered = values
    if along:  # a row for each result
        groups = _groups(node)
        values = values.reshape(groups, -1, *size[1:]).transpose(1, 2).flatten(0, 1)
    limits = range_of(module, codes, zero)
    largest = _largest(values, limits)
    if largest > LARGEST:
        return _TOO_LONG
    parts = _parts(values, limits, _groups(node) == 1 and not _is_transposed(node))
    kind = torch.float32 if parts else torch.int32
    writer = _Writer(module, node)
    with module.graph.inserting_before(node):
        left = writer.converted(codes, kind)
        if zero is not None:
            left = writer.call(aten.sub.Tensor, left, writer.parameter(zero, x, rows, kind), like=left)
        right = weights
        if shift is not None:
            right = module.add_constant(_narrow(centered), f"{node.name}_weight")
        right = writer.weight(right, kind)
        rest: list[Any] = list(node.args[2:])
        bias = rest[0] if rest else None
        rest[:1] = [None] if rest else []
        value = writer.converted(writer.whole_sum(left, right, rest, parts), torch.float32)
        trailing = 0 if linear else len(size) - 2
        value = writer.call(aten.mul.Tensor, value, writer.parameter(scale, x, rows, torch.float32), like=value)
        value = writer.call(aten.mul.Tensor, value, writer.of_channels(factor, trailing), like=value)
        if bias is not None:
            value = writer.call(aten.add.Tensor, value, writer.of_channels(bias, trailing), like=value)
    module.replace(node, value)
    module.graph.erase_node(node)
    return ""


def _narrow(codes: torch.Tensor) -> torch.Tensor:
    """Integers in the narrowest type that has them."""
    low, high = (int(v) for v in codes.aminmax()) if codes.numel() else (0, 0)
    fits = (
        t for t in (torch.int8, torch.uint8, torch.int16) if torch.iinfo(t).min <= low and high <= torch.iinfo(t).max
    )
    return codes.to(next(fits, torch.int32))


def _replace_sum(module: Module, node: fx.Node) -> None:
    """A product or a convolution of integers, whose result is int32."""
    given: Any = node.args
    x, zero, w, shift, *geometry = given
    size = w.meta["val"].shape
    limits = range_of(module, x, zero)
    known = w in module.constants and (shift is None or shift in module.constants)
    convolution = node.target is INTEGER_CONVOLUTION
    parts: list[tuple[int, int]] = []
    rest: list[Any] = []
    right = w
    if known and (convolution or (len(size) == 2 and x.meta["val"].dim() > 1)):
        centered = module.constants[w].to(torch.int64)
        if shift is not None:
            centered = centered - module.constants[shift].to(torch.int64)
        if not convolution:  # a row for each result
            centered = centered.t().contiguous()
        target = _CONVOLUTIONS[len(size) - 3] if convolution else aten.linear.default
        parts = _parts(centered, limits, not convolution or geometry[3] == 1)
        right, shift = module.add_constant(_narrow(centered), f"{node.name}_weight"), None
    else:
        target = _CONVOLUTIONS[len(size) - 3] if convolution else aten.matmul.default
        terms: Any = size[1:].numel() if convolution else size[-2 if len(size) > 1 else 0]
        largest = max(map(abs, limits)) * max(map(abs, range_of(module, w, shift)))
        if isinstance(terms, int) and terms * largest <= _EXACT:
            parts = [(0, terms)]
    kind = torch.float32 if parts else torch.int32
    writer = _Writer(module, node, target)
    with module.graph.inserting_before(node):
        left = writer.centered(x, zero, kind)
        if convolution:
            left, rest = writer.convolved(left, *geometry)
        right = writer.centered(right, shift, kind) if shift is not None else writer.weight(right, kind)
        total = writer.whole_sum(left, right, rest, parts)
        for user in list(node.users):
            if user.target is aten._to_copy.default and user.kwargs == {"dtype": torch.float32}:
                number = writer.converted(total, torch.float32)
                number.meta["exact"] = True
                module.replace(user, number)
        made = writer.converted(total, torch.int32)
    module.replace(node, made)
    module.graph.erase_node(node)


_MOST_PARTS = 4
"""Of a long sum. Further ones would cost more than integers."""


def _parts(values: torch.Tensor, limits: tuple[int, int], divisible: bool) -> list[tuple[int, int]]:
    """Channels of parts of the sum that float32 holds exactly: one part, or, if it can be divided, a few; none if that is not
    enough.
    """
    channels = values.shape[1]
    for count in range(1, _MOST_PARTS + 1):
        if count > 1 and (channels < _MOST_PARTS * count or not divisible):
            break
        step = -(-channels // count // 4) * 4 if count > 1 else channels
        found = [(a, min(a + step, channels)) for a in range(0, channels, max(step, 1))] or [(0, 0)]
        if all(_largest(values[:, a:b], limits) <= _EXACT for a, b in found):
            return found
    return []


def _groups(node: fx.Node) -> int:
    if node.target is aten.linear.default:
        return 1
    place = 8 if node.target is aten.convolution.default else 6
    groups: Any = node.args[place] if len(node.args) > place else node.kwargs.get("groups", 1)
    return int(groups)


def range_of(module: Module, codes: Any, zero: Any) -> tuple[int, int]:
    """The range of codes less their zero point."""
    known = codes.args[4:6] if codes.target is QUANTIZE else _limits(codes)
    limits = torch.iinfo(torch.int8 if known is not None else codes.meta["val"].dtype)
    low, high = known or (limits.min, limits.max)
    shift = _number(module, zero)
    return (low - shift, high - shift) if shift is not None else (low - high, high - low)


def _largest(weights: torch.Tensor, limits: tuple[int, int]) -> int:
    """The largest magnitude of any partial sum of products with numbers of a range, in any order. Padding adds zeros."""
    if not weights.numel():
        return 0
    low, high = min(limits[0], 0), max(limits[1], 0)
    above, below = weights.clamp(min=0).flatten(1).sum(1), -weights.clamp(max=0).flatten(1).sum(1)
    return int(torch.maximum(high * above - low * below, high * below - low * above).max())


def is_of_codes(node: Any) -> bool:
    """Whether a value is dequantized from integers of at most nine bits."""
    if not isinstance(node, fx.Node) or node.target is not DEQUANTIZE or node.meta["val"].dtype is not torch.float32:
        return False
    codes: Any = node.args[0]
    if codes.target is QUANTIZE or "limits" in codes.meta:
        return True
    return codes.meta["val"].dtype in (torch.int8, torch.uint8)


def _size(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size


class _Writer:
    """Writes the calls that replace a layer. target: what computes the sum, if that is not the layer's own operator."""

    def __init__(self, module: Module, node: fx.Node, target: Any = None) -> None:
        self.module, self.node, self.target = module, node, target or node.target

    def call(self, target: Any, *args: Any, like: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        node = self.module.graph.call_function(target, args)
        value = like.meta["val"]
        node.meta["val"] = value.new_empty(value.shape, dtype=dtype or value.dtype)
        return node

    def total(self, node: fx.Node, *args: Any, dtype: torch.dtype) -> fx.Node:
        """The sum that replaces a layer's, of other operands."""
        made = self.call(self.target, *args, like=node, dtype=dtype)
        made.meta["arithmetic"] = INTEGERS
        made.meta["exact"] = True
        return made

    def weight(self, codes: fx.Node, kind: torch.dtype) -> fx.Node:
        """Constant codes as what a sum reads."""
        made = self.converted(codes, kind)
        made.meta["codes"] = True
        return made

    def centered(self, codes: Any, zero: Any, kind: torch.dtype) -> fx.Node:
        """Codes less a zero point, which is broadcast to them."""
        made = self.converted(codes, kind)
        known = self.module.constants.get(zero)
        if zero is None or (known is not None and not known.any()):
            return made
        return self.call(aten.sub.Tensor, made, self.converted(zero, kind), like=made)

    def convolved(
        self, x: fx.Node, stride: Any, pads: Sequence[Any], dilation: Any, groups: int
    ) -> tuple[fx.Node, list[Any]]:
        """The input of a convolution, padded where the convolution itself cannot, and its further arguments."""
        rank = len(pads) // 2
        before, after = list(pads[:rank]), list(pads[rank:])
        if all(isinstance(p, int) and p == q >= 0 for p, q in zip(before, after, strict=True)):
            return x, [None, stride, before, dilation, groups]
        widths = [p for pair in zip(reversed(before), reversed(after), strict=True) for p in pair]
        padded = self.module.graph.call_function(aten.constant_pad_nd.default, (x, widths))
        value = x.meta["val"]
        more = [a + b for a, b in zip(map(_size, before), map(_size, after), strict=True)]
        sizes = [*value.shape[:2], *(n + m for n, m in zip(value.shape[2:], more, strict=True))]
        padded.meta["val"] = value.new_empty(sizes)
        return padded, [None, stride, [0] * rank, dilation, groups]

    def whole_sum(
        self, left: fx.Node, right: fx.Node, rest: list[Any], parts: list[tuple[int, int]]
    ) -> fx.Node:  # fmt: skip
        """The sum of products of two operands; of parts, if there are several."""
        if len(parts) > 1:
            return self.sum_of_parts(self.node, left, right, rest, parts)
        return self.total(self.node, left, right, *rest, dtype=left.meta["val"].dtype)

    def sum_of_parts(
        self, node: fx.Node, left: fx.Node, right: fx.Node, rest: list[Any], parts: list[tuple[int, int]]
    ) -> fx.Node:
        """A long sum as a sum of 32-bit integers, each an exact sum of floats over some of the channels."""
        along = -1 if self.target is aten.linear.default else 1 - len(right.meta["val"].shape)
        total: fx.Node | None = None
        for first, end in parts:
            x, w = (self.narrowed(v, along, first, end) for v in (left, right))
            part = self.total(node, x, w, *rest, dtype=torch.float32)
            if total is not None:  # a layer counts once
                del part.meta["arithmetic"]
            part = self.converted(part, torch.int32)
            total = part if total is None else self.call(aten.add.Tensor, total, part, like=part)
        assert total is not None
        return total

    def narrowed(self, x: fx.Node, dim: int, first: int, end: int) -> fx.Node:
        value = x.meta["val"]
        made = self.module.graph.call_function(aten.slice.Tensor, (x, dim % value.dim(), first, end))
        made.meta["val"] = value.narrow(dim, first, end - first)
        return made

    def converted(self, x: Any, dtype: torch.dtype) -> fx.Node:
        value = x.meta["val"]
        if value.dtype is dtype:
            return x  # type: ignore[no-any-return]
        node = self.module.graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
        node.meta["val"] = value.new_empty(value.shape, dtype=dtype)
        return node

    def reshaped(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        """A view, also of a constant: those of several dimensions are rounded where weights are."""
        if list(node.meta["val"].shape) == shape:
            return node
        made = self.module.graph.call_function(aten.reshape.default, (node, shape))
        made.meta["val"] = node.meta["val"].new_empty(shape)
        return made

    def parameter(self, parameter: fx.Node, x: fx.Node, rows: bool, dtype: torch.dtype) -> fx.Node:
        """A parameter of x for a whole tensor, or for each of its rows, to be broadcast."""
        value = parameter.meta["val"]
        parameter = self.converted(parameter, dtype)
        if not rows:
            return self.reshaped(parameter, []) if value.dim() else parameter
        outer = x.meta["val"].shape[:-1]
        if value.dim() == len(outer):
            made = self.module.graph.call_function(aten.unsqueeze.default, (parameter, -1))
            made.meta["val"] = parameter.meta["val"].new_empty((*value.shape, 1))
            return made
        return parameter

    def of_channels(self, parameter: fx.Node, trailing: int) -> fx.Node:
        """A parameter of the results' channels, to be broadcast over what follows them."""
        value = parameter.meta["val"]
        count = value.numel()
        return self.reshaped(parameter, [count] + [1] * trailing)
