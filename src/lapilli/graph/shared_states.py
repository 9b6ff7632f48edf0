"""Buffers that are shared by methods of a program: if one of them changes a buffer, it is a state of all, under
one name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lapilli.errors import CompileError
from lapilli.graph.module import Module, ModuleState


def share_states(modules: Mapping[str, Module]) -> None:
    """Gives states of different methods one name if they are the same buffer, and makes constants that another method
    changes states.

    Buffers are the same if they have the same name or share memory (which exported programs loaded from files do not).
    Raises CompileError if buffers with the same name have different initial values.
    """
    owners: dict[str, tuple[str, torch.Tensor]] = {}
    places: dict[object, str] = {}

    def check(name: str, method: str, tensor: torch.Tensor) -> None:
        first, value = owners[name]
        same = _memory(value) == _memory(tensor) or (value.dtype is tensor.dtype and torch.equal(value, tensor))
        if not same:
            raise CompileError(
                f"the methods {first} and {method} have different buffers of the name {name!r}, which a run changes: let them "
                "share one buffer, or rename one"
            )

    for method, module in modules.items():
        for state in module.states.values():
            known = places.get(_memory(state.value), state.name)
            if state.name not in owners and known not in {s.name for s in module.states.values()}:
                state.name = known
            owners.setdefault(state.name, (method, state.value))
            places.setdefault(_memory(state.value), state.name)
            check(state.name, method, state.value)
    for method, module in modules.items():
        for node, tensor in list(module.constants.items()):
            target = module.targets.get(node)
            name = target if target in owners else places.get(_memory(tensor))
            if name is not None and name not in {s.name for s in module.states.values()}:
                check(name, method, tensor)
                module.states[node] = ModuleState(name, module.constants.pop(node), None)


def _memory(t: torch.Tensor) -> object:
    """A key that is equal for tensors with the same memory."""
    return (t.data_ptr(), t.shape, t.stride(), t.dtype) if t.numel() else id(t)
