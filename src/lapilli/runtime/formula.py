"""Formulas of sizes as Python functions. Their text may come from a file, so only arithmetic gets through."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from lapilli.errors import InvalidFileError

_FUNCTIONS: dict[str, Any] = {"min": min, "max": max, "abs": abs, "int": int, "float": float, "round": round}
_NODES = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Load, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop,
)  # fmt: skip
_REFUSED = (ast.MatMult, ast.LShift, ast.Is, ast.IsNot)
_MOST_POWER = 64
_LONGEST = 1 << 20


def formula(names: Iterable[str], text: str) -> Callable[..., Any]:
    """The function of these arguments that a text computes: numbers, names, texts and tuples of them; operators; min, max, abs,
    int, float, round. Raises InvalidFileError for anything else."""
    arguments = list(names)
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"it has {len(text)} characters")
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree.body):
            _check(node, arguments)
        signature = ast.parse(f"lambda {', '.join(arguments)}: 0", mode="eval").body
        if not isinstance(signature, ast.Lambda) or not all(name.isidentifier() for name in arguments):
            raise ValueError("an argument has no name")
        signature.body = tree.body
        code = compile(ast.fix_missing_locations(ast.Expression(signature)), "<formula>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidFileError(f"{text[:80]!r} is no formula of sizes: {error}.") from error
    made: Callable[..., Any] = eval(code, {"__builtins__": {}, **_FUNCTIONS})
    return made


def _check(node: ast.AST, arguments: list[str]) -> None:
    if isinstance(node, ast.Name):
        good = node.id in arguments or node.id in _FUNCTIONS
    elif isinstance(node, ast.Constant):
        good = node.value is None or type(node.value) in (bool, int, float, str)
    elif isinstance(node, ast.Call):
        good = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        power = node.right
        good = isinstance(power, ast.Constant) and isinstance(power.value, int) and 0 <= power.value <= _MOST_POWER
    else:
        good = isinstance(node, _NODES) and not isinstance(node, _REFUSED)
    if not good:
        raise ValueError(f"{type(node).__name__} is not arithmetic")
