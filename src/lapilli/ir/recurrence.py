"""Recurrent layers over whole sequences: the annotation of a Reduce whose result consists of the states after
every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lapilli.ir.expr import Expr, Load, loads
from lapilli.ir.integer import Var
from lapilli.ir.node import Node

TEAM = 256
"""The largest number of invocations that share the units of a sequence."""
TERMS = 32
"""The number of terms that one iteration of a loop adds."""
ROUNDS = 60_000
"""The limit of iterations of all loops of an invocation: lavapipe silently ends loops after 65,535."""
MOST_UNITS = 2048
"""The largest number of units, and width of the hidden state: two of each fit into the shared memory of any device."""


@dataclass(frozen=True)
class Recurrence:
    """out[s, b] = the states of sequence b after step s: the hidden state [width], followed by the carried state [units] if
    `hidden` is given. Otherwise both are the same.

    carried, hidden: the new states of unit `unit`. They load from placeholders [batch, units]: sums, one for each gate,
    which are sum over k of weight[gate * units + unit, k] * (old hidden state)[k]; old and new, the carried state before
    and after the step. weight: [gates * units, width]. initial: the states before the first step, [batch, width] and
    [batch, units]. projection: [width, units], by which `hidden` is multiplied to get the hidden state. live: whether a
    sequence has this step; otherwise its states stay the same.
    """

    step: Var
    batch: Var
    unit: Var
    weight: Node
    initial: tuple[Node, ...]
    sums: tuple[Node, ...]
    old: Node
    new: Node
    carried: Expr
    hidden: Expr | None
    projection: Node | None
    live: Expr | None

    @property
    def expressions(self) -> list[Expr]:
        return [e for e in (self.carried, self.hidden, self.live) if e is not None]

    def loads(self) -> Iterator[Load]:
        """The loads in its expressions, except those of placeholders."""
        stand_ins = {n.id for n in (*self.sums, self.old, self.new)}
        for e in self.expressions:
            yield from (ld for ld in loads(e) if ld.node.id not in stand_ins)

    def operands(self) -> list[Node]:
        """The values that it reads, each once."""
        tensors = [self.weight, *self.initial, *([self.projection] if self.projection is not None else [])]
        return list({n.id: n for n in (*tensors, *(ld.node for ld in self.loads()))}.values())


def rounds(units: int, width: int, projected: bool) -> int:
    """The number of loop iterations that a step takes; the end of a loop counts as one."""

    def of_sums(count: int, terms: int) -> int:
        return -(-count // TEAM) * (1 + terms // TERMS)

    return 1 + of_sums(units, width) + (of_sums(width, units) if projected else 0)
