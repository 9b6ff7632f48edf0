"""Sizes computed from others: as trees, as text, and as Python functions.

A TREE is JSON: a number, the name of a size, or [operation, TREE, TREE] with an operation in `OPERATIONS`. Trees and texts
may come from a file; only arithmetic is accepted.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lapilli.errors import InvalidFileError

Tree = int | str | list[Any]
Operations = Mapping[str, Callable[[Any, Any], Any]]

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "min": min, "max": max,
}  # fmt: skip


def evaluate(tree: Tree, value: Callable[[str], Any], compute: Callable[[str, Any, Any], Any]) -> Any:
    """The value of a tree. value: returns that of a size, given its name. compute: applies an operation to two values."""
    if isinstance(tree, str):
        return value(tree)
    if not isinstance(tree, list):
        return tree
    return compute(tree[0], evaluate(tree[1], value, compute), evaluate(tree[2], value, compute))


def text(tree: Tree) -> str:
    """A tree as a Python expression."""
    if not isinstance(tree, list):
        return str(tree)
    operation, a, b = tree[0], text(tree[1]), text(tree[2])
    return f"{operation}({a}, {b})" if operation in ("min", "max") else f"({a} {operation} {b})"


def joined(operation: str, trees: Iterable[Tree]) -> Tree:
    """One tree of several, combined from left to right."""
    result, *rest = trees
    for tree in rest:
        result = [operation, result, tree]
    return result


def names(tree: Tree) -> set[str]:
    """The sizes from which a tree is computed."""
    if isinstance(tree, str):
        return {tree}
    return names(tree[1]) | names(tree[2]) if isinstance(tree, list) else set()


_FUNCTIONS: dict[str, Any] = {"min": min, "max": max, "abs": abs, "int": int, "float": float, "round": round}
_NODES = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List, ast.Load, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop,
)  # fmt: skip
_REFUSED = (ast.MatMult, ast.LShift, ast.Is, ast.IsNot)
_MOST_POWER = 64
_LONGEST = 1 << 20


def formula(names: Iterable[str], text: str) -> Callable[..., Any]:
    """A function of the named arguments that computes an expression: numbers, names, strings and tuples of them; operators;
    min, max, abs, int, float, round. Raises InvalidFileError for anything else.
    """
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
        code = ast.fix_missing_locations(ast.Expression(signature))
        return _function(code, _FUNCTIONS)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidFileError(f"{text[:80]!r} is no formula of sizes: {error}.") from error


def function(names: Iterable[str], text: str, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of the named arguments that computes an expression of our own. scope: other names in it."""
    return _function(ast.parse(f"lambda {', '.join(names)}: {text}", mode="eval"), scope)


def _function(code: ast.Expression, scope: Mapping[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = eval(compile(code, "<sizes>", "eval"), {"__builtins__": {}, **scope})
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
