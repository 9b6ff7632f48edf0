"""Tensor values: functions from indices to scalar expressions.

A `Map` is a function of its axes; views, broadcasts, pads and concatenations are Maps whose body is a load at other
indices. A `Reduce` folds such a function over further axes. Matrix products and convolutions are Reduces annotated with
their kind, for which there are kernel templates. A Map that replaces some elements of another value is annotated, too
(`Update`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, const, index, loads
from lapilli.ir.integer import Int, Var, ceildiv, product
from lapilli.ir.narrow import as_numbers

if TYPE_CHECKING:
    from lapilli.ir.draw import Sampling
    from lapilli.ir.recurrence import Recurrence

_ids = itertools.count()
_ZERO = const(0.0)


def next_id() -> int:
    """A number less than the ids of all nodes created later."""
    return next(_ids)


@dataclass(eq=False)
class Node:
    """A tensor value: shape and storage type. `origin` names the operators from which it was lowered.

    least: of codes, the smallest.
    """

    shape: tuple[Int, ...]
    dtype: DType
    name: str = ""
    origin: str = ""
    id: int = field(default_factory=lambda: next(_ids))
    least: int = 0

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype.name}{list(self.shape)}"

    @property
    def rank(self) -> int:
        return len(self.shape)


MOST_ELEMENTS = 2**31 - 1
"""The largest value: kernels count in 32 bits."""


def nbytes(n: Node) -> Int:
    """The size of a value in bytes, in whole words."""
    return _nbytes(n.shape, n.dtype)


@lru_cache(maxsize=1 << 12)
def _nbytes(shape: tuple[Int, ...], dtype: DType) -> Int:
    return ceildiv(product(shape) * dtype.size, 4) * 4


@dataclass(eq=False, repr=False)
class Input(Node):
    """An input of the program (dense, row-major). decoded: a part of a quantized weight. What is computed of such parts alone has
    no memory: its readers decode it.
    """

    index: int = 0
    decoded: bool = False


@dataclass(eq=False, repr=False)
class Constant(Node):
    """A weight or another constant (dense, row-major). value: of bfloat16, its bits."""

    value: npt.NDArray[np.generic] = field(default_factory=lambda: np.zeros(()))

    @property
    def numbers(self) -> npt.NDArray[np.generic]:
        """The values as numbers: those of bfloat16 as float32."""
        return as_numbers(self.value, self.dtype)


@dataclass(eq=False, repr=False)
class State(Node):
    """A tensor that the program keeps from run to run (dense, row-major), identified by its name. value: its initial value; of
    bfloat16, its bits. given: it is no part of the program, but every run is given its memory, like that of an output.

    As a value in the graph it is the state at the beginning of the run.
    """

    value: npt.NDArray[np.generic] = field(default_factory=lambda: np.zeros(()))
    given: bool = False

    @property
    def numbers(self) -> npt.NDArray[np.generic]:
        """The initial values as numbers: those of bfloat16 as float32."""
        return as_numbers(self.value, self.dtype)


@dataclass(frozen=True)
class Update:
    """out = old, except out[place] = value for all `axes`. The index `place` in `old` and `value` are expressions over the
    axes.

    within: (i, n) for computed indices; elements are stored only if 0 <= i < n. If several values have the same index, the
    last one wins; as in torch, a device may keep any of them. apart: value loads a Map that reads `old` at other places than this
    replaces: it is computed before.
    """

    old: Node
    axes: tuple[Var, ...]
    place: tuple[Int, ...]
    value: Expr
    within: tuple[tuple[Int, Int], ...] = ()
    apart: bool = False

    def loads(self) -> list[Load]:
        """The loads of which new elements and their indices are computed."""
        return [ld for e in (self.value, *map(index, self.place)) for ld in loads(e)]


@dataclass(eq=False, repr=False)
class Map(Node):
    """out[axes] = body(axes).

    update: the same value described as an update of an older one, if it is one. A kernel that may write into the older
    value's memory then computes only the new elements.
    """

    axes: tuple[Var, ...] = ()
    body: Expr = _ZERO
    update: Update | None = None

    @property
    def view_of(self) -> Load | None:
        """The load, if this Map only reads another value at other indices, without converting it."""
        return self.body if isinstance(self.body, Load) and self.body.node.dtype.compute is self.dtype.compute else None


@dataclass(frozen=True)
class Matmul:
    """out[b, m, n] = sum over k of a[b, m, k] * w[b, k, n].

    The loads of the Reduce's body identify the operands: `a` reads `lhs` and `w` reads `rhs`. rows and column say which
    output axes are m and n; the axes before them are the batch.
    """

    lhs: Node
    rhs: Node
    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    column: Var
    inner: Var
    lhs_index: tuple[Int, ...]
    rhs_index: tuple[Int, ...]


@dataclass(frozen=True)
class Attention(Matmul):
    """The product of `weights` and the values of attention.

    weights: the softmax of `scores` along the last axis (zeros in rows whose scores are all -inf). scores: the product of q
    and k, followed by pointwise operations. q, k, v: before their batch dimensions are broadcast; k and v may have fewer
    heads, each shared by adjacent heads of q. causal: scores above the diagonal are -inf.
    """

    scores: Node
    weights: Node
    q: Node
    k: Node
    v: Node
    causal: bool


@dataclass(frozen=True)
class AttentionGradient(Matmul):
    """The product that is the gradient of q, k or v (`of`), before heads that share keys are added up.

    weights, scores, q, k, v, causal: as for `Attention`. grad: the gradient of the result. delta: the sum of that times the result,
    for each query. The gradients of scores are weights * (grad v^T - delta) * scale.
    """

    of: Literal["q", "k", "v"]
    scores: Node
    weights: Node
    q: Node
    k: Node
    v: Node
    grad: Node
    delta: Node
    scale: float
    causal: bool


@dataclass(frozen=True)
class Convolution:
    """N-dimensional convolution of x [N, C, *spatial] with w [O, C/groups, *kernel] (not transposed)."""

    x: Node
    weight: Node
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class DepthwiseGradient:
    """out[c, k] = the sum over n and t of narrow[n, c, t] * wide[n, c, t * stride - padding + k * dilation], for a depthwise
    convolution's weight. Where wide has no such element there is no term.
    """

    wide: Node
    narrow: Node
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(eq=False, repr=False)
class Reduce(Node):
    """out[axes] = op over raxes of body(axes, raxes). op: sum, prod, min, max, any, all, argmin, argmax, argpool.

    argmin and argmax are the index of the first NaN, otherwise of the first extremum. argpool follows torch's pooling: the
    index of the last NaN, otherwise of the first maximum, and -1 if no element is larger than the smallest number. A Reduce
    annotated as Recurrence or Sampling is not a fold: the annotation describes it, and its body only lists what is read.
    """

    axes: tuple[Var, ...] = ()
    raxes: tuple[Var, ...] = ()
    op: str = "sum"
    body: Expr = _ZERO
    contraction: Matmul | Convolution | DepthwiseGradient | Recurrence | Sampling | None = None


def neutral(op: str, dtype: DType) -> Expr:
    """The identity element of a reduction."""
    if op in ("max", "min"):
        integer = -(2**31) if op == "max" else 2**31 - 1
        return const(float("-inf" if op == "max" else "inf") if dtype is DType.float32 else integer, dtype)
    return const({"sum": 0, "prod": 1, "any": False, "all": True}[op], dtype)


@dataclass(frozen=True)
class Reading:
    """Where the value of a size symbol is found: axis `axis` of an input has size factor * symbol + offset."""

    input: Input
    axis: int
    factor: int
    offset: int


def reading(symbol: Int, inputs: Sequence[Input]) -> Reading | None:
    """The first axis of an input whose size is a symbol, otherwise the first whose size is a multiple of it plus a
    number.
    """
    found: Reading | None = None
    for node in inputs:
        for axis, size in enumerate(node.shape):
            if len(size.terms) != 1 or size.terms[0][0] != symbol.terms[0][0]:
                continue
            factor, offset = size.terms[0][1], size.const
            if size == symbol:
                return Reading(node, axis, 1, 0)
            if found is None and factor > 0:
                found = Reading(node, axis, factor, offset)
    return found


@dataclass
class Graph:
    """The result of `lower`: inputs and outputs of the program, and the new values of its states.

    updates: new values of states that are computed in the states' memory (`schedule.state.in_place`), by id, and how.
    checks: what every run checks; if any, the last output is the number of the first that fails, from 1, or 0. limit: the
    limit that magnitudes of int64 inputs must respect (0: any 32-bit integers).
    """

    inputs: list[Input]
    outputs: list[Node]
    symbols: dict[str, Int]
    stores: list[tuple[State, Node]] = field(default_factory=list)
    limits: dict[Int, int] = field(default_factory=dict)  # bounds that algorithms need for symbols without one
    least: dict[str, int] = field(default_factory=dict)  # lower bounds of symbols, by name, that operators need
    checks: list[str] = field(default_factory=list)
    limit: int = 0
    updates: dict[int, Update] = field(default_factory=dict)

    @property
    def given(self) -> list[str]:
        """The symbols that no input shows; every run is given their values."""
        return [name for name, size in self.symbols.items() if reading(size, self.inputs) is None]

    @property
    def written(self) -> list[Node]:
        """What every run is given memory for: outputs, and before the number of the failed check the given states."""
        states = [state for state, _ in self.stores if state.given]
        own = len(self.outputs) - bool(self.checks)
        return [*self.outputs[:own], *states, *self.outputs[own:]]

    @property
    def results(self) -> list[Node]:
        """Outputs and new values of states: the values with memory that outlives a run."""
        return [*self.outputs, *(new for _, new in self.stores)]

    def nodes(self) -> list[Node]:
        """All values that the results need, producers first."""
        order: list[Node] = []
        seen: set[int] = set()
        stack: list[tuple[Node, Iterator[Node]]] = []
        for out in self.results:
            if out.id in seen:
                continue
            seen.add(out.id)
            stack.append((out, iter(operands(out, self.updates.get(out.id)))))
            while stack:
                node, rest = stack[-1]
                for child in rest:
                    if child.id not in seen:
                        seen.add(child.id)
                        stack.append((child, iter(operands(child, self.updates.get(child.id)))))
                        break
                else:
                    stack.pop()
                    order.append(node)
        return order


def in_state(x: Node) -> bool:
    """Whether this is a state, with or without new entries of this run."""
    while isinstance(x, Map) and x.update is not None:
        x = x.update.old
    return isinstance(x, State)


def operands(node: Node, update: Update | None = None) -> list[Node]:
    """The values that a value reads, each once. update: how it is computed, if not by its body."""
    if not isinstance(node, Map | Reduce):
        return []
    found: dict[int, Node] = {} if update is None else {update.old.id: update.old}
    for item in loads(node.body) if update is None else update.loads():
        found.setdefault(item.node.id, item.node)
    return list(found.values())
