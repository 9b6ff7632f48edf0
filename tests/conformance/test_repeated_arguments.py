"""Equal calls are decomposed once, whatever values they are of: of one value twice, of two, in either order."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import binary_ufuncs

import lapilli

Binary = Callable[[Tensor, Tensor], Tensor]


def binaries(a: Tensor, b: Tensor) -> dict[str, Binary]:
    """torch's operators of two tensors that take these, but for their references in Python."""
    found = {}
    for info in (x for x in binary_ufuncs if not x.name.startswith("_refs")):
        try:
            if isinstance(info.op(a, b), Tensor):
                found[info.name] = info.op
        except (AssertionError, RuntimeError, TypeError):  # jiterator: CUDA only
            pass
    return found


class Calls(nn.Module):
    def __init__(self, f: Binary) -> None:
        super().__init__()
        self.f = f

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        c = b.flip(0)  # a value of the same form that is computed
        return tuple(self.f(x, y) for x, y in ((a, a), (a, b), (c, c), (b, a), (c, a), (b, b)))


class All(nn.Module):
    def __init__(self, functions: dict[str, Binary]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(Calls(f) for f in functions.values())

    def forward(self, a: Tensor, b: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        return tuple(call(a, b) for call in self.calls)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float32], ids=str)
def test_equal_calls_of_other_values(dtype: torch.dtype) -> None:
    a, b = torch.tensor([6, 1, 3, 2, 9]).to(dtype), torch.tensor([4, 1, 7, 5, 2]).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functions = binaries(a, b)
        assert len(functions) > 20
        model = All(functions)
        got = lapilli.compile(model, (a, b))(a, b)
        for name, ours, theirs in zip(functions, got, model(a, b), strict=True):
            for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
                assert_close(x, y, equal_nan=True, msg=lambda m, name=name, k=k: f"{name}, call {k}: {m}")
