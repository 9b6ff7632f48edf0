"""STAND-IN until the operators are here: every operator runs on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lapilli.eager import storage


def copy_on_device(target: torch.Tensor, source: torch.Tensor) -> None:
    host = storage.to_cpu(source)
    if storage.is_dense(target):
        dense = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")
        storage._write(target, dense.copy_(host))
        return
    elements = storage.span(target)
    flat = torch.empty(elements, dtype=target.dtype, device="cpu")
    storage._read(target, flat)
    flat.as_strided(target.shape, target.stride()).copy_(host)
    storage._write(target, flat)


def call(op: Any, args: Any, kwargs: Any) -> Any:
    index = 0
    shared: dict[int, torch.Tensor] = {}

    def down(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal index
        if tensor.device.type != "vulkan":
            return tensor
        index = tensor.get_device()
        if id(tensor) not in shared:
            shared[id(tensor)] = storage.to_cpu(tensor)
        return shared[id(tensor)]

    args, kwargs = list(args), dict(kwargs)
    device = kwargs.get("device")
    if device is not None:
        from lapilli.eager.devices import index_of

        index = index_of(device)
        kwargs["device"] = "cpu"
    host_args, host_kwargs = tree_map_only(torch.Tensor, down, args), tree_map_only(torch.Tensor, down, kwargs)
    result = op(*host_args, **host_kwargs)
    alias: dict[int, torch.Tensor] = {}
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            name = argument.name
            mine = (
                kwargs.get(name) if name in kwargs else args[i] if i < len(args) and not argument.kwarg_only else None
            )
            its = host_kwargs.get(name) if name in kwargs else host_args[i] if mine is not None else None
            for m, h in zip(mine, its) if isinstance(mine, (list, tuple)) else [(mine, its)]:
                if isinstance(m, torch.Tensor) and m.device.type == "vulkan":
                    if m.shape != h.shape:
                        m.resize_(h.shape)
                    copy_on_device_from_host(m, h)
                    alias[id(h)] = m

    def up(tensor: torch.Tensor) -> torch.Tensor:
        return alias[id(tensor)] if id(tensor) in alias else storage.from_cpu(tensor, index)

    return tree_map_only(torch.Tensor, up, result)


def copy_on_device_from_host(target: torch.Tensor, host: torch.Tensor) -> None:
    storage.copy_(target, host)


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return call(op, args, kwargs)
