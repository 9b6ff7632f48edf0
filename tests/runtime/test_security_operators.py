"""The list of operators that files may call, against what torch's own operator tests call: nothing useful is refused by mistake."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import opinfo
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lapilli import InvalidInputError, LapilliError
from lapilli.runtime import host
from lapilli.runtime.host import Form

CONSTANTS = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format", torch.device: "device"}


def form(value: Any) -> Form:
    """What the checker knows of an argument, as the compiler would write it into a script."""
    if isinstance(value, torch.Tensor):
        return Form("value", "tensor")
    if isinstance(value, list | tuple):
        return Form("list", parts=tuple(map(form, value)))
    for type_, tag in CONSTANTS.items():
        if isinstance(value, type_):
            return Form(tag)
    return Form("none") if value is None else Form("literal", literal=value)


class Calls(TorchDispatchMode):
    """Every call of an operator, and what the checker says of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: set[str] = set()
        self.refused: dict[str, str] = {}
        self.mismatched: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = f"{func._schema.name.replace('::', '.')}.{func._schema.overload_name or 'default'}"
        sparse = any(isinstance(a, torch.Tensor) and a.layout is not torch.strided for a in args)
        if not func._schema.is_mutable and not sparse:
            try:
                host.overload(name, torch, host.LISTED)
            except LapilliError as error:
                self.refused[name] = str(error)
            else:
                self.listed.add(name)
                try:
                    host.check_arguments(
                        func._schema, list(map(form, args)), {k: form(v) for k, v in (kwargs or {}).items()}, False
                    )
                    host.check_call(func, [*args], kwargs or {}, None, torch)
                except (host.Mismatch, LapilliError) as error:
                    self.mismatched[name] = f"{error}: {str(args)[:200]} {kwargs}"
        return func(*args, **(kwargs or {}))


def samples(op: Any) -> Iterator[Any]:
    dtypes = op.supported_dtypes("cpu")
    for dtype in (torch.float32, torch.int64, torch.complex64):
        if dtype in dtypes:
            yield from islice(opinfo.samples(op, dtype), 3)
            return


EXPECTED = (
    "_backward",
    "_to_sparse",
    "_ctc_loss",
    "segment_reduce",
    "lu_solve",
    "ldl_solve",
    "_chunk_cat",
    "torch_nn.",
)
"""Parts of the names of operators that are not on the list, for the reasons in `runtime/host.py`."""


def called() -> Calls:
    """By three samples of every entry of op_db."""
    calls = Calls()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in (op for op in opinfo.database() if not op.name.startswith("jiterator")):  # those are CUDA's
            for sample in samples(op):
                with calls:
                    try:
                        op(sample.input, *sample.args, **sample.kwargs)
                    except (RuntimeError, NotImplementedError, ValueError, TypeError):
                        continue
    return calls


def test_what_torchs_own_tests_call_is_accepted() -> None:
    torch.manual_seed(0)
    with ThreadPoolExecutor(1) as thread:  # torch's samples look at the whole stack of callers, and pytest's is deep
        calls = thread.submit(called).result()
    assert not calls.mismatched, calls.mismatched
    left = sorted(name for name in calls.refused if not any(part in name for part in EXPECTED))
    assert not left and len(calls.listed) > 400, (len(calls.listed), left)


@pytest.mark.parametrize(
    ("name", "args"),
    [("aten._fft_c2r.default", [torch.ones(2, 3, dtype=torch.complex64), [1], 0, 1 << 20]),
     ("aten._fft_c2r.default", [torch.ones(2, 3, dtype=torch.complex64), [1], 0, 0]),
     ("aten._fft_r2c.default", [torch.ones(2, 3), [5], 0, True]), ("aten._fft_r2c.default", [torch.ones(2, 3), [-1], 0, True]),
     ("aten._fft_c2c.default", [torch.ones(2, 3, dtype=torch.complex64), [1, 1], 0, True]),
     ("aten.native_group_norm.default", [torch.ones(2, 4, 3), None, None, 2, 4, 3000, 2, 1e-5]),
     ("aten.native_group_norm.default", [torch.ones(2, 4, 3), torch.ones(2), None, 2, 4, 3, 2, 1e-5]),
     ("aten.native_group_norm.default", [torch.ones(2, 4, 3), None, None, -2, -4, 3, 2, 1e-5]),
     ("aten.native_group_norm.default", [torch.ones(2, 4, 3), None, None, 2, 4, 3, 0, 1e-5])],
)  # fmt: skip
def test_sizes_beside_a_tensor_are_not_believed(name: str, args: list[Any]) -> None:
    """What torch's own callers of an operator make sure of."""
    with pytest.raises(InvalidInputError, match="does not fit|has the axes"):
        host.check_call(host.overload(name, torch, host.LISTED), args, {}, None, torch)
