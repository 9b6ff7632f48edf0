"""Host scripts, for runs that are more than one method of the player: segments on the GPU, operators on the CPU, control flow.

A `HostScript` is a list of calls over named values, kept as JSON in the program's metadata. GPU segments are methods of the
program file; operators that have no GPU kernel are called in torch, by name. Arguments are JSON with a few tagged forms:

    {"v": NAME}         an earlier value               {"size": TREE}   an integer computed from sizes
    {"complex": [1, 2]} {"dtype": "int64"}  {"layout": "strided"}  {"memory_format": "channels_last"}  {"device": "cpu"}

A TREE is a size computed from symbols (`sizes.py`).

A script comes from a file, and is not trusted: `HostScript.from_json` checks its form, `check.py` its content, and `host.py` the
operators that it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from lapilli.errors import InvalidFileError

Json = Any

DEEPEST = 16
"""The largest nesting depth of scripts: branches and bodies of control flow."""

_LONGEST_NAME = 4096
_FIELDS: dict[str, dict[str, type]] = {
    "call": {"op": str, "args": list, "outs": list, "kwargs": dict, "method": int, "scripts": list},
    "script": {"inputs": list, "outputs": list, "calls": list, "constants": dict, "symbols": dict, "states": dict},
}


def damaged(what: str) -> InvalidFileError:
    """The exception for a malformed script."""
    return InvalidFileError(f"The script in the program's metadata is damaged: {what}.")


@dataclass
class HostCall:
    """One step of a script.

    op: "gpu" (a method of the file, called with its inputs and then the sizes that it is given), "number" (a function of
    `arithmetic.NUMBERS`), "item", "getitem", "cond", "while", "scan", or an operator overload of torch
    ("aten.nonzero.default"). outs: names of its results (a single name for a torch operator, whose result may be a list).
    """

    op: str
    args: list[Json]
    outs: list[str]
    kwargs: dict[str, Json] = field(default_factory=dict)
    method: int = -1
    scripts: list[HostScript] = field(default_factory=list)


@dataclass
class HostScript:
    """inputs, outputs: values by name (an output may be any argument form). constants: name -> index in the file.

    symbols: name -> where it is read, as ["dim", value, axis, factor, offset] (trees of other symbols), ["value", name],
    ["fixed", number] or ["given"] (by the caller of the script).

    states: values kept from run to run: value -> [its name in the model, index of its initial value in the file (-1: the
    player has it), argument form of its new value (None: unchanged by this script)].
    """

    inputs: list[str]
    outputs: list[Json]
    calls: list[HostCall] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, list[Any]] = field(default_factory=dict)
    states: dict[str, list[Any]] = field(default_factory=dict)

    def to_json(self) -> Json:
        return asdict(self)

    @staticmethod
    def from_json(node: Json, depth: int = 0) -> HostScript:
        """Converts JSON. Raises InvalidFileError if it does not have the form of a script."""
        if depth > DEEPEST:
            raise damaged(f"control flow is nested more than {DEEPEST} deep")
        given = _fields(node, "script")
        _names(given["inputs"])
        calls = []
        for call in given.pop("calls"):
            parts = _fields(call, "call")
            _names([parts["op"], *parts["outs"], *parts["kwargs"]])
            parts["scripts"] = [HostScript.from_json(inner, depth + 1) for inner in parts["scripts"]]
            calls.append(HostCall(**parts))
        for table in ("constants", "symbols", "states"):
            _names(list(given[table]))
        return HostScript(calls=calls, **given)

    def operators(self) -> list[str]:
        """The torch operators that it calls, including sub-scripts, each once."""
        return list(dict.fromkeys(call.op for call in self.walk() if "." in call.op))

    def walk(self) -> Iterator[HostCall]:
        """All calls, including those of sub-scripts."""
        for call in self.calls:
            yield call
            for inner in call.scripts:
                yield from inner.walk()


def _fields(node: Json, kind: str) -> dict[str, Any]:
    """The values of a JSON object that has exactly these fields, of these types."""
    wanted = _FIELDS[kind]
    if not isinstance(node, dict) or node.keys() != wanted.keys():
        raise damaged(f"{str(node)[:80]!r} is no {kind}")
    for name, type_ in wanted.items():
        if type(node[name]) is not type_:
            raise damaged(f"the {name} of a {kind} are {str(node[name])[:80]!r}")
    return dict(node)


def _names(names: list[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise damaged(f"{str(name)[:80]!r} is not a name")


def segments(script: HostScript) -> list[str]:
    """The steps of a run: "gpu", "cpu" (adjacent operators count once), "cond(gpu | gpu)", and so on."""
    found: list[str] = []
    for call in script.calls:
        kind = "cpu" if "." in call.op else call.op
        if kind in ("number", "item", "getitem") or (kind == "cpu" and found[-1:] == ["cpu"]):
            continue
        inner = " | ".join(" → ".join(segments(s)) or "nothing" for s in call.scripts)
        found.append(f"{kind}({inner})" if call.scripts else kind)
    return found
