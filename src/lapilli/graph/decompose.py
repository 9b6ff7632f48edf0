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
def _table() -> dict[Any, Any]:
    """torch's decompositions into core ATen, then its others for what core ATen does not have, and ours before both."""
    table: dict[Any, Any] = dict(default_decompositions())
    for overload, function in decomposition_table.items():
        if isinstance(overload, torch._ops.OpOverload) and torch.Tag.core not in overload.tags:
            table.setdefault(overload, function)
    return {o: f for o, f in table.items() if not is_supported(o)} | decompositions


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The same program in operators that have a lowering, as far as there are decompositions into them."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its tree specs
        decomposed: ExportedProgram = program.run_decompositions(dict(_table()))
    return decomposed
