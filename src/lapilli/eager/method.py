"""Methods of a program on the stream of a device, with tensors of the device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lapilli.eager import devices, movement, storage
from lapilli.eager.launch import bits
from lapilli.eager.signature import CannotRun
from lapilli.lower.registry import RANDOM_KEY
from lapilli.player import NativeProgram
from lapilli.runtime.description import Method
from lapilli.runtime.sizes import formula

Shape = tuple[int, ...]


class MethodLaunch:
    """One method: its symbols are given by value, its tensors row-major on the device."""

    def __init__(self, native: NativeProgram, number: int, method: Method, index: int) -> None:
        """index: of the device."""
        self.index = index
        self.dtypes = [getattr(torch, spec.dtype) for spec in method.outputs]
        self._checks = method.checks
        self._is_wide = storage.is_nearly_wide if method.integer_limit else storage.is_wide
        self._longs = [k for k, spec in enumerate(method.inputs) if spec.dtype == "int64"]
        names = [s.name for s in method.symbols]
        self._numbers = [k for k, name in enumerate(names) if name not in RANDOM_KEY]
        shapes = [spec.shape for spec in method.outputs]
        self._shapes = shapes_of(names, shapes) or (lambda *symbols: native.shapes(number, symbols)[: len(shapes)])
        self._fixed = None if names else self._shapes()
        stream = devices.stream_of(index)
        self._alignment = stream.alignment
        outputs = len(method.outputs) + bool(method.checks)
        self._launch = stream.launch(native, number, len(names), len(method.inputs), outputs)

    def __call__(self, symbols: Sequence[int], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Raises CannotRun for integers beyond 32 bits, given or computed."""
        if any(self._is_wide(inputs[k]) for k in self._longs):
            raise CannotRun(
                "an int64 tensor has values that do not fit into the 32 bits in which the GPU computes them"
            )
        for k in self._numbers:
            bits(symbols[k])
        shapes = self._shapes(*symbols) if self._fixed is None else self._fixed
        made = [storage.empty(s, d, self.index) for s, d in zip(shapes, self.dtypes, strict=True)]
        words = list(symbols)
        held: list[Any] = []
        for tensor in inputs:
            offset = int(tensor.storage_offset()) * tensor.itemsize
            if offset % self._alignment:
                tensor, offset = movement.aligned(tensor), 0
            buffer = storage.buffer_of(tensor)
            held.append(buffer)
            words += (buffer.address, offset)
        outputs = [word for t in made for word in (storage.buffer_of(t).address, 0)]
        if not any(math.prod(s) for s in shapes):
            return made
        if not self._checks:
            self._launch(*words, *outputs)
            return made
        first = storage.empty((), torch.int32, self.index)  # number of the first check that failed, from 1, or 0
        self._launch(*words, *outputs, storage.buffer_of(first).address, 0)
        failed = int(storage.to_cpu(first).item())
        if failed:
            raise CannotRun(
                f"the int64 results of {self._checks[failed - 1]} do not fit into the 32 bits in which the GPU computes them"
            )
        return made


def shapes_of(names: Sequence[str], shapes: Sequence[Sequence[int | str]]) -> Callable[..., Sequence[Shape]] | None:
    """A function from the values of the symbols to the shapes; the player writes sizes as Python does. None where one is too
    long to be written whole (parts of it have names then, such as e41): the player knows it."""
    local = {name: f"v{k}" for k, name in enumerate(names)}
    words = {
        w for shape in shapes for size in shape if isinstance(size, str) for w in re.findall(r"[A-Za-z_]\w*", size)
    }
    if not words <= {*local, "min", "max"}:
        return None
    texts = []
    for shape in shapes:
        sizes = [_renamed(str(size), local) for size in shape]
        texts.append(f"({', '.join(sizes)}{',' if sizes else ''})")
    return formula(local.values(), f"({', '.join(texts)}{',' if texts else ''})")


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m[0], m[0]), text)


def on_device(tensor: torch.Tensor, order: Sequence[int] | None, index: int) -> torch.Tensor:
    """A tensor on the device with these elements, dense in an order of its axes, as which it comes: the tensor itself where it
    is that already."""
    if not devices.is_ours(tensor):
        tensor = storage.from_cpu(tensor.detach().resolve_neg(), index)
    elif tensor.get_device() != index:
        tensor = tensor.detach().to(devices.place(index))
    seen = tensor if order is None else tensor.permute(*order)
    return seen if seen.is_contiguous() else movement.gather(seen)
