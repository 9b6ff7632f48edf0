"""Sparse tensors of the device: their indices and values lie there, and their operators run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._pytree import tree_leaves

from lapilli.eager import storage
from lapilli.eager.devices import current_device, place
from lapilli.eager.fallback import on_cpu
from lapilli.eager.form import form

aten = torch.ops.aten

_PARTS = {
    "SparsePrivateUse1": (
        DispatchKey.SparseCPU,
        "_sparse_coo_tensor_with_dims_and_tensors _sparse_coo_tensor_with_dims _indices _values indices values _nnz is_coalesced "
        "_coalesced_ sparse_dim dense_dim _dimI _dimV",
    ),
    "SparseCsrPrivateUse1": (
        DispatchKey.SparseCsrCPU, "values crow_indices ccol_indices col_indices row_indices _nnz sparse_dim dense_dim",
    ),
}  # fmt: skip
"""Operators that put sparse tensors together and take them apart, and compute nothing: PyTorch's own for the CPU do."""

_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"), torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"), torch.sparse_bsc: ("ccol_indices", "row_indices"),
}  # fmt: skip


def register(library: torch.library.Library, every: torch.library.Library) -> None:
    """every: for all operators."""
    for key, (host, names) in _PARTS.items():
        for name in names.split():
            library.impl(name, _redispatched(getattr(aten, name).default, DispatchKeySet(host)), key)  # type: ignore[no-untyped-call]
        every.fallback(_boxed, key)  # type: ignore[no-untyped-call]


def _redispatched(op: torch._ops.OpOverload, keys: DispatchKeySet) -> Callable[..., Any]:
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


def _boxed(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    described = form(op)
    rest = op._schema.arguments[len(args) :]
    leaves = [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]
    placed = (leaf.get_device() for leaf in tree_leaves(leaves) if isinstance(leaf, torch.Tensor) and not leaf.is_cpu)
    index = next(placed, current_device())
    return on_cpu(described, leaves, index, "operators on sparse tensors are not supported on the GPU")


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, of the same layout."""
    return _rebuilt(tensor, storage.to_cpu, "cpu")


def from_cpu(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A copy on a device, of the same layout."""
    return _rebuilt(tensor, lambda part: storage.from_cpu(part, index), place(index))


def _rebuilt(tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor], device: Any) -> torch.Tensor:
    options: Any = {"dtype": tensor.dtype, "device": device}
    if tensor.layout is torch.strided:
        return move(tensor)
    if tensor.layout is torch.sparse_coo:
        parts = move(tensor._indices()), move(tensor._values())
        made: torch.Tensor = aten._sparse_coo_tensor_unsafe(
            *parts, tensor.shape, **options, is_coalesced=tensor.is_coalesced()
        )
        return made
    outer, inner = (getattr(tensor, name)() for name in _INDICES[tensor.layout])
    values = move(tensor.values())
    compressed: torch.Tensor = aten._sparse_compressed_tensor_unsafe(
        move(outer), move(inner), values, tensor.shape, layout=tensor.layout, **options
    )
    return compressed
