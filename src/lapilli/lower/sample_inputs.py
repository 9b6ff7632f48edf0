"""Small calls of ATen operators, made from their schemas, with which the catalog tries them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_x, _i, _b = "x", "i", "b"  # a tensor of the tested dtype, of indices, of bools
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


Call = Callable[[torch.dtype], list[Any]]
"""Arguments of a call, tensors on the meta device, for a dtype."""


@cache
def small_call(overload: torch._ops.OpOverload) -> Call | None:
    """A small call that torch accepts for floats or at least for integers or bools; None if none is found."""
    required = [a for a in overload._schema.arguments if not a.has_default_value()]
    kinds = [_kind(str(a.type)) for a in required]
    if "unknown" in kinds or any(a.kwarg_only for a in required):
        return None
    patterns = list(_patterns(kinds.count("tensor")))
    numbers = _INTEGERS if "int" in kinds else _INTEGERS[:1]
    lists = _LISTS if "sizes" in kinds else _LISTS[:1]
    for dtype in (torch.float32, torch.int64, torch.bool):
        for pattern, number, sizes in itertools.product(patterns, numbers, lists):
            call = partial(_arguments, kinds, pattern, number, sizes)
            if accepts(overload, call(dtype)) and accepts(overload, _with_zeros(call(dtype))):
                return call
    return None


def _with_zeros(args: list[Any]) -> list[Any]:
    """The arguments as zeros on the CPU: some operators check them only when they compute."""
    return tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device="cpu"), args)  # type: ignore[no-any-return]


def accepts(overload: torch._ops.OpOverload, args: list[Any]) -> bool:
    """Whether torch accepts the arguments and returns tensors."""
    with suppress(Exception), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return any(isinstance(t, torch.Tensor) for t in tree_leaves(overload(*args)))
    return False


def _patterns(tensors: int) -> Iterator[Pattern]:
    for shape in _SHAPES:
        yield ((_x, shape),) * tensors
    yield from (p for p in _PATTERNS if len(p) == tensors)


_TYPES = {
    "Tensor": "tensor", "List[Tensor]": "tensors", "int": "int", "SymInt": "int", "List[int]": "sizes", "List[SymInt]": "sizes",
    "number": "number", "float": "number", "bool": "bool", "str": "text",
}  # fmt: skip


def _kind(type_: str) -> str:
    return "none" if type_.startswith("Optional[") else _TYPES.get(type_, "unknown")


def _arguments(
    kinds: Sequence[str], pattern: Pattern, number: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> list[Any]:
    given = iter(pattern)
    first = pattern[0][1] if pattern else (2, 3)

    def argument(kind: str) -> Any:
        if kind == "tensor":
            what, shape = next(given)
            return torch.empty(shape, dtype={"i": torch.int64, "b": torch.bool}.get(what, dtype), device="meta")
        if kind == "tensors":
            return [torch.empty(first, dtype=dtype, device="meta") for _ in range(2)]
        return {"int": number, "sizes": list(sizes), "number": 1, "bool": False, "text": "none", "none": None}[kind]

    return [argument(kind) for kind in kinds]
