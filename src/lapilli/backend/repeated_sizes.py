"""When a graph with dynamic sizes is compiled for the sizes of its calls.

torch.compile makes a size dynamic once it changes: the last batch of an epoch is enough, and from then on that graph gets the
full batches too. Gradients of convolutions then take ten times as long and more, for their fast kernels need fixed sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import fx

from lapilli.attention_operators import ATTENTION, ATTENTION_BACKWARD
from lapilli.backend.fixed_sizes import dynamic_sizes
from lapilli.backend.size_sources import Sources

aten = torch.ops.aten

_NEED_SIZES = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten.convolution_backward.default, ATTENTION, ATTENTION_BACKWARD,
}  # fmt: skip
"""Operators whose kernels for dynamic sizes can take many times as long."""

IN_A_ROW = 3
"""Calls with the same sizes after which these get a program of their own: sequences that vary repeat theirs by chance."""
MOST = 8
"""Such programs of a graph."""

T = TypeVar("T")


def need_fixed_sizes(graph: fx.Graph) -> bool:
    """Whether a graph computes products, convolutions or attention."""
    return any(node.target in _NEED_SIZES for node in graph.nodes)


class RepeatedSizes(Generic[T]):
    """What the calls of a graph with repeated sizes use. names: of the sizes."""

    def __init__(self, graph: fx.Graph) -> None:
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        symbols = dynamic_sizes(placeholders) if need_fixed_sizes(graph) else []
        if symbols:
            sources = Sources(placeholders)
            symbols = [s for s in symbols if s.name in sources.known]
        self.names = [s.name for s in symbols]
        self._read = sources.function(symbols) if symbols else None
        self._made: dict[tuple[int, ...], T] = {}
        self._last: tuple[int, ...] = ()
        self._calls = 0

    def get(self, given: Sequence[object], make: Callable[[dict[str, int]], T]) -> T | None:
        """What `make(sizes)` returned for the sizes of a call. None: they have not come often enough."""
        if self._read is None:
            return None
        sizes: tuple[int, ...] = self._read(given)
        if sizes in self._made:
            return self._made[sizes]
        self._calls = self._calls + 1 if sizes == self._last else 1
        self._last = sizes
        if self._calls < IN_A_ROW or len(self._made) >= MOST:
            return None
        return self._made.setdefault(sizes, make(dict(zip(self.names, sizes, strict=True))))
