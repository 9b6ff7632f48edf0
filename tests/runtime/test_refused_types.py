"""Calls that torch refuses for their operands' types or for a number: refused by the device, too, in torch's words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def first_of(x: Tensor) -> Tensor:
    """The index of the first element."""
    return torch.tensor([0], device=x.device)


def factor(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y, alpha=0.5)


MATRIX, IMAGE = torch.ones(2, 2), torch.ones(1, 2, 2)
MIXED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "integers times floats": (torch.matmul, (MATRIX.int(), MATRIX * 1.5)),
    "floats times halves": (torch.matmul, (MATRIX, MATRIX.half())),
    "integers times bools": (torch.matmul, (MATRIX.long(), MATRIX.bool())),
    "a vector": (torch.mv, (MATRIX, MATRIX[0].half())),
    "batches": (torch.bmm, (IMAGE, IMAGE.half())),
    "an offset": (torch.addmm, (MATRIX[0], MATRIX.half(), MATRIX.half())),
    "a layer of integers": (F.linear, (MATRIX.long(), MATRIX, MATRIX[0])),
    "a convolution": (F.conv1d, (IMAGE, IMAGE.half())),
    "a bias": (F.conv1d, (IMAGE, IMAGE, MATRIX[0].half())),
    "an addition at places": (lambda x, y: x.index_add(0, first_of(x), y), (MATRIX[0], MATRIX[0, :1].half())),
    "a product that is stored": (lambda x, y: torch.mm(x, x, out=y), (MATRIX, MATRIX.half())),
    "a copy at places": (lambda x, y: x.index_copy(0, first_of(x), y), (MATRIX[0], MATRIX[0, :1].half())),
    "indices": (lambda x, y: x.index_select(0, y), (MATRIX, MATRIX[0].short())),
    "targets that are bools": (F.binary_cross_entropy, (MATRIX * 0.5, MATRIX.bool())),
    "targets that are integers": (F.binary_cross_entropy, (MATRIX * 0.5, MATRIX.long())),
    "parameters of a norm": (lambda x, y: F.layer_norm(x, (2,), y), (MATRIX, MATRIX[0].half())),
    "bool - bool": (torch.sub, (MATRIX.bool(), MATRIX.bool())),
    "integer - bool": (torch.sub, (MATRIX.long(), MATRIX.bool())),
    "1 - bool": (lambda x: 1 - x, (MATRIX.bool(),)),
    "an integer times a float": (factor, (MATRIX.long(), MATRIX.long())),
    "fmod of bools": (torch.fmod, (MATRIX.bool(), MATRIX.bool())),
    "gcd of floats": (torch.gcd, (MATRIX, MATRIX.long())),
    "hypot of integers": (torch.hypot, (MATRIX.long(), MATRIX.bool())),
    "smooth_l1_loss of integers": (F.smooth_l1_loss, (MATRIX.long(), MATRIX.bool())),
    "huber_loss of integers": (F.huber_loss, (MATRIX.long(), MATRIX)),
    "division of integers by 0": (lambda x: x // 0, (MATRIX.long(),)),
    "a write at places": (lambda x, y: x.index_put((first_of(x),), y), (MATRIX[0], MATRIX[0, :1].half())),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: F.log_softmax(x, 0), "var": torch.var, "std": torch.std,
    "var_mean": torch.var_mean, "std_mean": torch.std_mean, "gelu": F.gelu, "silu": F.silu, "softplus": F.softplus,
    "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "mish": F.mish, "logcumsumexp": lambda x: x.logcumsumexp(0),
    "lerp": lambda x: x.lerp(x, 0.5), "frac": torch.frac, "hardshrink": F.hardshrink, "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid, "glu": lambda x: F.glu(x.reshape(3, 1).expand(3, 2)), "bernoulli": torch.bernoulli,
    "multinomial": lambda x: x.multinomial(1), "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.reshape(1, 1, 3), 1),
}  # fmt: skip
BOOLS: dict[str, Callable[[Tensor], Any]] = {
    "abs": torch.abs, "relu": torch.relu, "relu_": lambda x: x.relu_(), "floor": torch.floor, "round": torch.round,
    "argmax": torch.argmax, "argmin": torch.argmin, "median": torch.median, "nanmedian": torch.nanmedian,
    "median of a dimension": lambda x: x.median(0),
    "topk": lambda x: x.topk(1), "kthvalue": lambda x: x.kthvalue(1), "trace": lambda x: x.reshape(1, 3).trace(),
    "max_pool2d": lambda x: F.max_pool2d(x.reshape(1, 1, 3), 1),
}  # fmt: skip
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "bernoulli_": lambda x: x.bernoulli_(2.0), "bernoulli": lambda x: torch.bernoulli(x, -0.5),
    "normal_": lambda x: x.normal_(0, -1),
    "normal": lambda x: torch.normal(0.0, -1.0, (2,), device=x.device), "uniform_": lambda x: x.uniform_(2, 1),
    "native_dropout": lambda x: torch.native_dropout(x, 2.0, True), "random_": lambda x: x.byte().random_(0, 1000),
    "randint": lambda x: torch.randint(1000, (2,), dtype=torch.uint8, device=x.device), "histc": lambda x: x.histc(4, 0, torch.inf),
    "randint_like": lambda x: torch.randint_like(x.byte(), 1000), "multinomial": lambda x: x.multinomial(0),
    "randperm": lambda x: torch.randperm(-1, device=x.device),
    "randperm of bytes": lambda x: torch.randperm(300, dtype=torch.uint8, device=x.device),
    "rand": lambda x: torch.rand(2, dtype=torch.int64, device=x.device),
    "conv1d": lambda x: F.conv1d(x[None], x[None, None], stride=0),
    "empty": lambda x: torch.empty(-1, device=x.device), "ones": lambda x: torch.ones(2, -1, device=x.device),
    "as_strided": lambda x: x.as_strided((2,), (-1,)), "as_strided, offset": lambda x: x.as_strided((1,), (1,), -1),
}  # fmt: skip
CASES = {
    **MIXED,
    **{f"{name} of {kind}": (f, (torch.ones(3).to(kind),)) for name, f in FUNCTIONS.items() for kind in (torch.int64, torch.uint8)},
    **{f"{name} of bools": (f, (torch.ones(3).bool(),)) for name, f in BOOLS.items()},
    **{f"the number of {name}": (f, (torch.ones(3),)) for name, f in NUMBERS.items()},
}  # fmt: skip


def error_of(f: Callable[..., Any], given: tuple[Tensor, ...]) -> str:
    with pytest.raises((RuntimeError, NotImplementedError, IndexError)) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the call ran on the CPU
        f(*given)
    return str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_on_the_device(name: str) -> None:
    f, given = CASES[name]
    assert error_of(f, tuple(x.to("vulkan") for x in given)) == error_of(f, given)


def test_types_that_are_asked_for() -> None:
    x = torch.tensor([1, 2, 3])
    torch.testing.assert_close(x.to("vulkan").softmax(0, dtype=torch.float32).cpu(), x.softmax(0, dtype=torch.float32))
    torch.testing.assert_close(x.to("vulkan").bool().float().var().cpu(), x.bool().float().var())


TAKEN: dict[str, Callable[[str], Any]] = {
    "bernoulli_ of bools": lambda d: torch.zeros(3, dtype=torch.bool, device=d).bernoulli_(1.0),
    "a norm of halves": lambda d: F.layer_norm(MATRIX.half().to(d), (2,), MATRIX[0].to(d)),
    "a float of integers": lambda d: MATRIX.long().to(d) - 2.5,
    "a power of bools": lambda d: MATRIX.bool().to(d) ** 2,
    "the last integers": lambda d: torch.randint(127, 128, (2,), dtype=torch.int8, device=d),
    "all bytes": lambda d: torch.randperm(256, dtype=torch.uint8, device=d).sort().values,
    "a float by 0": lambda d: MATRIX.to(d) / 0,
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_torch_takes_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPILLI_STRICT", "1")
    torch.testing.assert_close(TAKEN[name]("vulkan").cpu(), TAKEN[name]("cpu"))
