"""Computes numbers from the sizes of a call's arguments, by a Python function generated from torch's expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from lapilli.lower.torch_sizes import solve
from lapilli.runtime.sizes import function

Sizes = Callable[[Sequence[Any]], tuple[Any, ...]]

_BUILTINS = {f.__name__: f for f in (abs, bool, float, int, max, min, pow, round)}
"""Names that occur in printed expressions."""


def expression(value: Any) -> Any:
    """The sympy expression of a number."""
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else sympy.sympify(value)


class Sources:
    """Where the sizes of a call can be read from its arguments."""

    def __init__(self, placeholders: Sequence[fx.Node]) -> None:
        self.known: dict[str, str] = {}
        shown = list(_shown(placeholders))
        for text, e in shown:
            if isinstance(e, sympy.Symbol):
                self.known.setdefault(e.name, text)
        for name, text, *solved in solve(shown, self.known):
            factor, offset = map(self._text, solved)
            self.known[name] = f"({text} - ({offset})) // max({factor}, 1)"

    def _text(self, e: Any) -> str:
        """The text of an expression over known sizes."""
        texts = {s: sympy.Symbol(f"({self.known[s.name]})") for s in e.free_symbols}
        return str(PythonPrinter().doprint(e.xreplace(texts)))

    def has(self, value: Any) -> bool:
        """Whether a value can be computed from the arguments."""
        return all(s.name in self.known for s in expression(value).free_symbols)

    def function(self, values: Sequence[Any]) -> Sizes:
        """A function that computes the values from the arguments of a call."""
        expressions = [expression(v) for v in values]
        names = {s: f"v{k}" for k, s in enumerate(sorted(set().union(*(e.free_symbols for e in expressions)), key=str))}
        renamed = {s: sympy.Symbol(name, integer=True, nonnegative=True) for s, name in names.items()}
        texts = [PythonPrinter().doprint(e.xreplace(renamed)) for e in expressions]
        read = ", ".join(self.known[s.name] for s in names)
        computed = f"(lambda {', '.join(names.values())}: ({', '.join(texts)}{',' if texts else ''}))({read})"
        made: Sizes = function(["a"], computed, {"math": math, "torch": torch, **_BUILTINS})
        return made


def _shown(placeholders: Sequence[fx.Node]) -> Iterator[tuple[str, Any]]:
    """Texts that read a size, a stride or an offset from the arguments `a`, and their expressions."""
    tensors = []
    for position, node in enumerate(placeholders):
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            yield f"a[{position}]", val.node.expr
        elif isinstance(val, torch.Tensor):
            tensors.append((f"a[{position}]", val))
            for axis, size in enumerate(val.shape):
                if isinstance(size, torch.SymInt):
                    yield f"a[{position}].shape[{axis}]", size.node.expr
    for text, val in tensors:
        steps = {f"{text}.stride({axis})": step for axis, step in enumerate(val.stride())}
        for place, number in {**steps, f"{text}.storage_offset()": val.storage_offset()}.items():
            if isinstance(number, torch.SymInt):
                yield place, number.node.expr
