"""What a recurrent layer does with a sequence: a note on a Reduce whose result is all states that it goes through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lapilli.ir.expr import Expr, Load, loads
from lapilli.ir.integer import Var
from lapilli.ir.node import Node

TEAM = 256
"""Invocations, at most, that share the units of a sequence."""
TERMS = 32
"""Terms of a sum that a round of a loop adds."""
ROUNDS = 60_000
"""Rounds of all loops of an invocation together: lavapipe ends them after 65,535, without a word."""
MOST_UNITS = 2048
"""Units of a layer, and numbers of its hidden state: two of them fit into the shared memory that every device has."""


@dataclass(frozen=True)
class Recurrence:
    """out[s, b] = the states of sequence b after step s: the hidden state [width], and where `hidden` is given the carried state
    [units] after it. Else both are the same.

    carried, hidden: the new states of unit `unit`, where loads of stand-ins [batch, units] mean: sums, one a gate,
    sum_k weight[gate * units + unit, k] * (old hidden state)[k]; old and new, the carried state before and after.
    weight: [gates * units, width]. initial: the states before the first step, [batch, width] and [batch, units].
    projection: [width, units], by which `hidden` becomes the hidden state. live: whether a sequence goes on at a step; where it
    does not, its states stay."""

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
        """What its expressions read but stand-ins."""
        stand_ins = {n.id for n in (*self.sums, self.old, self.new)}
        for e in self.expressions:
            yield from (ld for ld in loads(e) if ld.node.id not in stand_ins)

    def operands(self) -> list[Node]:
        """The values that it reads, each once."""
        tensors = [self.weight, *self.initial, *([self.projection] if self.projection is not None else [])]
        return list({n.id: n for n in (*tensors, *(ld.node for ld in self.loads()))}.values())


def rounds(units: int, width: int, projected: bool) -> int:
    """Rounds of loops that a step takes; a loop's end counts as one."""

    def of_sums(count: int, terms: int) -> int:
        return -(-count // TEAM) * (1 + terms // TERMS)

    return 1 + of_sums(units, width) + (of_sums(width, units) if projected else 0)
