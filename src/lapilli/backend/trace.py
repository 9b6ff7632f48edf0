"""AOTAutograd, with the operators that Lapilli has whole kept whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.export import exported_program
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapilli.graph.decompose import tables
from lapilli.lower import registry

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Any]


def compile_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], forward: Compiler, backward: Compiler, inference: Compiler
) -> Callable[..., Any]:
    """What torch.compile asks of a backend. Which of the compilers gets a graph depends on whether gradients are recorded.

    Without gradients, composite operators (linear, attention, norms) are kept; with them, torch's formulas are of the smaller
    operators that composite ones are made of, and attention is matrix products and a softmax."""
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        decompositions=dict(tables()[0]),
        partition_fn=min_cut_rematerialization_partition,
    )
    with sdpa_kernel(SDPBackend.MATH) if _records_gradients(inputs) else _whole_operators():
        made: Callable[..., Any] = backend(gm, inputs)
        return made


def _records_gradients(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


@contextmanager
def _whole_operators() -> Iterator[None]:
    kept: Any = exported_program._special_op_to_preserve_cia  # type: ignore[attr-defined]
    with exported_program._override_composite_implicit_decomp(dict.fromkeys(_composite_operators(), kept)):
        yield


@lru_cache(maxsize=1)
def _composite_operators() -> tuple[Any, ...]:
    return tuple(o for o in _collect_all_valid_cia_ops_for_aten_namespace() if registry.is_supported(o))
