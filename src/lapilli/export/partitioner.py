"""Selects the operators of an exported program to lower, and the options for compiling them. The option names are ExecuTorch's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lapilli.compiler import Storage
from lapilli.errors import CompileError
from lapilli.lower.registry import decompositions, lowerings

Key = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket
_PRECISIONS = ("fp32", "fp16")
_LAYOUTS = ("auto", "contiguous", "channels-last")


@dataclass
class VulkanPartitioner:
    """Chooses the operators to lower.

    An operator is given by the name of one overload ("aten.add.Tensor"), by the name of all its overloads ("aten.add"), or by
    torch's object for either.

    Attributes:
        operator_allowlist: lower only these operators; None: all.
        operator_blocklist: never lower these operators.
        precision: "fp32", or "fp16" for 16-bit storage with 32-bit accumulation. Inputs and outputs keep their dtypes.
        storage: exceptions to `precision`: {"weights": "fp16"} halves a program's size and computes as with fp32;
            {"activations": ...} is the precision in which intermediate results are stored.
        memory_layout: of intermediate results: "auto" chooses the cheapest, "contiguous" stores all row-major (NCHW),
            "channels-last" stores those with four dimensions as NHWC.
        min_operators: groups with fewer operators stay with torch.

    Raises:
        CompileError: an operator or a choice is unknown; the message lists the possible ones.
    """

    operator_allowlist: Iterable[Key] | None = None
    operator_blocklist: Iterable[Key] = ()
    precision: str = "fp32"
    storage: Mapping[str, str] = field(default_factory=dict)
    memory_layout: str = "auto"
    min_operators: int = 1

    def __post_init__(self) -> None:
        if self.operator_allowlist is not None:
            self.operator_allowlist = _overloads(self.operator_allowlist, "operator_allowlist")
        self.operator_blocklist = _overloads(self.operator_blocklist, "operator_blocklist")
        _check("precision", self.precision, _PRECISIONS)
        _check("memory_layout", self.memory_layout, _LAYOUTS)
        for name, value in self.storage.items():
            _check("storage", name, ("weights", "activations"))
            _check(f"storage of {name}", value, _PRECISIONS)
        if not isinstance(self.min_operators, int) or self.min_operators < 1:
            raise CompileError(f"min_operators is {self.min_operators!r}: give a number from 1 on")

    def refuses(self, operator: Any) -> str | None:
        """The reason why an operator must not be lowered; None if it may be."""
        if operator in self.operator_blocklist:
            return "in operator_blocklist"
        if self.operator_allowlist is not None and operator not in self.operator_allowlist:
            return "not in operator_allowlist"
        return None

    def kept(self) -> Storage:
        """The storage options of lowered parts."""
        chosen = {"weights": self.precision, "activations": self.precision} | dict(self.storage)
        return Storage(chosen["activations"], chosen["weights"], self.memory_layout)


def _overloads(keys: Iterable[Key], where: str) -> frozenset[Any]:
    if isinstance(keys, str):
        raise CompileError(f"{where} is the text {keys!r}: give a list of operators")
    return frozenset(o for key in keys for o in _of(key, where))


def _of(key: Key, where: str) -> list[Any]:
    if isinstance(key, torch._ops.OpOverload):
        return [key]
    if isinstance(key, torch._ops.OpOverloadPacket):
        return [getattr(key, name) for name in key.overloads()]  # type: ignore[no-untyped-call]
    if not isinstance(key, str):
        raise CompileError(
            f"{where} has {key!r}: an operator is a name such as 'aten.add.Tensor', or torch.ops.aten.add"
        )
    parts = key.removeprefix("torch.ops.").replace("::", ".").split(".")
    found: Any = torch.ops
    try:
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if len(parts) in (2, 3) and isinstance(found, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _of(found, where)
    known = {str(o) for o in [*lowerings, *decompositions]}
    known |= {name.rsplit(".", 1)[0] for name in known}
    close = difflib.get_close_matches(".".join(parts), sorted(known), 1, 0.4)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise CompileError(f"{where} has {key!r}, which is no operator of torch{hint}")


def _check(name: str, value: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        close = difflib.get_close_matches(str(value), possible, 1, 0.4)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        listed = ", ".join(f'"{p}"' for p in possible)
        raise CompileError(f"{name} is {value!r}{hint}: choose one of {listed}")
