"""Numbers in the place of tensors on the vulkan device: PyTorch wraps them in C++, and they arrive as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lapilli import autoload
from lapilli.eager import dispatch
from lapilli.eager.dispatch import fallbacks, reset_fallbacks

autoload.register()
aten = torch.ops.aten

ON_CPU = {
    "aten._add_relu.Scalar",
    "aten._add_relu_.Scalar",
    "aten.float_power.Tensor_Scalar",
    "aten.float_power.Scalar",
}
"""An operator of quantised tensors, and one whose results are float64."""
LISTS = ("bucketize", "searchsorted")


def overloads() -> Iterator[torch._ops.OpOverload]:
    """Those that take tensors and numbers, and nothing else that has no default.

    ``dir(aten)`` lists only what somebody has asked for before: the dispatcher knows all.
    """
    names = {n.removeprefix("aten::").split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n[:6] == "aten::"}
    for name in sorted(names):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            types = {str(a.type) for a in given(op)}
            if (
                types == {"Tensor", "number"}
                and (name.endswith("_") or not op._schema.is_mutable)
                and name not in LISTS
            ):
                yield op


def given(op: torch._ops.OpOverload) -> list[torch.Argument]:
    return [a for a in op._schema.arguments if not a.has_default_value()]


def call(op: torch._ops.OpOverload, x: Tensor, number: float) -> Tensor:
    result = op(*(x.clone() if str(a.type) == "Tensor" else number for a in given(op)))
    return result[0] if isinstance(result, tuple | list) else result


@pytest.mark.parametrize("number", [2.5, 2], ids=str)
def test_every_operator_of_tensors_and_numbers(number: float) -> None:
    """Also where one of a Scalar is made of one of a tensor: fmod_, bitwise_and_, copysign_, xlogy_, remainder of a number."""
    x = (
        torch.tensor([0.5, 1.5, 2.5, 0.75])
        if isinstance(number, float)
        else torch.tensor([1, 2, 3, 5], dtype=torch.int32)
    )
    seen = 0
    for op in overloads():
        try:
            expected = call(op, x, number)
        except (RuntimeError, NotImplementedError, IndexError):
            continue
        if not isinstance(expected, Tensor):
            continue
        seen += 1
        reset_fallbacks()
        found = call(op, x.to("vulkan"), number)
        assert found.dtype is expected.dtype, op
        torch.testing.assert_close(
            found.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m, op=op: f"{op}: {m}"
        )
        assert str(op) in ON_CPU or not fallbacks(), op
    assert seen > 40


@pytest.mark.parametrize("number", [1, True, 2.5, -3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16], ids=str)
def test_types_of_results(dtype: torch.dtype, number: float) -> None:
    """A number decides about the type of a result only where it is of another kind than the tensor."""
    x = torch.tensor([1, 0, 3, 7]).to(dtype)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.xlogy(x, number),
        lambda x: torch.xlogy(number, x),
        lambda x: torch.special.xlog1py(x, number),
        lambda x: torch.copysign(x, number),
        lambda x: torch.bitwise_and(number, x),
        lambda x: x.clone().__ior__(number),
        lambda x: torch.remainder(number, x + 1),
        lambda x: x.clone().fmod_(number),
        lambda x: x[1].fmod(number),
        lambda x: torch.bitwise_xor(number, x[2]),
    ]
    for k, f in enumerate(functions):
        try:
            expected = f(x)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        found = f(x.to("vulkan"))
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True, msg=lambda m, k=k: f"{k}: {m}")


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.uint8, -3), (torch.uint8, 300), (torch.int8, -200.0), (torch.int32, 2**33), (torch.int32, 3)],
)
def test_integers_that_do_not_fit_are_refused_as_in_torch(dtype: torch.dtype, number: float) -> None:
    """-3 is 253 as an integer of 8 bits; -3.0, which is what F.pad makes of it, is none."""
    x = torch.tensor([1, 2, 3, 4]).to(dtype)
    mask = torch.tensor([True, False, True, False])
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.pad(x, (1, 1), value=number),
        lambda x: x.masked_fill(mask.to(x.device), number),
        lambda x: x.clone().fill_(number),
        lambda x: x.index_fill(0, torch.tensor([1], device=x.device), float(number)),
        lambda x: torch.full_like(x, number),
        lambda x: x ** -abs(int(number)),
    ]
    for f in functions:
        try:
            expected = f(x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error).splitlines()[0][:30]):
                f(x.to("vulkan")).cpu()
        else:
            torch.testing.assert_close(f(x.to("vulkan")).cpu(), expected)
    assert torch.equal(F.pad(x.to("vulkan"), (0, 1), value=7).cpu(), F.pad(x, (0, 1), value=7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("number", [1e39, -1e39, 70000.0, float("inf"), 2.5], ids=str)
def test_floats_that_do_not_fit_are_refused_as_in_torch(dtype: torch.dtype, number: float) -> None:
    """Where torch converts a number to the type of a kernel; where it makes a tensor of it, an infinity. In calls that were made
    with other numbers before, too."""
    x = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    functions: list[Callable[[Tensor, float], Tensor]] = [
        lambda x, n: x.clamp(max=n),
        lambda x, n: x.clone().clamp_(min=n),
        lambda x, n: x.masked_fill(x > 0, n),
        lambda x, n: torch.add(x, x, alpha=n),
        lambda x, n: torch.addcmul(x, x, x, value=n),
        lambda x, n: F.pad(x, (1, 1), value=n),
        lambda x, n: F.leaky_relu(x, n),
        lambda x, n: F.hardtanh(x, -abs(n), abs(n)),
        lambda x, n: F.threshold(x, 1.5, n),
        lambda x, n: torch.lerp(x, -x, n),
        lambda x, n: x.index_fill(0, torch.tensor([1], device=x.device), n),
        lambda x, n: torch.full((3,), n, dtype=dtype, device=x.device),
        lambda x, n: x.new_full((1,), n),
        lambda x, n: x.clone().fill_(n),
        lambda x, n: x.clone().uniform_(-abs(n), abs(n)) * 0,
        lambda x, n: torch.where(x > 0, x, n),
        lambda x, n: x + n,
        lambda x, n: x / n,
        lambda x, n: x < n,
        lambda x, n: x.clone().__setitem__(0, n) or x,  # type: ignore[func-returns-value]
    ]
    for k, f in enumerate(functions):
        f(x.to("vulkan"), 0.75)
        try:
            expected = f(x, number)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error).splitlines()[0][:40]):
                f(x.to("vulkan"), number).cpu()
        else:
            found = f(x.to("vulkan"), number)
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found.cpu(), expected, equal_nan=True, msg=lambda m, k=k: f"{k}: {m}")


@pytest.mark.parametrize("number", [True, False, 1, 0], ids=str)
def test_powers_of_bools(number: float) -> None:
    x = torch.tensor([True, False])
    assert torch.equal((x.to("vulkan") ** number).cpu(), x**number)
    assert (x.to("vulkan") ** number).dtype is (x**number).dtype


SIGNED: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "mul": lambda x, s: x * s,
    "copysign": torch.copysign,
    "div": lambda x, s: x / s,
    "floor divide": lambda x, s: x // s,
    "full": lambda x, s: torch.full((3,), s, device=x.device),
    "full like": torch.full_like,
    "fill": lambda x, s: x.clone().fill_(s),
    "fill some": lambda x, s: x.repeat(2)[::2].fill_(s),
    "fill halves": lambda x, s: x.half().fill_(s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "clamp": lambda x, s: x.clamp(min=s),
    "masked fill": lambda x, s: x.masked_fill(x > 0, s),
    "pad": lambda x, s: torch.nn.functional.pad(x, (1, 1), value=s),
    "add": lambda x, s: x * 0 + s,
    "complex": lambda x, s: torch.view_as_real(torch.full((3,), complex(1, s), device=x.device)),
}


@pytest.mark.parametrize("name", SIGNED)
def test_zeros_of_both_signs(name: str) -> None:
    """They are equal, but no call may take the program of the other."""
    x = torch.tensor([1.0, -2.0, 0.0])
    for number in (0.0, -0.0, 0.0):
        want, found = SIGNED[name](x, number), SIGNED[name](x.to("vulkan"), number).cpu()
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit() | found.isnan(), want.signbit() | want.isnan())


def test_calls_with_nan_are_known() -> None:
    """NaN is not equal to itself: each call would get a launch of its own."""
    x = torch.rand(3, device="vulkan")
    operator = dispatch._all
    for _ in range(3):
        torch.nn.functional.pad(x, (1, 1), value=float("nan"))
    before = sum(len(o.launches) for o in operator)
    for _ in range(3):
        torch.nn.functional.pad(x, (1, 1), value=float("nan"))
    assert sum(len(o.launches) for o in operator) == before
