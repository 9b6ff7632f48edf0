"""Detects changes of weights."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

_SAMPLES = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Snapshot:
    """Remembers tensors by identity, version and address, without keeping them alive.

    Writes to a tensor's memory that bypass torch (through `tensor.data`, or a NumPy view) do not change its version. For
    tensors on the CPU, some elements are compared as well, which detects a change of all elements.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], on_death: Callable[[], None]) -> None:
        self._references = [weakref.ref(t, lambda _: self._die()) for t in tensors]
        self._versions = list(map(_version, tensors))
        self._storages = [
            t.untyped_storage() for t in tensors
        ]  # kept alive, so that no other memory gets their address
        self._places = _places(tensors)
        self._samples = [s for s in map(_sample, tensors) if s is not None]
        self._values = _values(self._samples)
        self._on_death = on_death

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensors, unchanged."""
        return (
            list(map(_version, tensors)) == self._versions
            and _places(tensors) == self._places
            and all(map(operator.is_, map(operator.call, self._references), tensors))
            and (self._values is None or torch.equal(_values(self._samples), self._values))  # type: ignore[arg-type]
        )

    def changed(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Positions of tensors that were replaced or changed; all of them if that is unknown."""
        now = zip(map(_version, tensors), _places(tensors), self._references, tensors, strict=True)
        then = zip(self._versions, self._places, strict=True)
        found = [
            k
            for k, ((version, place, reference, tensor), before) in enumerate(zip(now, then, strict=True))
            if (version, place) != before or reference() is not tensor
        ]
        return found or list(range(len(tensors)))

    def _die(self) -> None:
        self._storages, self._samples, self._values = [], [], None
        self._on_death()


def are_tracked(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether changes of all tensors can be detected: tensors created in inference mode have no version."""
    return not any(t.is_inference() for t in tensors)


_version = operator.attrgetter("_version")
_address = operator.attrgetter("_cdata")


def _places(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Addresses of tensors, or of their storages for tensors on the device, which have no address."""
    places = list(map(torch._C.TensorBase.data_ptr, tensors))
    return places if all(places) else list(map(_address, map(torch._C.TensorBase.untyped_storage, tensors)))


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bits of some elements, spread over a tensor's memory, as a view of it."""
    if not tensor.is_cpu or not tensor.numel() or not tensor.is_contiguous() or tensor.itemsize not in _BITS:
        return None
    flat = tensor.detach().view(-1).view(_BITS[tensor.itemsize])
    return flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]


def _values(samples: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat(list(samples)) if samples else None
