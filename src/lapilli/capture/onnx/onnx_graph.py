"""An ONNX graph as plain data, and the element types that values have while they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

FLOAT, UINT8, INT8, UINT16, INT16, INT32, INT64, STRING, BOOL, FLOAT16, DOUBLE, UINT32, UINT64 = range(1, 14)
BFLOAT16, FLOAT8E4M3FN, FLOAT8E4M3FNUZ, FLOAT8E5M2, FLOAT8E5M2FNUZ, UINT4, INT4, FLOAT4E2M1, FLOAT8E8M0 = range(16, 25)
UINT2, INT2 = 25, 26
"""The numbers of TensorProto.DataType."""

DTYPES: Mapping[int, torch.dtype] = {
    FLOAT: torch.float32, UINT8: torch.uint8, INT8: torch.int8, INT16: torch.int16, INT32: torch.int32, INT64: torch.int64,
    BOOL: torch.bool, FLOAT16: torch.float16, DOUBLE: torch.float64, BFLOAT16: torch.bfloat16,
    # Types without arithmetic on devices are computed in wider ones, and programs take and give those.
    UINT16: torch.int32, UINT32: torch.int64, UINT64: torch.int64,  # the last one in two's complement
    UINT4: torch.uint8, INT4: torch.int8, UINT2: torch.uint8, INT2: torch.int8,
    FLOAT8E4M3FN: torch.float32, FLOAT8E4M3FNUZ: torch.float32, FLOAT8E5M2: torch.float32, FLOAT8E5M2FNUZ: torch.float32,
    FLOAT8E8M0: torch.float32, FLOAT4E2M1: torch.float32,
}  # fmt: skip
"""The dtype in which values of an element type are computed."""

FLOATS_OF_8_BITS: Mapping[int, torch.dtype] = {
    FLOAT8E4M3FN: torch.float8_e4m3fn, FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz, FLOAT8E5M2: torch.float8_e5m2,
    FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz, FLOAT8E8M0: torch.float8_e8m0fnu,
}  # fmt: skip
BITS: Mapping[int, tuple[int, bool]] = {
    UINT2: (2, False), INT2: (2, True), UINT4: (4, False), INT4: (4, True), UINT8: (8, False), INT8: (8, True),
    UINT16: (16, False), INT16: (16, True), UINT32: (32, False), INT32: (32, True), UINT64: (64, False), INT64: (64, True),
}  # fmt: skip
"""The bits of an integer type, and whether it has a sign."""
WIDENED = frozenset({UINT16, UINT32, UINT64, UINT4, INT4, UINT2, INT2, FLOAT4E2M1, *FLOATS_OF_8_BITS})

_NATURAL = {dtype: kind for kind, dtype in DTYPES.items() if kind not in WIDENED}


def kind_of(dtype: torch.dtype) -> int:
    """The element type that is a dtype itself."""
    return _NATURAL[dtype]


def limits(kind: int) -> tuple[int, int]:
    """The least and the largest value of an integer type."""
    bits, signed = BITS[kind]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


@dataclass(frozen=True)
class OnnxNode:
    """A call of an operator. Inputs and outputs are names, "" where one is left out. version: since when the operator has its
    present definition; 0 in other domains. attributes: Python values, tensors, and graphs."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    version: int

    @property
    def shown(self) -> str:
        return f"{self.name or ', '.join(self.outputs)} ({self.op})"


@dataclass(frozen=True)
class OnnxInput:
    """sizes: of each axis, a number, a name, or None; None altogether if the rank is open. container: "tensor", "sequence" or
    "optional"."""

    name: str
    kind: int
    sizes: tuple[int | str | None, ...] | None
    container: str = "tensor"


@dataclass
class OnnxGraph:
    inputs: list[OnnxInput]
    outputs: list[str]
    nodes: list[OnnxNode]
    constants: dict[str, torch.Tensor]

    def walk(self) -> Iterator[OnnxNode]:
        """All nodes, including those of inner graphs."""
        for node in self.nodes:
            yield node
            for value in node.attributes.values():
                if isinstance(value, OnnxGraph):
                    yield from value.walk()

    def free(self) -> list[str]:
        """The names that it reads from the graphs around it, each once."""
        own = {x.name for x in self.inputs} | self.constants.keys()
        found: dict[str, None] = {}
        for node in self.nodes:
            inner = [
                name for value in node.attributes.values() if isinstance(value, OnnxGraph) for name in value.free()
            ]
            found.update((name, None) for name in (*node.inputs, *inner) if name and name not in own)
            own.update(node.outputs)
        found.update((name, None) for name in self.outputs if name not in own)
        return list(found)


@dataclass
class OnnxModel:
    """kinds: the element types of values that are computed in a wider dtype, by name."""

    graph: OnnxGraph
    kinds: dict[str, int] = field(default_factory=dict)
