"""Numbers that a call computes from the sizes of its arguments: a Python function made from torch's expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from lapilli.lower.sizes import linear

Sizes = Callable[[Sequence[Any]], tuple[Any, ...]]


def expression(value: Any) -> Any:
    """A number of torch as sympy has it."""
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else sympy.sympify(value)


class Sources:
    """Where the arguments of a call show the sizes."""

    def __init__(self, placeholders: Sequence[fx.Node]) -> None:
        self.known: dict[sympy.Symbol, str] = {}
        shown = list(_shown(placeholders))
        for text, e in shown:
            if isinstance(e, sympy.Symbol):
                self.known.setdefault(e, text)
        count = -1
        while count != len(self.known):  # of a sum or product, where all but one are known
            count = len(self.known)
            for text, e in shown:
                unknown = [s for s in e.free_symbols if s not in self.known]
                solved = linear(e, unknown[0]) if len(unknown) == 1 else None
                if solved is not None:
                    factor, offset = map(self._text, solved)
                    self.known[unknown[0]] = f"({text} - ({offset})) // max({factor}, 1)"

    def _text(self, e: Any) -> str:
        """Of an expression of sizes that are known."""
        return str(PythonPrinter().doprint(e.xreplace({s: sympy.Symbol(f"({self.known[s]})") for s in e.free_symbols})))

    def has(self, value: Any) -> bool:
        """Whether a call can compute a value."""
        return bool(expression(value).free_symbols <= self.known.keys())

    def function(self, values: Sequence[Any]) -> Sizes:
        """A function from the arguments of a call to the values."""
        expressions = [expression(v) for v in values]
        names = {s: f"v{k}" for k, s in enumerate(sorted(set().union(*(e.free_symbols for e in expressions)), key=str))}
        lines = [f"    {name} = {self.known[s]}" for s, name in names.items()]
        renamed = {s: sympy.Symbol(name, integer=True, nonnegative=True) for s, name in names.items()}
        texts = [PythonPrinter().doprint(e.xreplace(renamed)) for e in expressions]
        code = "\n".join(["def sizes(a):", *lines, f"    return ({', '.join(texts)}{',' if texts else ''})"])
        scope: dict[str, Any] = {"math": math, "torch": torch}
        exec(code, scope)
        made: Sizes = scope["sizes"]
        return made


def _shown(placeholders: Sequence[fx.Node]) -> Iterator[tuple[str, Any]]:
    """Text that reads a size, a stride or an offset from the arguments `a`, and what it is."""
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
