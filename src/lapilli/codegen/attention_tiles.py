"""Selects the tiles of attention's kernels on matrix units, and of its gradients' (docs/notes/h100-kernels.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lapilli.codegen import tiles
from lapilli.target import Target

SEEN = 32
"""Bytes of shared memory for which keys a mask leaves."""


_SCRATCH = 80
"""uint4s of a subgroup: a fragment of sums."""


@dataclass(frozen=True)
class AttentionTile:
    """subgroups of a work group, each of which has 16 queries; keys of a tile."""

    subgroups: int
    keys: int

    def __str__(self) -> str:
        return f"{self.queries} queries, {self.keys} keys"

    @property
    def queries(self) -> int:
        return 16 * self.subgroups

    @property
    def invocations(self) -> int:
        return 32 * self.subgroups

    def shared(self, size: int, width: int) -> int:
        """Bytes of shared memory: keys and values, or before them half or all of the queries, and each subgroup's own."""
        line, line_v = 2 * -(-size // 16) + 1, 2 * -(-width // 16) + 1
        staged = 0 if tiles.OPERANDS_STAY else self.queries * line // (2 if self.queries > 2 * self.keys else 1)
        own = _SCRATCH + tiles.OPERANDS_STAY * (16 * line + 3 * self.keys)
        return 16 * (max(self.keys * (line + line_v), staged) + self.subgroups * own)

    def divides(self, *sizes: int) -> bool:
        """Whether all invocations load as much of a tile."""
        return all(self.keys * 2 * -(-d // 16) % self.invocations == 0 for d in sizes)


_ATTENTION = tuple(AttentionTile(*t) for t in ((4, 32), (2, 64), (2, 32)))


_WIDE_ATTENTION, _WIDE_ROWS = AttentionTile(8, 64), 192
"""For rows of keys and values of so many numbers together: registers allow no second work group on a compute unit."""
_OTHER_ATTENTION = tuple(AttentionTile(*t) for t in ((8, 64), (8, 32), (4, 64)))
"""Which only measuring can choose."""


def attention_tiles(batch: int, rows: int, size: int, width: int, target: Target) -> list[AttentionTile]:
    """The tiles of attention on matrix units, the one first that is taken without measuring; none if all are too large. size: of a
    row of queries, width: of values.
    """

    def fits(t: AttentionTile) -> bool:
        return (
            t.divides(size, width)
            and t.shared(size, width) + SEEN <= target.shared_memory
            and t.invocations <= target.invocations
        )

    fitting = [*filter(fits, (_WIDE_ATTENTION, *_ATTENTION) if size + width >= _WIDE_ROWS else _ATTENTION)]
    return _busiest_first(fitting, filter(fits, _OTHER_ATTENTION), batch, rows, target)


def _busiest_first(
    usual: list[AttentionTile], others: Iterable[AttentionTile], batch: int, rows: int, target: Target
) -> list[AttentionTile]:
    """All of them, each once: first the first usual one of which each compute unit has a work group, or the last. None without a
    usual one."""
    busy = [t for t in usual if batch * -(-rows // t.queries) >= target.compute_units]
    first = (busy or usual[::-1])[:1]
    return [*dict.fromkeys((*first, *usual, *others))] if first else []


_GRADIENT = tuple(AttentionTile(*t) for t in ((4, 32), (2, 32)))
_SUMS = tuple(AttentionTile(*t) for t in ((4, 64), (4, 32), (2, 32)))
_WIDEST_GRADIENT = 320
"""Numbers in a row of keys and one of values together, up to which registers hold what belongs to a row. Of 192 each, the kernels
take 2.4 ms and whole products 1.6; of 160 they take 1.2 for 1.5."""


@dataclass(frozen=True)
class RowSizes:
    """Of the rows that pass through memory when attention's gradients and sums are computed. Others of these sizes stay."""

    passing: tuple[int, ...]

    def shared(self, t: AttentionTile) -> int:
        """Bytes of shared memory: a tile, or before it one operand that stays, and each subgroup's own."""
        lines = [2 * -(-size // 16) + 1 for size in self.passing]
        own = _SCRATCH + tiles.OPERANDS_STAY * (16 * sum(lines) + 3 * t.keys)
        return 16 * (max(t.keys * sum(lines), t.queries * max(lines)) + t.subgroups * own)


def gradient_tiles(batch: int, rows: int, sizes: RowSizes, target: Target) -> list[AttentionTile]:
    """The tiles of attention's gradients, or of the sums of queries, the one first that is taken without measuring; none if all are
    too large.
    """
    usual = _SUMS if len(sizes.passing) == 1 else _GRADIENT

    def fits(t: AttentionTile) -> bool:
        shared = sizes.shared(t) <= target.shared_memory
        return shared and t.divides(*sizes.passing) and t.invocations <= target.invocations

    if len(sizes.passing) > 1 and sum(sizes.passing) > _WIDEST_GRADIENT:
        return []
    others = filter(fits, (*_ATTENTION, *_OTHER_ATTENTION))
    return _busiest_first([*filter(fits, usual)], others, batch, rows, target)
