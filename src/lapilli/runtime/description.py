"""The content of a program file: methods, plans, kernels, constants, memory plan. Needs the player, but no device."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from lapilli import player
from lapilli.errors import InvalidFileError, InvalidInputError
from lapilli.format import container
from lapilli.runtime.files import named
from lapilli.runtime.limits import load_json

INTERNAL = "lapilli."
"""The prefix of the compiler's own metadata."""

RANDOM_STATE = "lapilli.random"
"""The state of programs that draw random numbers: two int32, the number of the run and a seed."""

SCHEDULE_KEY = INTERNAL + "schedule"

Size = int | str
"""A number, or an expression over the dynamic sizes as text, such as `N` or `(N * 49)`."""


GENERIC = "generic_"
"""How the names of kernels begin that compute a product or a convolution as they would any other reduction, element by element."""


@dataclass(frozen=True)
class SymbolSpec:
    """A dynamic size, from `min` to `max` (None: no bound). Axis `axis` of input `input` has size factor * symbol + offset;
    or no input shows it, and it is `given` with every run.
    """

    name: str
    min: int
    max: int | None
    input: int = 0
    axis: int = 0
    factor: int = 1
    offset: int = 0
    given: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: dense, row-major."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    symbols: tuple[SymbolSpec, ...] = ()

    def __str__(self) -> str:
        bounds = {symbol.name: f"{symbol.min}..{'' if symbol.max is None else symbol.max}" for symbol in self.symbols}
        sizes = [f"{size}={bounds[size]}" if size in bounds else str(size) for size in map(str, self.shape)]
        return f"{self.name!r}: {self.dtype}[{', '.join(sizes)}]"

    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of NumPy arrays. Raises InvalidInputError for bfloat16 unless ml_dtypes is loaded."""
        try:
            return np.dtype(self.dtype)
        except TypeError:
            message = (
                f"{self} is bfloat16, which NumPy lacks: call the program with torch tensors, or import ml_dtypes."
            )
            raise InvalidInputError(message) from None

    def least_shape(self) -> tuple[int, ...]:
        """The shape with the smallest value of every dynamic size, but at least 1.

        Raises InvalidInputError if a size is computed from dynamic ones.
        """
        values = {symbol.name: max(1, symbol.min) for symbol in self.symbols}
        sizes = [size if isinstance(size, int) else values.get(size) for size in self.shape]
        if None in sizes:
            raise InvalidInputError(f"The sizes of {self} must be given: --input_dims.")
        return tuple(size for size in sizes if size is not None)


@dataclass(frozen=True)
class ConstantSpec:
    """A weight in the file; `offset` is its position in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    offset: int


@dataclass(frozen=True)
class StateSpec(TensorSpec):
    """A tensor that stays on the device from run to run; `constant` is its initial value (None: zeros)."""

    size: int = 0
    constant: int | None = None


@dataclass(frozen=True)
class KernelSpec:
    """Code, in the format `spirv`, and the features that it needs."""

    name: str
    format: str
    code_size: int
    local: tuple[int, int, int]
    subgroup_size: int
    shared_size: int
    bindings: int
    push_size: int


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a plan; `first` and `last` are the run commands between which an arena buffer is alive."""

    kind: str
    name: str
    size: Size
    first: int
    last: int


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch; `groups` are its work groups, `label` the operators that it computes. rounds_input: it only rounds an
    input to float16, and is left out where the host gives that: it is rounded while it is copied.
    """

    label: str
    kernel: str
    groups: tuple[Size, ...]
    barrier: bool
    buffers: tuple[int, ...]
    written: tuple[bool, ...]
    rounds_input: bool


@dataclass(frozen=True)
class Plan:
    """One way to run a method, for devices that meet its requirements."""

    index: int
    name: str
    requirements: Mapping[str, Any]
    buffers: tuple[BufferSpec, ...]
    load: tuple[Dispatch, ...]
    run: tuple[Dispatch, ...]


