"""What a device can do: bytes and operations a second, measured by a large copy and a large product. What a kernel reaches is
compared with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lapilli.compiler import compile_to_bytes
from lapilli.runtime.program import Program
from lapilli.target import KNOWN, TARGETS

_REPEAT = 7
_ENOUGH = 2e-3
"""Seconds from which on a measurement is as large as need be."""
_COPIES = (1 << 20, 1 << 23, 1 << 25)
"""Elements."""
_PRODUCTS = (256, 1024, 4096)
"""Rows, columns and terms."""


@dataclass(frozen=True)
class Speed:
    """Of a device.

    Attributes:
        bytes: read or written in a second.
        flops: floating-point operations a second, of products.
        floor: seconds that a kernel takes that does nothing.
    """

    bytes: float
    flops: float
    floor: float

    def seconds(self, nbytes: int, flops: int) -> float:
        """What a kernel needs at least."""
        return max(nbytes / self.bytes, flops / self.flops) + self.floor


class _Function(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def measure(plan: str | None = None, device: str | int | None = None, half: bool | None = None) -> Speed:
    """By kernels of the same plan as those that are compared. Takes a second or two.

    Args:
        plan: name of a plan of a file; default, and instead of one that the compiler does not know: the device's best one.
        device: as for `lapilli.load`.
        half: whether numbers are stored in half precision; default: as the plan does.
    """
    if half is None:
        half = plan is not None and "fp16" in plan
    if plan not in TARGETS and plan not in KNOWN:
        plan = None
    dtype = torch.float16 if half else torch.float32

    def seconds(function: Callable[..., torch.Tensor], *shapes: Sequence[int]) -> float:
        args = tuple(torch.ones(shape, dtype=dtype) for shape in shapes)
        data = compile_to_bytes(_Function(function), args, target=plan, precision="fp16" if half else "fp32")
        with Program(data, device) as program:
            return sum(k.seconds for k in program.profile([a.numpy() for a in args], _REPEAT).kernels)

    floor = seconds(lambda x: x + 1, (4,))
    copied = multiplied = 0.0
    for count in _COPIES:
        taken = seconds(lambda x: x + 1, (count,))
        copied = 2 * count * dtype.itemsize / max(taken - floor, floor)  # the largest counts: small ones lie in a cache
        if taken > _ENOUGH:
            break
    for n in _PRODUCTS:
        taken = seconds(torch.matmul, (n, n), (n, n))
        multiplied = 2 * n**3 / max(taken - floor, floor)
        if taken > _ENOUGH:
            break
    return Speed(copied, multiplied, floor)
