"""Properties of an operator's calls that follow from its schema: the arguments that are written, the numbers that may vary,
and the functional operator that computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lapilli.graph.aliasing import functional_variant
from lapilli.lower import lowerings

aten = torch.ops.aten
Overload = torch._ops.OpOverload

CONSTANT_NUMBERS = {
    aten.pow.Tensor_Scalar,
    aten.logspace.default,
    aten.arange.start_step,
    aten.arange.start,
    aten.arange.default,
}
"""Operators whose numbers determine the kernel, or the size of its result."""


@dataclass(frozen=True)
class Schema:
    """The schema of an operator, as far as calls need it.

    op: the operator. functional: the one that computes its results without writing to arguments (None: not known by name).
    names: of its arguments. numeric: arguments that accept a number (as a tensor or a Scalar), by position. tensors: those
    that must be tensors, although a number wrapped by C++ arrives as a number. scalars: numbers that torch converts to the
    type of its kernel (others become tensors, and promote types), by position. written: those that it writes, by position.
    outs: those of them that only receive results (out=). returned: for every result, the position of the argument that is
    returned, or None. stored: which results of the functional operator are written to which arguments, by index and
    position. direct: whether the functional operator has a lowering of its own. listed: whether the result is a list of
    tensors.
    """

    op: Overload
    functional: Overload | None
    names: tuple[str, ...]
    positional: int
    numeric: frozenset[int]
    tensors: frozenset[int]
    scalars: frozenset[int]
    written: tuple[int, ...]
    outs: tuple[int, ...]
    returned: tuple[int | None, ...]
    stored: tuple[tuple[int, int], ...]
    direct: bool
    listed: bool

    @property
    def computed(self) -> Overload:
        """The operator that a program is compiled for: the functional one, if it is known."""
        return self.functional or self.op

    @property
    def runtime_numbers(self) -> bool:
        """Whether numbers can be passed to a kernel at run time."""
        return self.direct and self.functional not in CONSTANT_NUMBERS


def wrapped(number: float, tensors: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype of a number as a tensor without dimensions, given dtypes and ranks of the call's tensors. It is that of the
    first tensor, so that the result has that type, unless the number is of another kind.
    """
    dtype, rank = next(iter(tensors), (torch.bool, 1))
    kept = torch.result_type(torch.empty((), dtype=dtype, device="meta"), number)
    wide = torch.int64 if type(number) is int and not kept.is_floating_point else kept
    return wide if rank or dtype.is_floating_point else kept


@cache
def schema_of(op: Overload) -> Schema:
    declared = op._schema
    arguments = list(declared.arguments)
    names = tuple(a.name for a in arguments)
    numeric = frozenset(k for k, a in enumerate(arguments) if str(a.type) in ("Tensor", "number", "Optional[number]"))
    takes_numbers = torch._C._should_allow_numbers_as_tensors(declared.name.removeprefix("aten::"))
    tensors = frozenset() if takes_numbers else frozenset(k for k, a in enumerate(arguments) if str(a.type) == "Tensor")
    scalars = frozenset(k for k, a in enumerate(arguments) if _is_scalar(a))
    written = tuple(k for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    outs = tuple(k for k in written if arguments[k].kwarg_only)
    functional = functional_variant(op)
    returned = tuple(_returned(r, arguments) for r in declared.returns)
    stored = [(k, place) for k, place in enumerate(returned) if place is not None]
    if written and not stored:  # written arguments that are not results follow them
        stored = [(len(returned) + k, place) for k, place in enumerate(written)]
    return Schema(
        op,
        functional,
        names,
        sum(not a.kwarg_only for a in arguments),
        numeric,
        tensors,
        scalars,
        written,
        outs,
        returned,
        tuple(stored),
        functional in lowerings,
        len(declared.returns) == 1 and str(declared.returns[0].type).startswith("List"),
    )


def _is_scalar(a: Any) -> bool:
    return str(a.type) in ("number", "Optional[number]") and a.name not in ("self", "other")


def _returned(result: Any, arguments: list[Any]) -> int | None:
    """The position of the argument that is returned as a result."""
    if result.alias_info is None:
        return None
    names = result.alias_info.before_set
    return next(
        (k for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.before_set == names), None
    )
