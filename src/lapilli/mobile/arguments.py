"""Arguments and results of TorchScript methods as a list of tensors and a list of strings. Operator schemas have no dictionaries,
nested lists or optional tuples.

`pack` and `unpack` do the conversion in Python; `Code.write` and `Code.read` generate TorchScript code that does the same. Tensors
are appended to the tensors. Numbers and strings are appended to the strings; so are "0" or "1" for an optional that is or is not
None, and the length of a list or a dictionary, before its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lapilli.errors import CompileError

_NUMBERS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": lambda text: text == "True"}


@dataclass(frozen=True)
class Type:
    """A TorchScript type. kind: Tensor, int, float, bool, str, None, Optional, List, Tuple or Dict."""

    kind: str
    parts: tuple[Type, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}[{', '.join(map(str, self.parts))}]" if self.parts else self.kind

    @property
    def is_fixed(self) -> bool:
        """Whether the number of tensors is known."""
        return self.kind in ("Tensor", "Tuple") and all(p.is_fixed for p in self.parts)


def type_of(given: Any) -> Type:
    """Converts torch's object for a type. Raises CompileError if an operator cannot take or return such values."""
    kind = given.kind()
    simple = {
        "TensorType": "Tensor",
        "IntType": "int",
        "FloatType": "float",
        "BoolType": "bool",
        "StringType": "str",
        "NoneType": "None",
    }
    if kind in simple:
        return Type(simple[kind])
    if kind in ("OptionalType", "ListType"):
        return Type(kind.removesuffix("Type"), (type_of(given.getElementType()),))
    if kind == "TupleType":
        return Type("Tuple", tuple(map(type_of, given.elements())))
    if kind == "DictType" and given.getKeyType().kind() in ("StringType", "IntType"):
        return Type("Dict", (type_of(given.getKeyType()), type_of(given.getValueType())))
    raise CompileError(
        f"a method with a value of type {given} cannot run on the GPU; tensors, numbers, strings, and optionals, lists, tuples "
        "and dictionaries of them can be passed and returned"
    )


# -- in Python


def pack(value: Any, kind: Type) -> tuple[list[torch.Tensor], list[str]]:
    """The tensors and strings of a value."""
    tensors: list[torch.Tensor] = []
    notes: list[str] = []

    def put(value: Any, kind: Type) -> None:
        match kind.kind:
            case "Tensor":
                tensors.append(value)
            case "None":
                pass
            case "Optional":
                notes.append("0" if value is None else "1")
                if value is not None:
                    put(value, kind.parts[0])
            case "List":
                notes.append(str(len(value)))
                for item in value:
                    put(item, kind.parts[0])
            case "Dict":
                notes.append(str(len(value)))
                for key, item in value.items():
                    notes.append(str(key))
                    put(item, kind.parts[1])
            case "Tuple":
                for item, part in zip(value, kind.parts, strict=True):
                    put(item, part)
            case _:
                notes.append(str(value))

    put(value, kind)
    return tensors, notes


def unpack(tensors: Iterator[torch.Tensor], notes: Iterator[str], kind: Type) -> Any:
    """The value of tensors and strings, which are consumed."""
    match kind.kind:
        case "Tensor":
            return next(tensors)
        case "None":
            return None
        case "Optional":
            return unpack(tensors, notes, kind.parts[0]) if next(notes) == "1" else None
        case "List":
            return [unpack(tensors, notes, kind.parts[0]) for _ in range(int(next(notes)))]
        case "Tuple":
            return tuple(unpack(tensors, notes, part) for part in kind.parts)
        case "Dict":
            count = int(next(notes))
            return {
                _NUMBERS[kind.parts[0].kind](next(notes)): unpack(tensors, notes, kind.parts[1]) for _ in range(count)
            }
    return _NUMBERS[kind.kind](next(notes))


# -- as TorchScript code


class Code:
    """Lines of a TorchScript function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names = 0

    def name(self) -> str:
        """A new name."""
        self._names += 1
        return f"_v{self._names}"

    def add(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def write(self, depth: int, value: str, kind: Type) -> None:
        """Appends a value to `tensors` and `notes`."""
        match kind.kind:
            case "Tensor":
                self.add(depth, f"tensors.append({value})")
            case "None":
                pass
            case "Optional":
                self.add(depth, f"if {value} is None:")
                self.add(depth + 1, 'notes.append("0")')
                self.add(depth, "else:")
                self.add(depth + 1, 'notes.append("1")')
                self.write(depth + 1, value, kind.parts[0])
            case "List":
                item = self.name()
                self.add(depth, f"notes.append(str(len({value})))")
                self.add(depth, f"for {item} in {value}:")
                self.write(depth + 1, item, kind.parts[0])
            case "Dict":
                key, item = self.name(), self.name()
                self.add(depth, f"notes.append(str(len({value})))")
                self.add(depth, f"for {key}, {item} in {value}.items():")
                self.add(depth + 1, f"notes.append(str({key}))")
                self.write(depth + 1, item, kind.parts[1])
            case "Tuple":
                for index, part in enumerate(kind.parts):
                    item = self.name()
                    self.add(depth, f"{item} = {value}[{index}]")
                    self.write(depth, item, part)
            case _:
                self.add(depth, f"notes.append(str({value}))")

    def read(self, depth: int, kind: Type) -> str:
        """Takes a value from the front of `tensors` and `notes`. Returns its name."""
        name = self.name()
        match kind.kind:
            case "Tensor":
                self.add(depth, f"{name} = tensors.pop(0)")
            case "None":
                return "None"
            case "Optional":
                self.add(depth, f"{name}: {kind} = None")
                self.add(depth, 'if notes.pop(0) == "1":')
                self.add(depth + 1, f"{name} = {self.read(depth + 1, kind.parts[0])}")
            case "List":
                self.add(depth, f"{name}: {kind} = []")
                self.add(depth, f"for {self.name()} in range(int(notes.pop(0))):")
                self.add(depth + 1, f"{name}.append({self.read(depth + 1, kind.parts[0])})")
            case "Dict":
                self.add(depth, f"{name}: {kind} = {{}}")
                self.add(depth, f"for {self.name()} in range(int(notes.pop(0))):")
                key = self.read(depth + 1, kind.parts[0])
                self.add(depth + 1, f"{name}[{key}] = {self.read(depth + 1, kind.parts[1])}")
            case "Tuple":
                parts = [self.read(depth, part) for part in kind.parts]
                self.add(depth, f"{name} = ({', '.join(parts)}{',' if len(parts) == 1 else ''})")
            case "bool":
                self.add(depth, f'{name} = notes.pop(0) == "True"')
            case "str":
                self.add(depth, f"{name} = notes.pop(0)")
            case number:
                self.add(depth, f"{name} = {number}(notes.pop(0))")
        return name
