"""Reports where each operator of a model runs, and why if not on the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OperatorReport:
    """One call in the model's graph.

    Attributes:
        name: of the node in the graph.
        operator: the ATen operator.
        where: "gpu", "cpu" (in torch), or "host" (control flow, numbers read from tensors).
        reason: why it does not run on the GPU; empty if it does.
        arithmetic: of a product or convolution of quantized operands: "integers", or "floats" and why. Empty for others.
    """

    name: str
    operator: str
    where: str
    reason: str = ""
    arithmetic: str = ""


@dataclass(frozen=True)
class Report:
    """Where each operator of a method runs.

    Attributes:
        segments: the steps of a run, in order: "gpu", "cpu", or a kind of control flow.
        operators: every call in the graph.
    """

    segments: tuple[str, ...]
    operators: tuple[OperatorReport, ...]

    @property
    def on_cpu(self) -> tuple[OperatorReport, ...]:
        """The calls that run in torch on the CPU."""
        return tuple(o for o in self.operators if o.where == "cpu")

    @property
    def in_integers(self) -> tuple[OperatorReport, ...]:
        """The products and convolutions that are exact sums of integers."""
        return tuple(o for o in self.operators if o.arithmetic == "integers")

    @property
    def dequantized(self) -> tuple[OperatorReport, ...]:
        """The products and convolutions of quantized operands that compute in floats."""
        return tuple(o for o in self.operators if o.arithmetic.startswith("floats"))

    def __str__(self) -> str:
        count = Counter(o.where for o in self.operators)
        lines = [
            f"{len(self.operators)} operators: {count['gpu']} on the GPU, {count['cpu']} on the CPU"
            + (f", {count['host']} by the host" if count["host"] else ""),
            f"segments: {' → '.join(self.segments)}",
        ]
        if self.in_integers or self.dequantized:
            lines.append(f"quantized: {len(self.in_integers)} in integers, {len(self.dequantized)} in floats")
            lines += [f"  {o.name}: {o.operator} in {o.arithmetic}" for o in self.dequantized]
        return "\n".join(lines + [f"  {o.name}: {o.operator} on the CPU: {o.reason}" for o in self.on_cpu])


def to_json(operators: Sequence[OperatorReport]) -> list[list[str]]:
    """Converts operators to short lists."""
    rows = ([o.name, o.operator, o.where, o.reason, o.arithmetic] for o in operators)
    return [row if row[4] else row[: 4 if row[3] else 3] for row in rows]


def from_json(rows: Any) -> tuple[OperatorReport, ...]:
    """Converts the lists of `to_json` back.

    Raises:
        TypeError: the JSON is not of this form.
    """
    if not isinstance(rows, list):
        raise TypeError("the operators are not a list")
    for row in rows:
        if not isinstance(row, list) or len(row) not in (3, 4, 5) or not all(isinstance(text, str) for text in row):
            raise TypeError(f"{str(row)[:80]!r} is no operator")
    return tuple(OperatorReport(*row) for row in rows)
