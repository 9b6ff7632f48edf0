"""What operators that read a tensor's memory (as_strided and its kin) find there.

A program's values have no strides: one that PyTorch keeps transposed is row-major on the device, and a part of another has memory
of its own. So memory becomes a value of its own here: a copy of the tensor at the root of the views, with its axes in the order in
which PyTorch stores them. The GPU fuses the copy into its reader; on the host it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lapilli.errors import CompileError
from lapilli.graph.aliasing import base_of
from lapilli.graph.module import Module

aten = torch.ops.aten

Order = tuple[int, ...]

_READS = {aten.as_strided.default, aten.as_strided_copy.default}

_MAY_COPY = {aten.contiguous, aten.flatten, aten.ravel, aten.reshape, aten.reshape_as, aten.to}
"""Views by their schemas that are copies unless the tensor is row-major and of the same dtype."""


def write_out_memory(module: Module) -> None:
    """Gives operators that read memory a value that is what PyTorch has there.

    Raises:
        CompileError: that memory has gaps or repeated elements, or begins before the tensor, or its order is not known.
    """
    for node in list(module.graph.nodes):
        if node.target in _READS:
            _read(module, node)
        elif node.target is aten.as_strided_scatter.default:
            _scatter(module, node)


def _read(module: Module, node: fx.Node) -> None:
    tensor, size, stride, *rest = node.args
    offset: Any = rest[0] if rest else node.kwargs.get("storage_offset")
    root = _root(tensor)  # type: ignore[arg-type]
    if offset is None:
        offset = tensor.meta["val"].storage_offset()  # type: ignore[union-attr]
    begin = root.meta["val"].storage_offset()
    if _known(begin) != 0 or isinstance(offset, torch.SymInt):
        offset = _known((offset.meta["val"] if isinstance(offset, fx.Node) else offset) - begin)
        if offset is None:
            raise CompileError(
                f"{node.target} of memory whose beginning differs from call to call; read a copy, as of .clone()"
            )
        if offset < 0:
            raise CompileError(f"{node.target} reads memory before its tensor; read the tensor that this is a part of")
    with module.graph.inserting_before(node):
        node.args = (_memory(module, root, _order(node, root)), size, stride, offset)
    node.kwargs = {}


def _scatter(module: Module, node: fx.Node) -> None:
    tensor: Any = node.args[0]
    if _known(tensor.meta["val"].storage_offset()) != 0:
        raise CompileError(f"{node.target} of a part of a tensor; write to a copy, as of .clone()")
    order = _order(node, tensor)
    with module.graph.inserting_before(node):
        written = _memory(module, tensor, order)
        made = module.graph.call_function(aten.as_strided_scatter.default, (written, *node.args[1:]), node.kwargs)
        made.meta["val"] = written.meta["val"]
        module.replace(node, permuted(module, made, inverse(order)))
    module.graph.erase_node(node)


def _memory(module: Module, root: fx.Node, order: Order) -> fx.Node:
    """A row-major value of the elements of `root` as they lie in memory."""
    at = permuted(module, root, order)
    if at is root and root.target is aten.clone.default and root.kwargs.get("memory_format") is torch.contiguous_format:
        return root
    # A copy, so that the host has it in this order too, and no pass replaces it by what it is a view of.
    made = module.graph.call_function(aten.clone.default, (at,), {"memory_format": torch.contiguous_format})
    made.meta["val"] = at.meta["val"].clone(memory_format=torch.contiguous_format)
    return made


def _root(node: fx.Node) -> fx.Node:
    """The tensor whose memory a view shows."""
    while (base := base_of(node)) is not None and _shares(node, base):
        node = base
    return node


def _shares(view: fx.Node, base: fx.Node) -> bool:
    """Whether a view by its schema has its base's memory, in the same elements."""
    val = base.meta["val"]
    copies = getattr(view.target, "overloadpacket", None) in _MAY_COPY and not val.is_contiguous()
    return not copies and val.dtype == view.meta["val"].dtype


def _order(node: fx.Node, root: fx.Node) -> Order:
    val = root.meta["val"]
    order = memory_order(val)
    if order is None and _is_row_major(val):  # of sizes that depend on data
        order = tuple(range(val.dim()))
    if order is None:
        raise CompileError(
            f"{node.target} of a tensor {tuple(val.shape)} with strides {val.stride()}: its memory has gaps or repeated elements, "
            "or its order depends on data; call .contiguous() before"
        )
    if root.op == "call_function" and _known(val.storage_offset()) != 0:
        raise CompileError(f"{node.target} of a part of another tensor's memory; read a copy, as of .clone()")
    return order


def _is_row_major(val: torch.Tensor) -> bool:
    expected: Any = 1
    for n, stride in zip(reversed(val.shape), reversed(val.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return False
        expected = expected * n
    return True


def _known(number: Any) -> int | None:
    found: int | None = number.node.maybe_as_int() if isinstance(number, torch.SymInt) else number
    return found


def memory_order(val: torch.Tensor) -> Order | None:
    """The order of the axes in memory, slowest first, of a dense tensor; None for others, and if data-dependent sizes leave
    it open.
    """
    sizes, strides = _hints(val.shape), _hints(val.stride())
    if sizes is None or strides is None:
        return None
    order = tuple(sorted(range(val.dim()), key=lambda d: (-strides[d], sizes[d] == 1, d)))
    expected = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != expected:
            return None
        expected *= sizes[d]
    natural = tuple(range(val.dim()))
    moved = [d for d in order if sizes[d] != 1]
    return natural if moved == sorted(moved) else order


def _hints(numbers: Sequence[Any]) -> list[int] | None:
    found = [n.node.hint if isinstance(n, torch.SymInt) else n for n in numbers]
    return None if None in found else [int(n) for n in found]


def permuted(module: Module, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """A value with the axes of another in this order: a new node, unless they are so."""
    if list(order) == list(range(len(order))):
        return node
    made = module.graph.call_function(aten.permute.default, (node, list(order)))
    made.meta["val"] = node.meta["val"].permute(*order)
    return made


def inverse(order: Sequence[int]) -> list[int]:
    """The order that undoes another."""
    return [order.index(d) for d in range(len(order))]
