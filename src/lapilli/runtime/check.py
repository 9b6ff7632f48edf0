"""Checks whether a script is safe and possible to run, before any of it runs. Nothing in the file is trusted.

Every value must be defined before it is read, every index must be that of an existing method or constant, and every
operator must be permitted, listed in the file's `host_operators`, and get arguments of the types in its schema.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lapilli.runtime import host
from lapilli.runtime.arithmetic import INT_MAX, INT_MIN, NUMBERS
from lapilli.runtime.description import Description, TensorSpec
from lapilli.runtime.host import Form, Kind
from lapilli.runtime.host_script import HostCall, HostScript, Json, damaged
from lapilli.runtime.sizes import OPERATIONS

MOST_CALLS = 200_000
"""The most calls in one script, including those in branches and bodies."""

_DEEPEST_ARGUMENT = 8
_DEEPEST_TREE = 200
_NUMBERS = ("int", "float")  # dtypes of inputs that are numbers


def admit(
    methods: Sequence[tuple[HostScript, Sequence[TensorSpec], int]],
    description: Description,
    permission: host.Permission,
    given: bool = False,
) -> dict[str, Any] | None:
    """The operators that the scripts of a file may call, by name, after everything in the scripts is checked. None if they
    call some and torch is not installed (a run then says so).

    methods: script, inputs, and number of outputs of each. given: whether runs are given sizes. Raises InvalidFileError if
    a script is damaged, or names an operator that it may not call.
    """
    named = dict.fromkeys(name for script, _, _ in methods for name in script.operators())
    for name in named:
        if name not in description.host_operators:
            raise damaged(f"it calls {name[:80]!r}, which is not among the file's host operators")
    overloads: dict[str, Any] | None = {}
    if named:
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            overloads = None
        else:
            overloads = {name: host.overload(name, torch, permission) for name in named}
    try:
        for script, inputs, outputs in methods:
            check_script(script, inputs, outputs, description, overloads, permission, given)
    except RecursionError:
        raise damaged("it is nested too deep") from None
    return overloads


def check_script(
    script: HostScript, inputs: Sequence[TensorSpec], outputs: int, description: Description,
    overloads: Mapping[str, Any] | None, permission: host.Permission, given: bool = False,
) -> None:  # fmt: skip
    """Checks one script.

    overloads: the operators that it may call, by name; None if they are unknown, because torch is missing. given: whether
    runs are given sizes. Raises InvalidFileError if the script cannot be run.
    """
    if sum(1 for _ in script.walk()) > MOST_CALLS:
        raise damaged(f"it makes more than {MOST_CALLS} calls")
    if len(script.inputs) != len(inputs) or len(script.outputs) != outputs:
        raise damaged("its inputs and outputs are not those of the method")
    kinds = [
        "number" if s.dtype in _NUMBERS else "any" if s.dtype == "bool" and not s.shape else "tensor" for s in inputs
    ]
    if not given and any(source == ["given"] for source in script.symbols.values()):
        raise damaged("it needs sizes that are not given")
    _Check(description, overloads, permission).script(script, kinds)


@dataclass
class _Scope:
    """The values and sizes that are known at a point in a script."""

    script: HostScript
    kinds: dict[str, Kind] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)  # those already checked, and their nesting depth


class _Check:
    def __init__(
        self, description: Description, overloads: Mapping[str, Any] | None, permission: host.Permission
    ) -> None:
        self.description, self.overloads, self.permission = description, overloads, permission
        self.states = {s.name for s in description.states}

    def script(self, script: HostScript, inputs: Sequence[Kind]) -> list[Kind]:
        """The kinds of its outputs."""
        if len(script.inputs) != len(inputs):
            raise damaged(f"control flow gives {len(inputs)} values to a script that takes {len(script.inputs)}")
        scope = _Scope(script)
        for name, kind in zip(script.inputs, inputs, strict=True):
            self._define(scope, name, kind)
        for name, index in script.constants.items():
            if type(index) is not int or not 0 <= index < len(self.description.constants):
                raise damaged(f"there is no constant {index!r}")
            self._define(scope, name, "tensor")
        for name, source in script.symbols.items():
            self._symbol_form(name, source)
        for value, state in script.states.items():
            self._state(state)
            self._define(scope, value, "tensor")
        for call in script.calls:
            results = self._call(call, scope)
            if len(results) != len(call.outs):
                raise damaged(f"a call of {call.op} gives {len(results)} values, not {len(call.outs)}")
            for name, kind in zip(call.outs, results, strict=True):
                self._define(scope, name, kind)
        for _, _, new in script.states.values():
            if new is not None:
                self._plain(new, scope)
        return [self._plain(o, scope) for o in script.outputs]

    def _define(self, scope: _Scope, name: str, kind: Kind) -> None:
        if name in scope.kinds:
            raise damaged(f"the value {name[:80]!r} is defined twice")
        scope.kinds[name] = kind

    def _symbol_form(self, name: str, source: Json) -> None:
        form = [type(part) for part in source] if isinstance(source, list) else []
        good = (
            source == ["given"]
            or (form == [str, str] and source[0] == "value")
            or (form == [str, int] and source[0] == "fixed" and 0 <= source[1] <= INT_MAX)
            or (
                form[:3] == [str, str, int]
                and len(form) == 5
                and source[0] == "dim"
                and 0 <= source[2] < 64
                and not (form[3] is int and source[3] <= 0)
            )
        )
        if not good:
            raise damaged(f"the size {name[:80]!r} is read from {str(source)[:80]!r}")

    def _state(self, state: Json) -> None:
        if not isinstance(state, list) or len(state) != 3 or type(state[0]) is not str or type(state[1]) is not int:
            raise damaged(f"{str(state)[:80]!r} is no state")
        name, first, _ = state
        known = name in self.states if first == -1 else 0 <= first < len(self.description.constants)
        if not known:
            raise damaged(f"the state {name[:80]!r} has no initial value")

    # -- calls
    def _call(self, call: HostCall, scope: _Scope) -> list[Kind]:
        expected = {"cond": 2, "while": 2, "scan": 1}.get(call.op, 0)
        if len(call.scripts) != expected or (call.kwargs and "." not in call.op):
            raise damaged(
                f"a call of {call.op[:80]} has {len(call.scripts)} scripts and {len(call.kwargs)} named arguments"
            )
        if "." in call.op:
            return [self._operator(call, scope)]
        known = {"gpu": self._gpu, "number": self._number, "item": self._item, "getitem": self._getitem,
                 "cond": self._cond, "while": self._while, "scan": self._scan}  # fmt: skip
        if call.op not in known:
            raise damaged(f"there is no call {call.op[:80]!r}")
        return known[call.op](call, scope)

    def _gpu(self, call: HostCall, scope: _Scope) -> list[Kind]:
        methods = self.description.methods
        if not 0 <= call.method < len(methods):
            raise damaged(f"there is no method {call.method}")
        method = methods[call.method]
        wanted = ["value"] * len(method.inputs) + ["size"] * len(method.given)
        if len(call.args) != len(wanted):
            raise damaged(f"the method {call.method} is called with {len(call.args)} of {len(wanted)} inputs and sizes")
        for node, what in zip(call.args, wanted, strict=True):
            form = self._form(node, scope)
            if form.what != what or isinstance(form.kind, tuple):
                raise damaged(f"the method {call.method} is called with {str(node)[:80]!r}")
        return ["tensor"] * len(method.outputs)

    def _number(self, call: HostCall, scope: _Scope) -> list[Kind]:
        function, *args = call.args or [None]
        least, most = NUMBERS.get(function, (1, 0)) if isinstance(function, str) else (1, 0)
        if not least <= len(args) <= most:
            raise damaged(f"there is no function of numbers {function!r} of {len(args)}")
        for node in args:
            form = self._form(node, scope)
            number = form.what == "size" or (form.what == "value" and form.kind in ("number", "any"))
            if not number and not (form.what == "literal" and not isinstance(form.literal, str)):
                raise damaged(f"{function} is computed of {str(node)[:80]!r}")
        return ["number"]

    def _item(self, call: HostCall, scope: _Scope) -> list[Kind]:
        (node,) = self._counted(call, 1)
        self._plain(node, scope)
        return ["number"]

    def _getitem(self, call: HostCall, scope: _Scope) -> list[Kind]:
        node, index = self._counted(call, 2)
        kind = self._form(node, scope).kind
        if kind == "any" and self.overloads is None:
            return [kind]
        if not isinstance(kind, tuple) or type(index) is not int:
            raise damaged(f"{str(node)[:80]!r} has no part {index!r}")
        if kind[-1:] == ("…",) and index >= 0:
            return [kind[0]]
        if not 0 <= index < len(kind):
            raise damaged(f"{str(node)[:80]!r} has no part {index}")
        return [kind[index]]

    def _operator(self, call: HostCall, scope: _Scope) -> Kind:
        args = [self._form(a, scope) for a in call.args]
        kwargs = {name: self._form(a, scope) for name, a in call.kwargs.items()}
        if self.overloads is None:
            return "any"
        overload = self.overloads[call.op]
        try:
            host.check_arguments(overload._schema, args, kwargs, self.permission.vouches(call.op))
        except host.Mismatch as error:
            raise damaged(f"{call.op} {error}") from None
        return host.results(overload._schema)

    def _cond(self, call: HostCall, scope: _Scope) -> list[Kind]:
        predicate, operands = self._counted(call, 2)
        self._plain(predicate, scope)
        given = self._list(operands, scope)
        kinds = [self.script(inner, given) for inner in call.scripts]
        if len(kinds[0]) != len(kinds[1]):
            raise damaged("the branches of a cond give different numbers of values")
        return [a if a == b else "any" for a, b in zip(*kinds, strict=True)]

    def _while(self, call: HostCall, scope: _Scope) -> list[Kind]:
        carried, fixed = (self._list(a, scope) for a in self._counted(call, 2))
        carried = ["any"] * len(carried)  # the body's results may differ from its first operands
        if len(self.script(call.scripts[0], [*carried, *fixed])) != 1:
            raise damaged("the condition of a while does not give a single value")
        if len(self.script(call.scripts[1], [*carried, *fixed])) != len(carried):
            raise damaged("the body of a while does not give what it takes")
        return carried

    def _scan(self, call: HostCall, scope: _Scope) -> list[Kind]:
        carry, sequences, fixed = (self._list(a, scope) for a in self._counted(call, 3))
        if not sequences:
            raise damaged("a scan has no sequence")
        any_carry: list[Kind] = ["any"] * len(carry)
        kinds = self.script(call.scripts[0], [*any_carry, *["tensor"] * len(sequences), *fixed])
        if len(kinds) < len(carry):
            raise damaged("the body of a scan does not give what it takes")
        return [*any_carry, *["tensor"] * (len(kinds) - len(carry))]

    def _counted(self, call: HostCall, count: int) -> list[Json]:
        if len(call.args) != count:
            raise damaged(f"{call.op} has {len(call.args)} arguments, not {count}")
        return call.args

    # -- arguments
    def _list(self, node: Json, scope: _Scope) -> list[Kind]:
        """The kinds of the operands of control flow."""
        if not isinstance(node, list):
            raise damaged(f"{str(node)[:80]!r} is not a list of operands")
        return [self._plain(part, scope) for part in node]

    def _plain(self, node: Json, scope: _Scope) -> Kind:
        """The kind of a tensor or number."""
        form = self._form(node, scope)
        if form.what == "value" and not isinstance(form.kind, tuple):
            return form.kind
        if form.what == "size" or (form.what == "literal" and not isinstance(form.literal, str)):
            return "number"
        raise damaged(f"{str(node)[:80]!r} is used as a tensor or a number")

    def _form(self, node: Json, scope: _Scope, depth: int = 0) -> Form:
        if node is None:
            return Form("none")
        if isinstance(node, str | bool | int | float):
            if isinstance(node, int) and not INT_MIN <= node <= INT_MAX:
                raise damaged("an integer does not fit into 64 bits")
            return Form("literal", literal=node)
        if isinstance(node, list) and depth < _DEEPEST_ARGUMENT:
            return Form("list", parts=tuple(self._form(part, scope, depth + 1) for part in node))
        if not isinstance(node, dict) or len(node) != 1:
            raise damaged(f"{str(node)[:80]!r} is not an argument")
        ((kind, value),) = node.items()
        if kind == "v":
            return Form("value", self._kind(value, scope))
        if kind == "size":
            self._tree(value, scope)
            return Form(kind)
        if kind == "complex" and isinstance(value, list) and [type(part) for part in value] in ([float] * 2, [int] * 2):
            return Form("literal", literal=complex(*value))
        if value in host.TAGS.get(kind, ()):
            return Form(kind)
        raise damaged(f"{str(node)[:80]!r} is not an argument")

    def _kind(self, name: Json, scope: _Scope) -> Kind:
        if not isinstance(name, str) or name not in scope.kinds:
            raise damaged(f"the value {str(name)[:80]!r} is read before it is defined")
        return scope.kinds[name]

    def _tree(self, tree: Json, scope: _Scope, depth: int = 0) -> int:
        """The nesting depth of a size, including the sizes from which it is computed."""
        if isinstance(tree, str):
            return self._symbol(tree, scope, depth)
        if type(tree) is int:
            if not INT_MIN <= tree <= INT_MAX:
                raise damaged("an integer does not fit into 64 bits")
            return 0
        if not (isinstance(tree, list) and len(tree) == 3 and isinstance(tree[0], str) and tree[0] in OPERATIONS):
            raise damaged(f"{str(tree)[:80]!r} is no size")
        height = 1
        if depth <= _DEEPEST_TREE:
            height += max(self._tree(part, scope, depth + 1) for part in tree[1:])
        if max(height, depth) > _DEEPEST_TREE:
            raise damaged(f"a size is nested more than {_DEEPEST_TREE} deep")
        return height

    def _symbol(self, name: str, scope: _Scope, depth: int) -> int:
        if name in scope.symbols:
            return scope.symbols[name]
        source = scope.script.symbols.get(name)
        if source is None:
            raise damaged(f"there is no size {name[:80]!r}")
        kind = "any" if source[0] in ("fixed", "given") else self._kind(source[1], scope)
        if isinstance(kind, tuple) or kind == ("number" if source[0] == "dim" else "tensor"):
            raise damaged(f"the size {name[:80]!r} is read from what has none")
        height = 0
        if depth <= _DEEPEST_TREE:
            height = 1 + max((self._tree(tree, scope, depth + 1) for tree in source[3:]), default=0)
        if max(height, depth) > _DEEPEST_TREE:
            raise damaged(f"the size {name[:80]!r} is computed from more than {_DEEPEST_TREE} others, or from itself")
        scope.symbols[name] = height
        return height
