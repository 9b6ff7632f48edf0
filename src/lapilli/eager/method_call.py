"""Calls methods of programs with tensors on the device: for compiled graphs, and for programs that are given such
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from lapilli.eager import storage
from lapilli.eager.launch import Key, Launch, fitting
from lapilli.lower.registry import RANDOM_KEY
from lapilli.player import NativeProgram
from lapilli.runtime.description import Description
from lapilli.runtime.sizes import formula

Shape = tuple[int, ...]


class MethodCall:
    """One method. Its sizes are given by value, and its tensors are row-major, on the device."""

    def __init__(self, native: NativeProgram, number: int, description: Description, index: int) -> None:
        """number: of the method; index: of the device."""
        method = description.methods[number]
        self.sizes = [s.name for s in method.symbols if s.name not in RANDOM_KEY]
        """Names of the symbols whose values a call provides."""
        self.index = index
        self._launch = Launch(
            native, number, index,
            [Key(RANDOM_KEY.index(s.name)) if s.name in RANDOM_KEY else fitting for s in method.symbols],
            [getattr(torch, spec.dtype) for spec in method.inputs], len(method.outputs),
            sums=bool(method.integer_limit), checks=method.checks, effects=bool(description.states),
        )  # fmt: skip
        self._dtypes = [getattr(torch, spec.dtype) for spec in method.outputs]
        names = [s.name for s in method.symbols]
        shapes = [spec.shape for spec in method.outputs]
        self._shapes = shapes_of(names, shapes) or (lambda *symbols: native.shapes(number, symbols)[: len(shapes)])
        self._fixed = None if names else self._shapes()

    def __call__(
        self, sizes: Sequence[int], inputs: Sequence[torch.Tensor], changed: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Queues a call, and returns its outputs but for the changed tensors. sizes: in the order of `sizes`. changed: the memory
        of the last outputs. Raises CannotRun for integers beyond 32 bits, given or computed.
        """
        launch = self._launch
        launch.check(inputs)
        words = launch.bind(sizes)
        shapes = self._shapes(*words) if self._fixed is None else self._fixed
        own = len(self._dtypes) - len(changed)
        made = [storage.empty(s, d, self.index) for s, d in zip(shapes[:own], self._dtypes[:own], strict=True)]
        launch.queue(words, inputs, [*made, *changed])
        return made


def shapes_of(names: Sequence[str], shapes: Sequence[Sequence[int | str]]) -> Callable[..., Sequence[Shape]] | None:
    """A function from the values of the symbols to the shapes; the player writes sizes in Python's syntax. None if one is
    too long to be written out (parts of it have names then, such as e41): the player must compute it.
    """
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
