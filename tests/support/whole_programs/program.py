"""A program as data: tensors that it is given, calls in order, results. Steps can be left out, so that failures shrink."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

Size = int | str
"""A fixed size, or "n", the open size of the program."""
Values = dict[str, Any]

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class Leaf:
    """A tensor that the program is given. kind: what numbers; layout: how they lie in memory; parameter: a buffer of the
    module, not an argument; high: bound of an index; data: the numbers themselves, where kind is "literal"."""

    name: str
    shape: tuple[Size, ...]
    dtype: str
    kind: str
    seed: int
    layout: str = "plain"
    parameter: bool = False
    high: int = 0
    data: str = ""

    def sizes(self, n: int) -> tuple[int, ...]:
        return tuple(n if isinstance(s, str) else s for s in self.shape)

    def make(self, n: int, device: str = "cpu") -> torch.Tensor:
        """The tensor, where the open size is n; it lies in memory of the device as the layout says."""
        dtype = getattr(torch, self.dtype)
        if self.kind == "literal":
            return load(self.data).to(device)
        sizes = self.sizes(n)
        expanded = self.layout == "expanded" and len(sizes) > 0
        made = _numbers(self, (1, *sizes[1:]) if expanded else sizes).to(dtype).to(device)
        if expanded:
            return made.expand(sizes)
        if self.layout == "transposed" and len(sizes) > 1:
            return made.mT.contiguous().mT
        if self.layout == "strided" and len(sizes) > 0:
            room = torch.zeros(*sizes[:-1], 2 * sizes[-1] + 1, dtype=dtype, device=device)
            room[..., 1 : 1 + 2 * sizes[-1] : 2] = made
            return room[..., 1 : 1 + 2 * sizes[-1] : 2]
        if self.layout == "offset" and len(sizes) > 0:
            room = torch.zeros(sizes[0] + 3, *sizes[1:], dtype=dtype, device=device)
            room[3:] = made
            return room[3:]
        return made


def _numbers(leaf: Leaf, sizes: tuple[int, ...]) -> torch.Tensor:
    random = torch.Generator().manual_seed(leaf.seed)
    if leaf.kind == "index":
        return torch.randint(0, max(leaf.high, 1), sizes, generator=random)
    if leaf.kind == "bool":
        return torch.rand(sizes, generator=random) < 0.6
    if leaf.kind == "integer":
        low, high = (0, 40) if leaf.dtype == "uint8" else (-20, 20)
        return torch.randint(low, high, sizes, generator=random)
    if leaf.kind == "wide":  # all numbers of a narrow type
        low, high = (0, 256) if leaf.dtype == "uint8" else (-128, 128)
        return torch.randint(low, high, sizes, generator=random)
    if leaf.kind == "ties":
        return torch.randint(-3, 4, sizes, generator=random).double()
    if leaf.kind == "unit":
        return torch.rand(sizes, generator=random, dtype=torch.float64) * 0.9 + 0.05
    if leaf.kind == "weight":
        many = 1
        for s in sizes[1:]:
            many *= s
        return torch.randn(sizes, generator=random, dtype=torch.float64) / max(many, 1) ** 0.5
    numbers = torch.randn(sizes, generator=random, dtype=torch.float64)
    if leaf.kind in ("special", "rare"):
        place, part = torch.rand(sizes, generator=random), 0.05 if leaf.kind == "special" else 0.01
        for k, value in enumerate((float("inf"), -float("inf"), float("nan"), -0.0, 0.0)):
            numbers[(place > k * part) & (place < k * part + part)] = value
    return numbers


def dump(tensor: torch.Tensor) -> str:
    """A tensor as text, with the way it lies in memory where that is dense."""
    file = io.BytesIO()
    torch.save(tensor.detach().clone(), file)
    return base64.b64encode(file.getvalue()).decode()


def load(text: str) -> torch.Tensor:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


@dataclass(frozen=True)
class Step:
    """A call: names of what it makes (none: it changes something in place), its text with {0}, {1} for its arguments."""

    out: tuple[str, ...]
    text: str
    args: tuple[str, ...]

    @property
    def line(self) -> str:
        call = self.text.format(*self.args)
        return f"{', '.join(self.out)} = {call}" if self.out else call


@dataclass(frozen=True)
class Program:
    """sizes: those that the open size n takes, first the example's; twice: arguments that are given the same tensor as an
    earlier one, by name."""

    seed: int
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    sizes: tuple[int, ...] = (5,)
    twice: tuple[tuple[str, str], ...] = ()

    @property
    def arguments(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if not leaf.parameter]

    @property
    def parameters(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.parameter]

    @property
    def is_open(self) -> bool:
        return any(isinstance(s, str) for leaf in self.arguments for s in leaf.shape)

    def make(self, n: int, device: str = "cpu") -> Values:
        """The tensors that the program is given, by name."""
        values = {leaf.name: leaf.make(n, device) for leaf in self.leaves}
        for name, other in self.twice:
            if name in values and other in values:
                values[name] = values[other]
        return values

    def used(self) -> Program:
        """Without steps and leaves that no result depends on."""
        needed, steps = set(self.outputs), []
        for step in reversed(self.steps):
            if not step.out or needed & set(step.out):
                if not step.out and not _reaches(self.steps, step.args[0], needed, self.leaves):
                    continue
                steps.append(step)
                needed |= set(step.args)
        kept = tuple(leaf for leaf in self.leaves if leaf.name in needed)
        names = {leaf.name for leaf in kept}
        twice = tuple(t for t in self.twice if set(t) <= names)
        return replace(self, steps=tuple(reversed(steps)), leaves=kept, twice=twice)

    def body(self, indent: str = "    ") -> str:
        lines = [s.line for s in self.steps] + [f"return ({''.join(o + ', ' for o in self.outputs)})"]
        return "\n".join(indent + line for line in lines)

    def source(self) -> str:
        """A module with this program as forward."""
        buffers = "".join(f'        self.register_buffer("{leaf.name}", {leaf.name})\n' for leaf in self.parameters)
        names = ", ".join(leaf.name for leaf in self.arguments)
        own = "".join(f"        {leaf.name} = self.{leaf.name}\n" for leaf in self.parameters)
        takes = ", ".join(leaf.name for leaf in self.parameters)
        return (
            f"class Model(torch.nn.Module):\n    def __init__(self{', ' + takes if takes else ''}):\n"
            f"        super().__init__()\n{buffers}\n    def forward(self{', ' + names if names else ''}):\n"
            f"{own}{self.body('        ')}\n"
        )

    def function(self) -> str:
        """The program as a function of all leaves."""
        return f"def program({', '.join(leaf.name for leaf in self.leaves)}):\n{self.body()}\n"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> Program:
        data = json.loads(text)
        return Program(
            data["seed"],
            tuple(Leaf(**(leaf | {"shape": tuple(leaf["shape"])})) for leaf in data["leaves"]),
            tuple(Step(tuple(s["out"]), s["text"], tuple(s["args"])) for s in data["steps"]),
            tuple(data["outputs"]),
            tuple(data["sizes"]),
            tuple((a, b) for a, b in data["twice"]),
        )


def _reaches(steps: Sequence[Step], name: str, needed: set[str], leaves: Sequence[Leaf]) -> bool:
    """Whether a change of a value may be seen in what is needed: anything made from its family of views, or an argument."""
    family = {name}
    for step in reversed(steps):
        if family & set(step.out):
            family |= set(step.args)
    for step in steps:
        if family & set(step.args):
            family |= set(step.out)
    return bool(family & needed) or any(leaf.name in family and not leaf.parameter for leaf in leaves)


NAMES = {"torch": torch, "F": torch.nn.functional, "inf": float("inf"), "nan": float("nan")}


def defined(source: str, name: str, extra: Mapping[str, Any] | None = None) -> Any:
    """What a piece of source defines under a name."""
    space = dict(NAMES) | dict(extra or {})
    exec(compile(source, "<random program>", "exec"), space)
    return space[name]
