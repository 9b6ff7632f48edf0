"""Random shapes of language models, scheduled for every plan: whatever a head's size, the cache, the number of sequences and the
weights are, each method has kernels, and no large product or attention is left to the generic one. Nothing runs.

    python tests/support/random_decoders.py [--seconds 60] [--seed 0]
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import random_cases
import torch
from quantized_tokens import weights

from lapilli import compiler
from lapilli.codegen.build import Builder
from lapilli.codegen.select import schedule_of
from lapilli.compiler import compile_to_bytes
from lapilli.ir.integer import product
from lapilli.ir.node import Attention, Convolution, Matmul
from lapilli.llm.decoder import Decoder, Shape, Weight
from lapilli.llm.token_methods import methods
from lapilli.schedule.layout import estimate
from lapilli.schedule.plan import Schedule

_LARGE = 1 << 20
"""Results of a contraction times its terms, from which on the generic kernel is a cliff."""


@dataclass(frozen=True)
class Case:
    """block: codes of a scale, 0 for weights of floats; offsets: whether codes have some. sequences: of the cache."""

    shape: Shape
    block: int
    offsets: bool
    context: int
    sequences: int
    precision: str


def case(seed: int) -> Case:
    r = random.Random(seed)
    size, groups, share = (
        r.choice((16, 32, 64, 64, 80, 96, 128, 128, 160, 256)),
        r.choice((1, 2, 3, 4)),
        r.choice((1, 2, 3, 4, 8)),
    )
    heads, width = groups * share, 64 * r.randint(1, 12)
    shape = Shape(
        r.choice((320, 999, 4096, 32000)), width, r.choice((1, 1, 2)), heads, groups, size, 64 * r.randint(1, 24), 1e-5, 1e4,
        8192, size if r.random() < 0.8 else size // 2, r.choice(("silu", "gelu_tanh")), window=r.choice((None, None, 100)),
    )  # fmt: skip
    context, sequences = r.choice((64, 128, 1000, 1024, 4096)), r.choice((1, 1, 2, 4, 32))
    block = r.choice((0, 32, 64))
    block = block if block and heads * size % block == 0 else 0
    return Case(shape, block, r.random() < 0.5, context, sequences, r.choice(("fp32", "fp16")))


class _Scheduled(Exception):
    """All methods have kernels."""


def check(seed: int, plan: str) -> list[str]:
    """Schedules all methods of a model for all plans; the names of their kernels. Raises whatever went wrong."""
    given = case(seed)
    tensors = weights(given.shape, given.block or 16, given.offsets, given.shape.layers)
    if not given.block:
        tensors = {name: t if isinstance(t, torch.Tensor) else Weight.of(t)() for name, t in tensors.items()}
    cached = torch.float16 if given.precision == "fp16" else torch.float32
    model = Decoder(given.shape, tensors, given.context, cached, given.sequences).eval()
    seen: list[tuple[str, Schedule]] = []

    def scheduled(*arguments: Any) -> Schedule:
        seen.append((arguments[1].name, schedule_of(*arguments)))
        return seen[-1][1]

    def enough(*_: Any) -> None:
        raise _Scheduled

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(compiler, "schedule_of", scheduled)
        patch.setattr(Builder, "add", lambda *_: None)
        patch.setattr(Builder, "finish", enough)
        try:
            compile_to_bytes(methods(model), precision=given.precision, weights=given.precision, fallback="error")
        except _Scheduled:
            pass
        except Exception as error:
            raise AssertionError(f"{given}: {type(error).__name__}: {error}") from error
    names = []
    for target, s in seen:
        for task in s.order.run:
            reduction = task.reduction
            if reduction is None or not isinstance(reduction.contraction, Matmul | Convolution | Attention):
                continue
            terms = estimate(product([a.extent for a in (*reduction.axes, *reduction.raxes)]))
            # Where four buffers are bound, codes, scales and offsets leave no room for rows and results.
            served = task.template is not None or terms < _LARGE or ("few" in target and given.offsets and given.block)
            assert served, f"{given}: {target}: {task.origins} has the generic kernel"
            names.append(type(task.template).__name__)
    return names


if __name__ == "__main__":
    random_cases.main(__doc__, "decoders", ("all plans",), check)
