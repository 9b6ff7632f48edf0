"""The base of kernel templates: the wrapper around a hand-written kernel, with generated sources and epilogue."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lapilli.codegen.emit import ALIGNMENT, WHOLE, stored_as
from lapilli.codegen.kernel import KernelSource
from lapilli.ir.axes import fresh_axes, index_of
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, cast_to, const, load, rewrite, select, substitute
from lapilli.ir.integer import Int, IntLike, as_int
from lapilli.ir.node import Constant, Map, Node, Reduce
from lapilli.ir.ranges import least_code
from lapilli.schedule.copies import Packed
from lapilli.schedule.layout import Layout
from lapilli.schedule.task import Task, Template
from lapilli.target import Target
from lapilli.target.records import Question

PackedBody = Callable[..., tuple[list[Int], Expr]]
"""For the indices of a packed operand: guards, and the element where they hold."""


@dataclass
class Counters:
    """Numbers that kernels count in, 0 at the beginning of each run: one value, of which each kernel has a part."""

    node: Node = field(default_factory=lambda: Node((), DType.int32, "counters"))
    count: int = 0

    def take(self, count: int) -> int:
        """Where a kernel's part begins, in bytes: it binds only that, so that kernels that do the same have the same text."""
        first = 4 * self.count
        self.count += -(-4 * count // ALIGNMENT) * ALIGNMENT // 4
        self.node.shape = (as_int(self.count),)
        return first

    def task(self) -> Task:
        axes, at = fresh_axes(self.node.shape)
        return Task(self.node, axes, at, const(0), origins=["zero"], reason="counters of kernels", every_run=True)


class Kept:
    """Constants that some kernel reads as they lie in the file, so that they stay on the device. Other kernels should read them in
    that layout where they can: a packed copy would double the memory. shared: addresses of constants that several methods read.
    """

    def __init__(self, others: Kept | None = None, shared: Collection[int] = ()) -> None:
        self._memory: dict[int, int] = {} if others is None else dict(others._memory)  # first address -> bytes
        self._shared: Collection[int] = shared if others is None else others._shared

    def add(self, nodes: Iterable[Node]) -> None:
        """Adds those of these values that are constants."""
        for n in nodes:
            if isinstance(n, Constant):
                place = address(n)
                self._memory[place] = max(n.value.nbytes, self._memory.get(place, 0))

    def __contains__(self, node: Node) -> bool:
        """Whether a value is such a constant, or a part of one."""
        if not isinstance(node, Constant):
            return False
        first, end = address(node), address(node) + node.value.nbytes
        if self._memory.get(first, 0) >= node.value.nbytes:
            return True
        return any(start <= first and end <= start + size for start, size in self._memory.items())

    def is_shared(self, node: Node) -> bool:
        """Whether several methods read a constant, which then has a layout that all kernels take."""
        return isinstance(node, Constant) and address(node) in self._shared


def address(n: Constant) -> int:
    """Where the numbers of a constant lie in memory: the same for all methods that read it."""
    place: int = n.value.__array_interface__["data"][0]
    return place


@dataclass(frozen=True)
class Asked:
    """A choice that was made while a schedule was made. computed: the task's result and its reduction, by id. names: of all
    candidates, the one first that the cost model prefers.
    """

    question: Question
    computed: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Context:
    """The part of the schedule that templates use."""

    target: Target
    layouts: dict[int, Layout]
    views: Mapping[int, Map]
    tasks: Mapping[int, Task] = field(default_factory=dict)
    """By their results, as they are before kernels take over work of theirs."""
    copies: dict[tuple[Any, ...], Packed] = field(default_factory=dict)
    """Copies that several templates read, by what they are."""
    in_common: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """What several templates have in common, by values that they all read or replace."""
    counters: Counters = field(default_factory=Counters)
    kept: Kept = field(default_factory=Kept)
    asked: list[Asked] | None = None
    """Takes the choices down, with all candidates, if somebody wants to know them."""

    def withdraw(self, task: Task) -> None:
        """Forgets the choice among a task's kernels: it has another one now."""
        if self.asked is not None:
            self.asked[:] = [a for a in self.asked if task.out.id not in a.computed]

    def dense(self, node: Node) -> None:
        """Gives a new value a row-major layout."""
        self.layouts[node.id] = Layout.of(node.shape, range(node.rank))

    def read(self, node: Node, index: Sequence[Int]) -> Expr:
        """An element of a value, through views that have no memory."""
        return self.seen(load(node, tuple(index)))

    def seen(self, e: Expr) -> Expr:
        """Rewrites an expression to read only values with memory, and codes instead of what is decoded from them."""
        return rewrite(e, {}, self._through)

    def place(self, i: Int) -> Int:
        """The same of an index, which may be computed."""
        return substitute(i, {}, self._through)

    def _through(self, ld: Load) -> Expr | None:
        node, task = ld.node, self.tasks.get(ld.node.id)
        if task is not None and task.decodes:
            return cast_to(rewrite(task.value, dict(zip(task.axes, ld.index, strict=True))), ld.dtype)
        if node.id not in self.views and (node.id in self.layouts or not isinstance(node, Map)):
            return None
        assert isinstance(node, Map)
        return cast_to(rewrite(node.body, dict(zip(node.axes, ld.index, strict=True)), self._through), ld.dtype)

    def in_fours(self, node: Node) -> bool:
        """Whether four neighbours from a multiple of four on are read at once."""
        return self.is_whole(node) or node.dtype is DType.code

    def is_whole(self, node: Node) -> bool:
        """Whether each element of a value is one number of a buffer. Elements of sub-word types that the device
        lacks, and of int64, are not.
        """
        return stored_as(node.dtype, self.target.half) in WHOLE

    def _may_be_codes(self, dtype: DType) -> bool:
        """Whether kernels take codes instead of what is stored so. Filters for matrix units are halves."""
        return dtype is DType.float32 or (dtype.is_short_float and not self.target.cooperative_matrix)

    def packed(
        self, name: str, like: Node, shape: Sequence[IntLike], body: PackedBody, dtype: DType | None = None
    ) -> Packed:
        """Declares a copy of an operand in a kernel's own layout: body(*axes) gives (guards, value). dtype: default: the
        operand's.
        """
        sizes = tuple(as_int(s) for s in shape)
        axes, at = fresh_axes(sizes)
        guards, value = body(*at)
        padded = select(guards, value, const(0, value.dtype))
        kept = dtype or (like.dtype if self.is_whole(like) else value.dtype)
        least = least_code(padded) if dtype is None and self._may_be_codes(kept) else None
        if least is not None:
            kept = DType.code
        node = Packed(sizes, kept, f"{like.name}_{name}", f"pack {name}", least=least or 0, axes=axes, body=padded)
        self.dense(node)
        return node


class KernelTemplate(Template):
    """A template that generates the source of a kernel."""

    @abstractmethod
    def write(self, task: Task, ctx: Context) -> KernelSource: ...

    def variants(self, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        """The kernel with each tile, split or staging that it may have; the one first that the cost model prefers."""
        yield self

    @property
    def variant(self) -> str:
        """How it differs from its other variants, in a few words that records keep."""
        return ""


def accumulator(shape: Sequence[Int]) -> Reduce:
    """A placeholder for a template's result, if no operator of the graph computes it."""
    axes, _ = fresh_axes(tuple(shape))
    return Reduce(tuple(shape), DType.float32, "acc", "", axes=axes)


def simple_task(out: Node, origins: list[str], reason: str) -> Task:
    """A task that stores a template's result unchanged."""
    reduction = accumulator(out.shape)
    at = tuple(map(index_of, reduction.axes))
    return Task(out, reduction.axes, at, load(reduction, at), reduction, None, origins, reason)
