"""Constants that are stored in 16 bits only where these hold their numbers, and how language models choose the type."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lapilli.compiler import collected
from lapilli.errors import CompileError
from lapilli.ir.dtype import DType
from lapilli.ir.node import Constant
from lapilli.llm.blocks import BlockedMatrix
from lapilli.llm.from_source import kept

SHORT = {"fp16-exact": torch.float16, "bf16-exact": torch.bfloat16}


class Reads(nn.Module):
    """Matrices as constants, and one number for each of a row."""

    def __init__(self, **values: torch.Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.linear(x, value) if value.dim() == 2 else x * value for value in self.buffers()], -1)


def stored(weights: str, **values: torch.Tensor) -> dict[str, DType]:
    compiler = collected(Reads(**values), (torch.randn(2, 8),), target="any-fp32", weights=weights)
    (method,) = compiler.methods
    graph = next(iter(method.graphs.values()))
    return {n.name.removeprefix("b_"): n.dtype for n in graph.nodes() if isinstance(n, Constant)}


@pytest.mark.parametrize("weights", SHORT)
def test_what_16_bits_hold(weights: str) -> None:
    """Infinities, zeros and numbers below the least normal one are held as well as others; NaN is not compared."""
    torch.manual_seed(0)
    short = SHORT[weights]
    held = torch.randn(16, 8).to(short).float()
    edges = held.clone()
    edges[0, :6] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 2.0**-24, 1 + torch.finfo(short).eps])
    beyond, nan = held.clone(), held.clone()
    beyond[3, 5] = 1 + torch.finfo(short).eps / 2
    nan[2, 2] = torch.nan
    found = stored(weights, held=held, part=held[4:12], edges=edges, beyond=beyond, nan=nan, row=held[0])
    kept_as = DType.float16 if short is torch.float16 else DType.bfloat16
    assert found.pop("held") is found.pop("part") is found.pop("edges") is kept_as
    assert found == {"beyond": DType.float32, "nan": DType.float32, "row": DType.float32}


def test_numbers_of_one_type_are_not_those_of_the_other() -> None:
    """2^-60 is a bfloat16, 1 + 2^-10 a float16."""
    small, fine = torch.full((4, 8), 2.0**-60), torch.full((4, 8), 1 + 2.0**-10)
    assert stored("fp16-exact", small=small, fine=fine) == {"small": DType.float32, "fine": DType.float16}
    assert stored("bf16-exact", small=small, fine=fine) == {"small": DType.bfloat16, "fine": DType.float32}


def test_rounded_storage_is_another_thing() -> None:
    assert stored("fp16", x=torch.full((4, 8), 1 / 3)) == {"x": DType.float16}


HALF, BRAIN, FULL = (torch.ones(64, 32, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float32))


@pytest.mark.parametrize(
    "given, precision, quantize, weights, words",
    [
        ([FULL], "fp32", None, "fp32", ()),
        ([HALF, FULL], "fp32", None, "fp16-exact", ()),
        ([BRAIN, FULL], "fp32", None, "bf16-exact", ()),
        ([BRAIN, BRAIN, HALF], "fp32", None, "bf16-exact", ("float16 are kept as float32",)),
        ([HALF, BRAIN, HALF], "fp32", None, "fp16-exact", ("bfloat16 are kept as float32",)),
        ([FULL, BRAIN[0]], "fp32", None, "fp32", ()),
        ([BRAIN, HALF], "fp16", None, "fp16", ()),
        ([BRAIN, HALF], "fp32", "int4", "fp32", ()),
    ],
)
def test_the_type_that_most_weights_have(
    given: list[torch.Tensor], precision: str, quantize: str | None, weights: str, words: tuple[str, ...]
) -> None:
    said: list[str] = []
    tensors = {f"w{k}": value for k, value in enumerate(given)}
    found, made = kept(tensors, precision, quantize, ["first"], said.append)  # type: ignore[arg-type]
    assert found == weights
    assert (
        said[0] == "first" and len(said) == 1 + len(words) and all(w in s for w, s in zip(words, said[1:], strict=True))
    )
    assert all(isinstance(v, BlockedMatrix) if quantize else v.dtype is torch.float32 for v in made.values())


def test_what_weights_are_quantized_to() -> None:
    with pytest.raises(CompileError, match='quantize is \'int3\': choose "int8", "int4" or None'):
        kept({}, "fp32", "int3", (), print)  # type: ignore[arg-type]
