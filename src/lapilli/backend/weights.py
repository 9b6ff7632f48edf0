"""Whether weights are what they were."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch


class Snapshot:
    """Remembers tensors by identity, version and place in memory, without keeping them alive.

    What is written to a tensor's memory behind torch's back (through `tensor.data` or a NumPy view) is not seen."""

    def __init__(self, tensors: Sequence[torch.Tensor], on_death: Callable[[], None]) -> None:
        self._references = [weakref.ref(t, lambda _: self._die()) for t in tensors]
        self._versions = [t._version for t in tensors]
        self._storages = [t.untyped_storage() for t in tensors]  # held: no other memory can take their place
        self._pointers = [t.data_ptr() for t in tensors]
        self._on_death = on_death

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, unchanged."""
        return (
            [t._version for t in tensors] == self._versions
            and [t.data_ptr() for t in tensors] == self._pointers
            and all(r() is t for r, t in zip(self._references, tensors, strict=True))
        )

    def _die(self) -> None:
        self._storages.clear()
        self._on_death()


def are_tracked(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether changes of all tensors can be seen: tensors made in inference mode have no version."""
    return not any(t.is_inference() for t in tensors)
