"""Small calls of ATen operators, made from their schemas: what the catalog asks with."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_x, _i, _b = "x", "i", "b"  # a tensor of the dtype in question, of indices, of bools
Pattern = tuple[tuple[str, tuple[int, ...]], ...]

_SHAPES: tuple[tuple[int, ...], ...] = ((2, 3), (3, 3), (2, 3, 4), (2, 3, 4, 5), (3,), (2, 3, 4, 5, 6))
_PATTERNS: tuple[Pattern, ...] = (
    ((_x, (2, 3)), (_x, (3, 4))),
    ((_x, (2, 3)), (_x, (3,))),
    ((_x, (2, 3, 4)), (_x, (2, 4, 5))),
    ((_x, (2, 3)), (_i, (2, 3))),
    ((_x, (4, 3)), (_i, (2,))),
    ((_x, (2, 3)), (_b, (2, 3))),
    ((_x, (2, 3, 8, 8)), (_x, (4, 3, 3, 3))),
    ((_x, (2, 3, 8)), (_x, (4, 3, 3))),
    ((_x, (2, 3, 6, 6, 6)), (_x, (4, 3, 3, 3, 3))),
    ((_x, (2, 4)), (_x, (2, 3)), (_x, (3, 4))),
    ((_x, (2, 3, 5)), (_x, (2, 3, 4)), (_x, (2, 4, 5))),
    ((_b, (2, 3)), (_x, (2, 3)), (_x, (2, 3))),
    ((_b, (2, 3)), (_x, (2, 3))),
    ((_b, (2, 3)),),
    ((_x, (2, 3)), (_i, (2,)), (_x, (2, 3))),
    ((_x, (2, 3)), (_i, (2, 3)), (_x, (2, 3))),
    ((_x, (2, 3)), (_b, (2, 3)), (_x, (2, 3))),
    ((_x, (2, 3)), (_b, (2, 3)), (_x, ())),
    ((_x, (2, 3, 4, 4)), (_x, (3,)), (_x, (3,)), (_x, (3,)), (_x, (3,))),
    ((_x, (2, 3, 4, 4)), (_x, (3,)), (_x, (3,))),
    ((_x, (4, 3)), (_x, (3,)), (_x, (4,))),
    ((_i, (2, 3)),),
    ((_x, (2, 3, 4, 5)), (_x, (2, 4, 4, 2))),
)
_INTEGERS = (1, 0, 2)
_LISTS = (
    (1,),
    (1, 1),
    (0, 1),
    (2, 2),
    (1, 1, 1),
    (0, 1, 2),
    (2, 2, 2),
    (1, 1, 1, 1),
    (0, 2, 1),
    (6,),
    (),
    (1, 1, 1, 1, 1, 1),
)


def small_call(overload: torch._ops.OpOverload, dtype: torch.dtype) -> list[Any] | None:
    """Arguments of a small call that torch accepts, tensors on the meta device."""
    required = [a for a in overload._schema.arguments if not a.has_default_value()]
    if any(a.kwarg_only for a in required):
        return None
    kinds = [_kind(str(a.type)) for a in required]
    if None in kinds:
        return None
    tensors = sum(kind == "tensor" for kind in kinds)
    for pattern in _patterns(tensors):
        for number, sizes in itertools.product(
            _INTEGERS if "int" in kinds else _INTEGERS[:1], _LISTS if "sizes" in kinds else _LISTS[:1]
        ):
            args = list(_arguments(kinds, pattern, dtype, number, sizes))
            with suppress(Exception), warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                if any(isinstance(t, torch.Tensor) for t in tree_leaves(overload(*args))):
                    return args
    return None


def _patterns(tensors: int) -> Iterator[Pattern]:
    for shape in _SHAPES:
        yield ((_x, shape),) * tensors
    yield from (p for p in _PATTERNS if len(p) == tensors)


_TYPES = {
    "Tensor": "tensor", "List[Tensor]": "tensors", "int": "int", "SymInt": "int", "List[int]": "sizes", "List[SymInt]": "sizes",
    "number": "number", "float": "number", "bool": "bool", "str": "text",
}  # fmt: skip


def _kind(type_: str) -> str | None:
    return "none" if type_.startswith("Optional[") else _TYPES.get(type_)


def _arguments(
    kinds: Sequence[str | None], pattern: Pattern, dtype: torch.dtype, number: int, sizes: tuple[int, ...]
) -> Iterator[Any]:
    given = iter(pattern)
    first = pattern[0][1] if pattern else (2, 3)
    for kind in kinds:
        if kind == "tensor":
            what, shape = next(given)
            yield torch.empty(shape, dtype={"i": torch.int64, "b": torch.bool}.get(what, dtype), device="meta")
        elif kind == "tensors":
            yield [torch.empty(first, dtype=dtype, device="meta") for _ in range(2)]
        else:
            yield {"int": number, "sizes": list(sizes), "number": 1, "bool": False, "text": "none", "none": None}[
                kind or ""
            ]
