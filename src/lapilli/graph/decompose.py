"""Decompose composite operators into those that have a lowering, and keep whatever has one."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.export import ExportedProgram, default_decompositions

from lapilli.lower.registry import decompositions, is_supported


@lru_cache(maxsize=1)
def tables() -> tuple[dict[Any, Any], ...]:
    """torch's decompositions into core ATen, its others for what core ATen does not have, and ours before both. Some of the
    others trip torch's functionalization: the second table is without them."""
    table: dict[Any, Any] = dict(default_decompositions())
    least = dict(table)
    for overload, function in decomposition_table.items():
        if isinstance(overload, torch._ops.OpOverload) and torch.Tag.core not in overload.tags:
            table.setdefault(overload, function)
    return tuple({o: f for o, f in t.items() if not is_supported(o)} | decompositions for t in (table, least))


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The same program in operators that have a lowering, as far as there are decompositions into them."""
    known = tables()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its tree specs
        for table in known:
            try:
                decomposed: ExportedProgram = program.run_decompositions(dict(table))
            except (AssertionError, RuntimeError):
                if table is known[-1]:
                    raise
            else:
                return decomposed
    raise AssertionError("the last table returns or raises")
