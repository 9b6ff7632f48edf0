"""Results share memory with arguments only where they do in eager PyTorch: who changes a result must not change an argument.

The cases are operators at sizes and numbers that make a result equal to the argument, or to a view of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS: dict[tuple[int, ...], dict[str, Callable[[Tensor], Tensor]]] = {
    (): {
        "sum": lambda x: x.sum(()),
    },
    (3,): {
        "cartesian_prod": lambda x: torch.cartesian_prod(x),
        "combinations": lambda x: torch.combinations(x, 1),
        "meshgrid": lambda x: torch.meshgrid(x, indexing="ij")[0],
    },
    (4,): {
        "take": lambda x: x.take(torch.arange(4, device=x.device)),
    },
    (1, 1): {
        "trace": lambda x: x.trace(),
    },
    (1, 4): {
        "roll_one": lambda x: x.roll(1, 0),
        "flip_one": lambda x: x.flip(0),
        "sum": lambda x: x.sum(0),
        "sum, kept": lambda x: x.sum(0, keepdim=True),
        "mean": lambda x: x.mean(0),
        "amax": lambda x: x.amax(0),
        "max": lambda x: x.max(0)[0],
        "prod": lambda x: x.prod(0),
        "cumsum": lambda x: x.cumsum(0),
        "cumprod": lambda x: x.cumprod(0),
        "cummax": lambda x: x.cummax(0)[0],
        "sort": lambda x: x.sort(0)[0],
        "topk": lambda x: x.topk(1, 0)[0],
        "median": lambda x: x.median(0)[0],
        "kthvalue": lambda x: x.kthvalue(1, 0)[0],
        "mode": lambda x: x.mode(0)[0],
        "gather": lambda x: x.gather(0, torch.zeros(1, 4, dtype=torch.long, device=x.device)),
        "contiguous transposed": lambda x: x.t().contiguous(),
        "reshape_t": lambda x: x.t().reshape(-1),
        "softmax": lambda x: x.softmax(0),
        "logsumexp": lambda x: x.logsumexp(0),
        "vector_norm": lambda x: torch.linalg.vector_norm(x, 1, 0),
        "select_scatter": lambda x: x.select_scatter(x[0], 0, 0),
    },
    (2, 4): {
        "glu": lambda x: F.glu(x, 0),
    },
    (3, 1): {
        "einsum sum": lambda x: torch.einsum("ij->i", x),
    },
    (3, 3): {
        "einsum diagonal": lambda x: torch.einsum("ii->i", x),
        "diag": lambda x: x.diag(),
        "diagonal": lambda x: x.diagonal(),
        "matrix_power": lambda x: torch.linalg.matrix_power(x, 1),
        "multi_dot": lambda x: torch.linalg.multi_dot([x, x]),
    },
    (3, 4): {
        "repeat": lambda x: x.repeat(1, 1),
        "tile": lambda x: x.tile(1, 1),
        "repeat_interleave": lambda x: x.repeat_interleave(1, 0),
        "pad": lambda x: F.pad(x, (0, 0)),
        "roll": lambda x: x.roll(0, 0),
        "rot90_0": lambda x: x.rot90(0),
        "cat": lambda x: torch.cat([x]),
        "cat_empty": lambda x: torch.cat([x, x[:0]]),
        "stack": lambda x: torch.stack([x]),
        "hstack": lambda x: torch.hstack([x]),
        "add": lambda x: x + 0,
        "mul": lambda x: x * 1,
        "div": lambda x: x / 1,
        "pow": lambda x: x**1,
        "sub": lambda x: x - 0,
        "index_select": lambda x: x.index_select(0, torch.arange(3, device=x.device)),
        "index_none": lambda x: x[[0, 1, 2]],
        "tril": lambda x: x.tril(9),
        "triu": lambda x: x.triu(-9),
        "where": lambda x: torch.where(torch.ones((), dtype=torch.bool, device=x.device), x, x),
        "dropout_eval": lambda x: F.dropout(x, 0.5, False),
        "dropout_0": lambda x: F.dropout(x, 0.0, True),
        "alpha_dropout": lambda x: F.alpha_dropout(x, 0.0, True),
        "tensor_unfold": lambda x: x.unfold(0, 2, 1),
        "to_copy": lambda x: x.to(torch.float32, copy=True),
        "to_same": lambda x: x.to(torch.float32),
        "float": lambda x: x.float(),
        "contiguous": lambda x: x.contiguous(),
        "clone": lambda x: x.clone(),
        "positive": lambda x: +x,
        "real": lambda x: x.real,
        "conj": lambda x: x.conj(),
        "resolve_conj": lambda x: x.resolve_conj(),
        "negated twice": lambda x: torch.neg(-x),
        "maximum": lambda x: torch.maximum(x, x),
        "minimum": lambda x: torch.minimum(x, x),
        "reshape": lambda x: x.reshape(4, 3),
        "flatten": lambda x: x.flatten(),
        "ravel": lambda x: x.ravel(),
        "unsqueeze": lambda x: x[None],
        "einsum": lambda x: torch.einsum("ij->ji", x),
        "block_diag": lambda x: torch.block_diag(x),
        "broadcast": lambda x: torch.broadcast_to(x, (3, 4)),
        "expand": lambda x: x.expand(2, 3, 4),
        "expand_copy": lambda x: torch.expand_copy(x, (3, 4)),
        "view_copy": lambda x: torch.view_copy(x, (12,)),
        "permute_copy": lambda x: torch.permute_copy(x, (1, 0)),
        "t_copy": lambda x: torch.t_copy(x),
        "narrow_copy": lambda x: torch.narrow_copy(x, 0, 0, 3),
        "unbind": lambda x: x.unbind(0)[0],
        "masked_fill": lambda x: x.masked_fill(torch.zeros(3, 4, dtype=torch.bool, device=x.device), 1.0),
        "clamp_none": lambda x: x.clamp(min=-9),
        "hardtanh": lambda x: F.hardtanh(x, -9, 9),
        "threshold": lambda x: F.threshold(x, -9, 0),
        "leaky_relu": lambda x: F.leaky_relu(x, 1.0),
        "renorm": lambda x: x.renorm(2, 0, 1e9),
        "nan_to_num": lambda x: x.nan_to_num(),
        "lerp": lambda x: torch.lerp(x, x, 0.0),
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0),
        "chunk": lambda x: x.chunk(1)[0],
        "diff": lambda x: x.diff(n=0),
        "embedding": lambda x: F.embedding(torch.arange(3, device=x.device), x),
        "round": lambda x: x.round(decimals=0),
        "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x)[1],
        "atleast_2d": lambda x: torch.atleast_2d(x),
        "movedim": lambda x: x.movedim(0, 0),
        "index_put": lambda x: x.index_put((torch.zeros(1, dtype=torch.long, device=x.device),), x[0]),
        "index_add": lambda x: x.index_add(0, torch.zeros(0, dtype=torch.long, device=x.device), x[:0]),
        "slice_scatter": lambda x: x.slice_scatter(x[:0], 0, 0, 0),
        "as_strided_scatter": lambda x: x.as_strided_scatter(x, (3, 4), (4, 1)),
    },
    (1, 2, 3): {
        "batch_norm": lambda x: F.batch_norm(x, x.new_zeros(2), x.new_ones(2), eps=0.0),
    },
    (1, 2, 12): {
        "fold": lambda x: F.fold(x, (3, 4), 1),
    },
    (1, 2, 1, 1): {
        "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
        "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 1),
        "clone channels_last": lambda x: x.clone(memory_format=torch.channels_last),
        "contiguous channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    },
    (1, 2, 3, 4): {
        "nearest": lambda x: F.interpolate(x, size=(3, 4)),
        "bilinear": lambda x: F.interpolate(x, size=(3, 4), mode="bilinear"),
        "avg_pool": lambda x: F.avg_pool2d(x, 1),
        "max_pool": lambda x: F.max_pool2d(x, 1),
        "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
        "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
        "unfold": lambda x: F.unfold(x, 1),
    },
    (1, 4, 1, 1): {
        "pixel_shuffle2": lambda x: F.pixel_shuffle(x, 2),
    },
    (1, 4, 2, 2): {
        "pixel_shuffle1": lambda x: F.pixel_shuffle(x, 1),
        "pixel_unshuffle1": lambda x: F.pixel_unshuffle(x, 1),
    },
}
INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "round": torch.round,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "abs": torch.abs,
    "or": lambda x: x | x,
    "and": lambda x: x & x,
    "xor": lambda x: x ^ 0,
    "shift": lambda x: x << 0,
    "multiply": lambda x: x * 1,
    "add": lambda x: x + 0,
    "divide": lambda x: x // 1,
    "relu": F.relu,
    "long": lambda x: x.long(),
    "conj": torch.conj_physical,
    "positive": lambda x: +x,
    "nan_to_num": torch.nan_to_num,
    "clone": torch.clone,
}


def shared(result: Tensor, given: Tensor) -> bool:
    return result.untyped_storage()._cdata == given.untyped_storage()._cdata


@pytest.mark.parametrize("device", ["cpu", "vulkan"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("shape", FLOATS, ids=str)
def test_floats(shape: tuple[int, ...], gradients: bool, device: str) -> None:
    torch.manual_seed(0)
    check(FLOATS[shape], torch.rand(shape, device=device).requires_grad_(gradients))


@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_integers(device: str) -> None:
    check(INTEGERS, torch.arange(-5, 7, device=device))


def check(functions: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> None:
    eager = {name: f(x) for name, f in functions.items()}
    on_cpu = {name: f(y) for y in [x.detach().cpu().requires_grad_(x.requires_grad)] for name, f in functions.items()}
    by_torch = {name for name, f in functions.items() for y in [x.detach().cpu()] if shared(f(y), y)}
    compiled = torch.compile(lambda x: {name: f(x) for name, f in functions.items()}, backend="vulkan")(x)
    for results in (eager, compiled):
        assert {name for name, result in results.items() if shared(result, x)} <= by_torch
        for name, result in results.items():
            torch.testing.assert_close(result.cpu(), on_cpu[name], msg=lambda text, name=name: f"{name}: {text}")
