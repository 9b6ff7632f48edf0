"""Example inputs: positional and keyword, or parsed from a command line (`batch=2..16,3,224,224`, `1,128:int64`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim

from lapilli.errors import InvalidInputError

_NUMBERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text],
    "str": str,
}
_TYPES = {"float": "float32", "half": "float16", "double": "float64", "int": "int32", "long": "int64"}


@dataclass(frozen=True)
class Arguments:
    """Positional and keyword example inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def example_inputs(words: Sequence[str]) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """Example inputs and dynamic_shapes for `lapilli.compile`; None if there are no words, or no dynamic sizes.

    Raises InvalidInputError, whose message shows the syntax of a word.
    """
    if not words:
        return None, None
    dims: dict[str, Any] = {}
    pairs = [_example(word, dims) for word in words]
    return tuple(value for value, _ in pairs), tuple(spec for _, spec in pairs) if dims else None


def _example(word: str, dims: dict[str, Any]) -> tuple[Any, Any]:
    """A value and its dynamic dimensions. dims: Dims by name, to which new ones are added."""
    kind, equals, text = word.partition("=")
    if equals and kind in _NUMBERS:
        try:
            return _NUMBERS[kind](text), None
        except (KeyError, ValueError):
            raise InvalidInputError(f"--input {word!r}: {text!r} is no {kind}.") from None
    sizes, _, name = word.partition(":")
    dtype = getattr(torch, _TYPES.get(name, name) or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInputError(f"--input {word!r}: {name!r} is no type; use float, half, int32, int64, uint8 or bool.")
    shape: list[int] = []
    spec: dict[int, Any] = {}
    for axis, size in enumerate(sizes.split(",") if sizes else ()):
        found = re.fullmatch(r"\s*(?:(?P<name>[A-Za-z_]\w*)=)?(?P<size>\d+)(?:\.\.(?P<most>\d+))?\s*", size)
        if found is None or (found["most"] and not found["name"]):
            raise InvalidInputError(
                f"--input {word!r}: {size!r} is no size. Write 1,3,224,224, or batch=2..16,3,224,224 for a dynamic size "
                "(2 in the example, 16 at most)."
            )
        shape.append(int(found["size"]))
        if found["name"]:
            most = int(found["most"]) if found["most"] else None
            spec[axis] = dims.setdefault(found["name"], Dim(found["name"], min=1, max=most))
    value = torch.rand(shape) if dtype.is_floating_point else torch.zeros(shape)
    return value.to(dtype), spec or None
