"""Keys and values of attention that lie in pages of a cache: `cache[table].transpose(1, 2).flatten(2, 3)` (Kwon et al.,
"PagedAttention", 2023), or `cache[lines]`, whose pages are whole sequences. Kernels of attention read them where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lapilli.ir.axes import index_of, unravel
from lapilli.ir.expr import Expr, Load, index, load, loads, reads, substitute
from lapilli.ir.integer import Atom, Indirect, Int, Remainder, Var, as_int, ceildiv, of, product
from lapilli.ir.node import Attention, Map, Node
from lapilli.schedule.roots import chase


@dataclass(frozen=True)
class Pages:
    """Where keys and values lie. rows: of a page. number: of page `page` of outer batch `outer`."""

    rows: int
    number: Int
    outer: Var
    page: Var

    @property
    def read(self) -> list[Node]:
        """What numbers are read from."""
        return [ld.node for ld in loads(index(self.number))]


@dataclass(frozen=True)
class Paged:
    """A value [*, heads, rows, columns] in pages: element (head, within, column) of page `number` of `root` is at `place`."""

    root: Node
    place: tuple[Int, ...]
    number: Indirect
    head: Var
    within: Var
    column: Var


def in_pages(note: Attention, views: Mapping[int, Map] | None = None) -> tuple[Paged, Paged, Pages] | None:
    """Keys and values of attention, if both lie in pages with the same numbers. views: values without memory; None: all that only
    read others.
    """
    batch = [a.extent for a in note.batch]
    outer = Var("outer", product(batch[:-1]))
    k, v = (_paged(x, outer, batch, views) for x in (note.k, note.v))
    if k is None or v is None or k[1].rows != v[1].rows:
        return None
    numbers = (_read(number, views) for number in (substitute(k[1].number, {k[1].page: of(v[1].page)}), v[1].number))
    return (k[0], v[0], v[1]) if len({*numbers}) == 1 else None


def _read(number: Int, views: Mapping[int, Map] | None) -> Int:
    """A number whose loads are of values that are no views."""

    def through(ld: Load) -> Expr | None:
        root, at = chase(ld.node, ld.index, views)
        return None if root is ld.node else load(root, tuple(_read(i, views) for i in at))

    return substitute(number, {}, through)


def _paged(x: Node, outer: Var, batch: Sequence[Int], views: Mapping[int, Map] | None) -> tuple[Paged, Pages] | None:
    if len(batch) < 2 or x.rank != len(batch) + 2:
        return None
    head, n, column = (Var(name, size) for name, size in zip(("h", "n", "d"), x.shape[-3:], strict=True))
    axes = [Var(f"o{d}", size) for d, size in enumerate(batch[:-1])]
    places = unravel(of(outer), axes)
    at = [as_int(0) if size == 1 else places[a] for size, a in zip(x.shape[:-3], axes, strict=True)]
    root, place = chase(x, (*at, *map(index_of, (head, n, column))), views)
    sizes = {rows for i in place for rows in _remainders(i, n)}
    rows = max(sizes, default=n.extent.value)
    if len(sizes) > 1 or not rows:
        return None
    page, within = Var("page", ceildiv(n.extent, rows)), Var("within", as_int(rows))
    mapping: dict[Atom, Int] = {n: of(page) * rows + of(within) if sizes else of(within)}
    place = tuple(substitute(i, mapping) for i in place)
    numbers = [a for i in place for a in i.computed]
    if len(numbers) != 1 or any(reads(of(numbers[0]), a) for a in (head, within, column)):
        return None
    return Paged(root, place, numbers[0], head, within, column), Pages(rows, of(numbers[0]), outer, page)


def _remainders(i: Int, n: Var) -> set[int]:
    """The numbers of rows that a page may have: n is seen modulo these."""
    found = {a.y.value for m, _ in i.terms for a in m if isinstance(a, Remainder) and a.x == of(n)}
    return {rows for rows in found if rows is not None}
