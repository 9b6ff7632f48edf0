"""Programs called with tensors of the device "vulkan": what comes out is there, and nothing goes to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import lapilli
from lapilli.eager import storage
from lapilli.errors import InvalidInputError
from lapilli.export import to_vulkan


class Net(nn.Module):
    """Several inputs and outputs, nested, an integer among them; channels last inside."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, image: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        seen = self.convolution(image).relu()
        return {"seen": seen, "scores": (self.linear(seen.mean((2, 3))) * more["scale"], more["ids"] + 1)}


def inputs(batch: int, height: int) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(batch)
    return (
        torch.randn(batch, 3, height, 6, generator=random),
        {"scale": torch.randn(batch, 1, generator=random), "ids": torch.arange(batch)},
    )


def on(device: str, args: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, args)


def compiled(model: nn.Module, args: Any, **options: Any) -> lapilli.Program:
    with torch.no_grad():
        return lapilli.compile(model.eval(), args, **options)


def test_results_are_on_the_device_and_right() -> None:
    model = Net()
    batch, height = Dim("batch", min=1, max=64), Dim("height", min=3, max=64)
    shapes = ({0: batch, 2: height}, {"scale": {0: batch}, "ids": {0: batch}})
    program = compiled(model, inputs(2, 5), dynamic_shapes=shapes)
    for sizes in ((2, 5), (1, 3), (7, 11)):
        args = inputs(*sizes)
        wanted = program(*args)
        found = program(*on("vulkan", args))
        for got, want in zip(
            torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True
        ):
            assert got.device.type == "vulkan"
            assert got.shape == want.shape
            assert torch.equal(got.cpu(), want)


def test_nothing_is_copied(monkeypatch: Any) -> None:
    program = compiled(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), (torch.randn(5, 4),))
    x = torch.randn(5, 4)
    there = x.to("vulkan")

    def refused(*args: Any) -> Any:
        raise AssertionError("a tensor was copied to or from the device")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "to_cpu", refused)
        patched.setattr(storage, "from_cpu", refused)
        found = program(program(there).repeat(1, 2)[:, :4])
    assert torch.equal(found.cpu(), program(program(x).repeat(1, 2)[:, :4].contiguous()))


@pytest.mark.parametrize(
    "view", [lambda x: x.mT, lambda x: x[1:], lambda x: x[:, ::2], lambda x: x[:1].expand(6, 6), lambda x: x.flip(0)],
    ids=["transposed", "offset", "steps", "expanded", "flipped"],
)  # fmt: skip
def test_layouts(view: Any) -> None:
    x = torch.randn(6, 6)
    model = nn.Softmax(1)
    program = compiled(model, (view(x).contiguous(),))
    assert torch.equal(program(view(x.to("vulkan"))).cpu(), program(view(x).contiguous()))


def test_states_and_inputs_that_change() -> None:
    """Runs of the host and of the device take place in their order."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1  # type: ignore[assignment]
            x.mul_(2)
            return x + self.count

    program = compiled(Counting(), (torch.ones(3),))
    there, here = torch.ones(3, device="vulkan"), torch.ones(3)
    assert program(there).tolist() == [3.0] * 3
    assert program(here).tolist() == [4.0] * 3
    assert program(there).tolist() == [7.0] * 3
    assert there.tolist() == [4.0] * 3
    assert here.tolist() == [2.0] * 3
    assert program.state()["count"].tolist() == [3.0] * 3
    program.reset()
    assert program(there).tolist() == [9.0] * 3


def test_several_segments() -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.linalg.svdvals(x @ x) * n

    x = torch.randn(20, 20)
    program = compiled(Parts(), (x, 3))
    found = program(x.to("vulkan"), 3)
    assert found.device.type == "vulkan"
    torch.testing.assert_close(found.cpu(), program(x, 3))


def test_empty_and_scalar() -> None:
    program = compiled(nn.Identity(), (torch.zeros(0, 3),))
    assert program(torch.zeros(0, 3, device="vulkan")).shape == (0, 3)

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    assert compiled(Sum(), (torch.zeros(4),))(torch.ones(4, device="vulkan")).item() == 4


def test_large_integers() -> None:
    """Who cannot compute with them says so, as with tensors of the host."""

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    program = compiled(Twice(), (torch.arange(3),))
    for x in (torch.tensor([1, 2, 2**40]), torch.tensor([1, 2, 2**31 - 1])):
        with pytest.raises(lapilli.LapilliError) as there:
            program(x.to("vulkan"))
        with pytest.raises(lapilli.LapilliError) as here:
            program(x)
        assert type(there.value) is type(here.value)
        assert str(there.value) == str(here.value)


def test_what_does_not_fit_is_refused() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    n = Dim("n", min=2, max=9)
    program = compiled(Add(), (torch.zeros(4, 3), torch.zeros(4, 3)), dynamic_shapes=({0: n}, {0: n}))
    x = torch.zeros(4, 3, device="vulkan")
    wrong: list[tuple[Any, str]] = [
        ((x, x.cpu()), "is on cpu, and others on the device; give it there too"),
        ((x, x.cpu().numpy()), "was given as ndarray"),
        ((x, x.int()), r"Input .*y.* was given as torch.int32\[4, 3\]"),
        ((x, x[0]), r"was given as torch.float32\[3\]"),
        ((x, x[:3]), r"was given as torch.float32\[3, 3\] \(and the inputs say n = 4\)"),
        ((x[:, :2], x[:, :2]), r"Input .*x.* was given as torch.float32\[4, 2\]"),
        ((x[:1], x[:1]), "1"),
        ((x.repeat(4, 1), x.repeat(4, 1)), "16"),
    ]
    for args, message in wrong:
        with pytest.raises(InvalidInputError, match=message):
            program(*args)
    for call in (program.submit, program.bind):
        with pytest.raises(InvalidInputError, match="give a tensor on the CPU"):
            call(x, x)
    program.close()
    with pytest.raises(InvalidInputError, match="closed"):
        program(x, x)


def test_an_input_has_the_name_of_its_argument() -> None:
    """torch.export calls an argument `input` input_1. Calls with tensors of the device and of the host say the same."""
    x = torch.rand(2, 3)
    program = compiled(torch.nn.Linear(3, 2), (x,))
    assert program.inputs[0].name == "input"
    wrong: list[Callable[[], object]] = [
        program, lambda: program(x.double()), lambda: program(x[:1]), lambda: program(x.bfloat16()), lambda: program([1]),
        lambda: program.submit(x[:1]), lambda: program.bind(x.double()), lambda: program.profile([x[:1].numpy()]),
        lambda: program(x[:1].to("vulkan")), lambda: program(x.double().to("vulkan")),
    ]  # fmt: skip
    for call in wrong:
        with pytest.raises(InvalidInputError) as error:
            call()
        assert "'input'" in str(error.value) and "input_1" not in str(error.value)


def test_an_exported_program_stays_on_the_device(monkeypatch: Any) -> None:
    """`lapilli::run` in torch.export's programs."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).eval()
    x = torch.randn(5, 4)
    run = to_vulkan(torch.export.export(model, (x,), dynamic_shapes=({0: Dim("n", min=2, max=64)},))).module()
    there = x.to("vulkan")
    wanted = run(x)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "to_cpu", lambda *args: pytest.fail("a tensor was copied to the host"))
        found = run(there)
    assert found.device.type == "vulkan"
    assert torch.equal(found.cpu(), wanted)