@dataclass(frozen=True)
class MethodSpec:
    """A function of the program. checks: operators whose int64 results every run checks. integer_limit: the limit for
    magnitudes of int64 inputs, 0 for any 32-bit integers.
    """

    name: str
    symbols: tuple[SymbolSpec, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    plans: tuple[Plan, ...]
    checks: tuple[str, ...] = ()
    integer_limit: int = 0

    @property
    def given(self) -> list[str]:
        """The symbols whose values are given with every run."""
        return [s.name for s in self.symbols if s.given]

    def symbol_values(self, inputs: Sequence[Any], sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The dynamic sizes of inputs. sizes: the values that are given.

        Raises InvalidInputError if one is missing.
        """
        known = sizes or {}
        missing = [name for name in self.given if name not in known]
        if missing:
            raise InvalidInputError(f"The method {self.name} takes sizes that no input shows: {', '.join(missing)}.")
        return tuple(
            known[s.name] if s.given else (inputs[s.input].shape[s.axis] - s.offset) // s.factor for s in self.symbols
        )


@dataclass(frozen=True)
class Placement:
    """The memory of a buffer of a plan: the block of the arena, offset and size in bytes."""

    buffer: int
    block: int
    offset: int
    size: int


@dataclass(frozen=True)
class Cost:
    """The work of a dispatch for given sizes."""

    groups: tuple[int, ...]
    flops: int
    bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The size of a plan's arena, in bytes, for given sizes. total: without sharing. lower_bound: the most that is alive at
    once.
    """

    arena: int
    total: int
    lower_bound: int
    placements: tuple[Placement, ...]
    commands: tuple[Cost, ...]


@dataclass(frozen=True)
class Description:
    """A program file."""

    source: str | PathLike[str] | bytes | memoryview
    producer: str
    methods: tuple[MethodSpec, ...]
    constants: tuple[ConstantSpec, ...]
    states: tuple[StateSpec, ...]
    kernels: tuple[KernelSpec, ...]
    host_operators: tuple[str, ...]
    metadata: Mapping[str, str]

    @staticmethod
    def of(
        source: str | PathLike[str] | bytes | memoryview,
        *,
        verify: bool = True,
        limits: player.NativeLimits | None = None,
    ) -> Description:
        """Describes a file (by path) or its bytes. verify: whether to check the checksum, too. limits: bounds on the file's
        resources.

        Raises ReadError, InvalidFileError.
        """
        with named(source):
            return Description.from_json(source, player.describe(source, verify=verify, limits=limits))

    @staticmethod
    def from_json(source: str | PathLike[str] | bytes | memoryview, node: Mapping[str, Any]) -> Description:
        """node: what the player says of the file."""
        kernels = tuple(
            KernelSpec(
                k["name"],
                k["format"],
                k["code_size"],
                tuple(k["local"]),
                k["subgroup_size"],
                k["shared_size"],
                k["bindings"],
                k["push_size"],
            )
            for k in node["kernels"]
        )
        constants = tuple(
            ConstantSpec(c["name"], c["dtype"], tuple(c["shape"]), c["size"], c["offset"]) for c in node["constants"]
        )
        methods = tuple(_method(method, kernels) for method in node["methods"])
        states = tuple(
            StateSpec(s["name"], s["dtype"], tuple(s["shape"]), (), s["size"], s["constant"]) for s in node["states"]
        )
        host = tuple(node["host_operators"])
        return Description(source, node["producer"], methods, constants, states, kernels, host, node["metadata"])

    def constant(self, index: int) -> Any:
        """The value of a constant, as a NumPy array, or a torch tensor for bfloat16."""
        c = self.constants[index]
        data = container.data(self.source, c.offset, c.size)
        bits = np.dtype(np.uint16 if c.dtype == "bfloat16" else c.dtype)
        if len(data) != c.size or c.size != math.prod(c.shape) * bits.itemsize:
            raise InvalidFileError(
                f"The constant {c.name!r} is not in the file as it is described; was the file changed?"
            )
        values = np.frombuffer(data, bits).reshape(c.shape).copy()
        if c.dtype == "bfloat16":
            torch = importlib.import_module("torch")
            return torch.from_numpy(values).view(torch.bfloat16)
        return values

    def reasons(self, plan: Plan) -> tuple[str, ...]:
        """The reason, in the compiler's words, why the result of each run command has memory of its own; empty if the
        compiler left none.
        """
        decisions = load_json(self.metadata.get(SCHEDULE_KEY, "{}"), "The reasons in the program's metadata")
        found = decisions.get(plan.name) if isinstance(decisions, dict) else None
        reasons = found.get("run") if isinstance(found, dict) else None
        good = isinstance(reasons, list) and len(reasons) == len(plan.run) and all(isinstance(r, str) for r in reasons)
        return tuple(reasons) if good and reasons else ("",) * len(plan.run)

    def memory(self, plan: Plan, symbols: Sequence[int], method: int = 0) -> MemoryPlan:
        """The memory plan for the given values of the method's symbols, and the work of every run command."""
        node = player.plan_memory(self.source, method=method, plan=plan.index, symbols=symbols, verify=False)
        return MemoryPlan(
            node["arena"],
            node["sum"],
            node["lower_bound"],
            tuple(Placement(b["buffer"], b["block"], b["offset"], b["size"]) for b in node["buffers"]),
            tuple(Cost(tuple(c["groups"]), c["flops"], c["bytes"]) for c in node["commands"]),
        )


def _method(node: Mapping[str, Any], kernels: Sequence[KernelSpec]) -> MethodSpec:
    symbols = tuple(SymbolSpec(**s) for s in node["symbols"])
    return MethodSpec(
        node["name"],
        symbols,
        tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), symbols) for t in node["inputs"]),
        tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), symbols) for t in node["outputs"]),
        tuple(_plan(i, plan, kernels) for i, plan in enumerate(node["plans"])),
        tuple(node["checks"]),
        node["integer_limit"],
    )


def _plan(index: int, node: Mapping[str, Any], kernels: Sequence[KernelSpec]) -> Plan:
    def dispatches(key: str) -> tuple[Dispatch, ...]:
        return tuple(
            Dispatch(
                d["label"],
                kernels[d["kernel"]].name,
                tuple(d["groups"]),
                d["barrier"],
                tuple(b["buffer"] for b in d["bindings"]),
                tuple(b["written"] for b in d["bindings"]),
                d["rounds_input"],
            )
            for d in node[key]
        )

    buffers = tuple(BufferSpec(b["kind"], b["name"], b["size"], b["first"], b["last"]) for b in node["buffers"])
    return Plan(index, node["name"], node["requirements"], buffers, dispatches("load"), dispatches("run"))
