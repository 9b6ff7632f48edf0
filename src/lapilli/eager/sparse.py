"""Sparse tensors on the device: their indices and values are there, and their operators run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._pytree import tree_leaves

from lapilli.eager import transfer
from lapilli.eager.device_state import current_device
from lapilli.eager.host_call import on_cpu
from lapilli.eager.operator_schema import schema_of

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
"""Operators that only assemble sparse tensors and take them apart: PyTorch's CPU kernels work for these."""
_OTHERWISE = {"_pin_memory", "is_pinned"}
"""Operators of the CPU's memory."""


def register(library: torch.library.Library, every: torch.library.Library) -> None:
    """every: for all operators. Those that the CPU has kernels for are registered one by one, for a fallback comes after what
    PyTorch composes of dense tensors for any device.
    """
    for key, (host, names) in _PARTS.items():
        parts = names.split()
        for name in parts:
            library.impl(name, _redispatched(getattr(aten, name).default, DispatchKeySet(host)), key)  # type: ignore[no-untyped-call]
        library.impl("clone", _clone, key)  # type: ignore[no-untyped-call]
        for name, op in _operators_of(host):
            if name not in {"clone", *parts, *_OTHERWISE}:
                library.impl(name, partial(_boxed, op), key)  # type: ignore[no-untyped-call]
        every.fallback(_boxed, key)  # type: ignore[no-untyped-call]


def _operators_of(key: DispatchKey) -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """The operators of ATen with a kernel for the key, by their names without the namespace."""
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(key.name):
        namespace, _, name = qualified.partition("::")
        if namespace == "aten":
            packet, _, overload = name.partition(".")
            yield name, getattr(getattr(aten, packet), overload or "default")


def _clone(tensor: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    return transfer.rebuilt(tensor, torch.clone, tensor.device)


def _redispatched(op: torch._ops.OpOverload, keys: DispatchKeySet) -> Callable[..., Any]:
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


def _boxed(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    described = schema_of(op)
    rest = op._schema.arguments[len(args) :]
    leaves = [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]
    placed = (leaf.get_device() for leaf in tree_leaves(leaves) if isinstance(leaf, torch.Tensor) and not leaf.is_cpu)
    index = next(placed, current_device())
    return on_cpu(described, leaves, index, "operators on sparse tensors are not supported on the GPU")
