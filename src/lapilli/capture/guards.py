"""Conditions on sizes that torch.export cannot prove: they are tested for all sizes within their bounds."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import sympy
import torch
from torch.export import ExportedProgram

_MOST = 1 << 20
"""The largest number of combinations of sizes that is tested."""
_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "Max": np.maximum, "Min": np.minimum,
}  # fmt: skip


def unproven(program: ExportedProgram) -> list[str]:
    """Conditions of a program, exported with its guards as assertions, that do not hold for all sizes within their bounds, or
    cannot be decided."""
    found = []
    for node in program.graph_module.graph.nodes:
        if node.target is not torch.ops.aten._assert_scalar.default:
            continue
        condition: Any = node.args[0]
        value = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else condition
        if value is True:
            continue
        if not isinstance(value, torch.SymBool) or not _always(value.node.expr, program.range_constraints):
            found.append(str(value))
    return found


def _always(condition: sympy.Basic, ranges: Any) -> bool:
    """Whether a condition holds for all sizes within their bounds."""
    symbols = sorted(condition.free_symbols, key=str)
    axes, count = [], 1
    for symbol in symbols:
        bounds = ranges.get(symbol)
        if bounds is None or not bounds.lower.is_Integer or not bounds.upper.is_Integer:
            return False
        count *= int(bounds.upper) - int(bounds.lower) + 1
        if count > _MOST:
            return False
        axes.append(np.arange(int(bounds.lower), int(bounds.upper) + 1, dtype=np.int64))
    try:
        test = sympy.lambdify(symbols, condition, modules=[_FUNCTIONS, "numpy"])
        return bool(np.all(test(*np.meshgrid(*axes, indexing="ij"))))
    except (NameError, TypeError, ValueError, ZeroDivisionError):
        return False  # a function of sizes that is not in _FUNCTIONS
