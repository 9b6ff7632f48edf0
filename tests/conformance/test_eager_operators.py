"""Operators on tensors of the vulkan device: a shard of PyTorch's own tests, what compiles when, writing in place, the CPU
fallback, the cache on disk, training."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import eager
import opinfo
import pytest
import torch
from torch import Tensor, nn

from lapilli import autoload
from lapilli.eager import heavy_calls
from lapilli.eager.call_signature import CallSignature, operand
from lapilli.eager.dispatch import fallbacks, reset_fallbacks
from lapilli.eager.operator_schema import schema_of
from lapilli.eager.programs import OperatorProgram, Programs, programs_of, target_of
from lapilli.runtime.description import Description

autoload.register()
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh_counts() -> Iterator[None]:
    reset_fallbacks()
    yield
    reset_fallbacks()


def compiled() -> int:
    """Programs that were compiled or read so far."""
    return sum(len(known.programs) for known in programs_of(target_of(0)).known.values())


def agrees(f: Callable[..., Any], *tensors: Tensor) -> None:
    """What a function of tensors returns on the device is what it returns on the CPU, strides included; nothing falls back."""
    expected = f(*(t.clone() for t in tensors))
    found = f(*(t.to("vulkan") for t in tensors))
    for ours, theirs in zip(_listed(found), _listed(expected), strict=True):
        assert ours.device.type == "vulkan" and ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True)
    assert not fallbacks()


def _listed(x: Any) -> list[Tensor]:
    return list(x) if isinstance(x, list | tuple) else [x]


@pytest.mark.parametrize("name", opinfo.shard(opinfo.entries(), 30, 1))
def test_entry_of_op_db(name: str) -> None:
    for step in eager.work(1, False, name, 0):
        assert step["verdict"] in ("right", "random"), step


# --- what compiles when


@pytest.mark.poor_device
def test_sizes_and_numbers_do_not_compile_again() -> None:
    def step(n: int, k: float) -> None:
        x, y = torch.randn(n, n + 1), torch.randn(n + 1)
        agrees(lambda a, b: a.mul(k).add(b, alpha=-k).addcdiv_(a, a.abs() + 1, value=k * 3), x, y)

    step(5, 0.9)
    before = compiled()
    for n, k in ((6, 0.8), (17, -3.5), (64, 1e-4)):
        step(n, k)
    assert compiled() == before


@pytest.mark.poor_device
def test_products_of_whole_vectors_are_programs_of_their_own() -> None:
    """One for all sizes that are multiples of four, whose rows are read as they lie; another one for other sizes."""

    def multiply(m: int, k: int, n: int) -> int:
        before = compiled()
        agrees(torch.mm, torch.randn(m, k), torch.randn(k, n))
        agrees(torch.bmm, torch.randn(3, m, k), torch.randn(3, k, n))
        agrees(nn.functional.linear, torch.randn(m, k), torch.randn(n, k), torch.randn(n))
        return compiled() - before

    assert multiply(12, 8, 16) <= 3  # tests before this one may have made them
    assert multiply(40, 64, 24) == multiply(16, 12, 8) == 0
    assert multiply(5, 7, 9) <= 3
    assert multiply(13, 10, 17) == multiply(12, 8, 16) == 0
    known = programs_of(target_of(0)).known
    vectors = known["torch.float32 aten.mm.default(torch.float32[4*s0,4*s1]; torch.float32[4*s1,4*s2])"]
    others = known["torch.float32 aten.mm.default(torch.float32[s0,s1]; torch.float32[s1,s2])"]
    by_vectors, by_copies = _kernels(vectors.programs[0]), _kernels(others.programs[0])
    assert "matmul" in by_vectors and by_copies.count("map") == by_vectors.count("map") + 1, "rows are copied"


def _kernels(program: OperatorProgram) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".lap") as file:
        file.write(program.compiled.data)
        file.flush()
        return [kernel.name for kernel in Description.of(Path(file.name)).kernels]


def test_zero_and_one_are_numbers_of_their_own() -> None:
    for beta in (0, 1, 0.5, 0.0, 1.0):
        agrees(lambda x, a, b, beta=beta: torch.addmm(x, a, b, beta=beta), torch.full((2, 4), torch.nan if not beta else 1.0), torch.randn(2, 3), torch.randn(3, 4))  # fmt: skip  # noqa: E501
    for exponent in (2, 3, 0.5, 1.5):
        agrees(lambda x, e=exponent: x.pow(e), torch.rand(3, 3))


@pytest.mark.parametrize("weights", [(5, 3, 1, 1), (7, 3, 1, 1), (5, 4, 1, 1), (5, 3, 3, 3), (5, 3, 2, 2)])
def test_sizes_that_are_compiled_in_belong_to_the_program(weights: tuple[int, ...]) -> None:
    """A convolution is compiled for its filters: other filters of the same rank are another program."""
    agrees(nn.functional.conv2d, torch.rand(1, weights[1], 9, 9), torch.rand(weights))


def scattering(seed: int) -> tuple[Callable[..., list[Tensor]], Tensor, Tensor]:
    """A convolution's gradients (a transposed one's result too), of 1 to 3 dimensions, with odd sizes."""
    pick = random.Random(seed)
    n, transposed, groups = pick.choice([1, 2, 2, 3]), pick.random() < 0.5, pick.choice([1, 1, 2, 3])
    ins, outs = (groups * pick.choice([1, 3, 4]) for _ in range(2))
    stride, dilation, kernel = (pick.choice(some) for some in ([1, 2, 3], [1, 1, 2], [1, 2, 3, 5]))
    padding = pick.randrange((kernel - 1) * dilation + 1)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:  # as large as PyTorch takes it
        options["output_padding"] = pick.randrange(max(stride, dilation))
    convolve = getattr(nn.functional, f"conv_transpose{n}d" if transposed else f"conv{n}d")
    least = (kernel - 1) * dilation + 1
    x = torch.randn(pick.choice([1, 2, 5]), ins, *(least + pick.choice([0, 3, 7]) for _ in range(n)))
    weight = torch.randn(*((ins, outs // groups) if transposed else (outs, ins // groups)), *[kernel] * n)

    def f(x: Tensor, weight: Tensor) -> list[Tensor]:
        given = [x.requires_grad_(), weight.requires_grad_()]
        y = convolve(*given, **options)
        return [y.detach(), *torch.autograd.grad(y, given, (y * 0.1).detach())]

    return f, x, weight


PRODUCTS: dict[str, Callable[[Any], list[Tensor]]] = {
    "mm": lambda r: [r(7, 33) @ r(33, 5), r(33, 7).t() @ r(5, 33).t(), r(1, 33) @ r(33, 64), r(3, 0) @ r(0, 2)],
    "bmm": lambda r: [r(3, 7, 33) @ r(3, 33, 5), r(1, 7, 33) @ r(1, 33, 5), r(3, 1, 16) @ r(3, 16, 1)],
    "addmm": lambda r: [torch.addmm(r(5), r(7, 33), r(33, 5), beta=k, alpha=2.5 * k) for k in (0, 1, 0.5, 2)],
    "addmm in place": lambda r: [r(7, 5).addmm_(r(7, 33), r(33, 5), alpha=k) for k in (1, 0.25)],
    "baddbmm": lambda r: [torch.baddbmm(r(7, 1), r(3, 7, 33), r(3, 33, 5), beta=k) for k in (1, 0.5)],
    "linear": lambda r: [nn.functional.linear(r(2, 4, 33), r(8, 33), r(8)), nn.functional.linear(r(33), r(8, 33))],
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in PRODUCTS for dtype in (torch.float32, torch.float16, torch.bfloat16)),
        ("mm", torch.int32),
    ],
)
def test_products_whose_sizes_come_again(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled for these sizes the second time, with numbers that may still vary."""
    for attribute, value in {"HEAVY": 0, "_seen": set(), "_exact": set()}.items():
        monkeypatch.setattr(heavy_calls, attribute, value)

    def drawn(device: str, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return PRODUCTS[name](lambda *shape: torch.randint(-8, 9, shape, generator=generator).to(device, dtype))

    exact = drawn("cpu", dtype if dtype is torch.int32 else torch.float64)
    for _ in range(3):
        for ours, theirs in zip(drawn("vulkan", dtype), exact, strict=True):
            assert ours.dtype is dtype
            torch.testing.assert_close(ours.cpu(), theirs.to(dtype))
    assert heavy_calls._exact or dtype is not torch.float32, "halves may have matrix units"
    assert not fallbacks()


@pytest.mark.parametrize("seed", range(24))
def test_convolutions_whose_sizes_come_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled for these sizes the second time."""
    for name, value in {"HEAVY": 0, "_seen": set(), "_exact": set()}.items():
        monkeypatch.setattr(heavy_calls, name, value)
    f, x, weight = scattering(seed)
    exact = f(x.double(), weight.double())
    terms = f(x.double().abs(), weight.double().abs())  # the sums of their terms' magnitudes
    bound = torch.finfo(torch.float32).eps * (8 + x.numel() ** 0.5)  # a sum may wander by the root of its length
    for _ in range(3):
        for ours, theirs, sums in zip(f(x.to("vulkan"), weight.to("vulkan")), exact, terms, strict=True):
            assert ours.device.type == "vulkan" and ours.stride() == theirs.stride()
            assert ((ours.cpu().double() - theirs).abs() <= bound * sums).all()
    assert not fallbacks()
    assert heavy_calls._exact


def test_the_same_tensor_twice_and_two_tensors_are_other_calls() -> None:
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    agrees(lambda a, b: [a * a, a * b, b * a, b * b], x, y)
    agrees(lambda a, b: [a.addcmul(a, b), a.addcmul(b, b), b.addcmul(b, a)], x, y)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (1, 1), (3, 0, 2), (1, 5), (5, 1), (2, 1, 3)])
def test_shapes_with_zeros_and_ones(shape: tuple[int, ...]) -> None:
    agrees(lambda x: [x + 1, x.exp(), x.sum(), x * x.reshape(-1)[:1].sum()], torch.rand(shape))
    agrees(lambda x, y: x + y, torch.rand(shape), torch.rand((4, *[1] * len(shape))))


@pytest.mark.poor_device
def test_layouts() -> None:
    """Permuted and expanded tensors are read where they lie, others are gathered; results have torch's strides."""
    x, y = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    agrees(
        lambda a, b: [a + b, b * 2, b + b, a.permute(3, 1, 0, 2).exp(), a.transpose(1, 2) @ a.permute(0, 2, 3, 1)], x, y
    )
    agrees(
        lambda a, b: [a[:, 1:, ::2].neg(), a[1].sum(0), b[..., 1:4].softmax(-1), a[0, :1].expand(6, 4, 5).mean(0)], x, y
    )
    agrees(lambda a, b: [a[:, :, 1:3].contiguous(), b.contiguous(), a.clone(memory_format=torch.channels_last)], x, y)


@pytest.mark.poor_device
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64, torch.complex64]
)
def test_strided_copies_move_bits(dtype: torch.dtype) -> None:
    x = torch.arange(120).remainder(7).sub(2).to(torch.int32).view(4, 5, 6).to(dtype)

    def moved(a: Tensor) -> list[Tensor]:
        a[:, 1:3, ::2] = a[:, 3:5, 1::2]
        a[1:, 0].copy_(a[:3, 4].clone())
        return [a, a[..., 2].contiguous(), a.transpose(0, 2).contiguous()]

    agrees(moved, x)


@pytest.mark.poor_device
def test_conversions() -> None:
    x = torch.tensor([-3.7, -0.2, 0.0, 0.5, 1.0, 2.5, 100.3])
    tiny = torch.tensor([1e-45, -3e-40, -0.0, 1e38, torch.inf, -torch.inf, torch.nan, 1.1754944e-38])
    agrees(
        lambda a: [a.double(), a.to(torch.complex128), a.double().t().contiguous()], torch.stack([tiny, torch.randn(8)])
    )
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.int16,
        torch.int8,
        torch.bool,
        torch.complex64,
    ):
        agrees(
            lambda a, dtype=dtype: [a.to(dtype), a.to(dtype).float() if not dtype.is_complex else a, a[::2].to(dtype)],
            x,
        )


# --- writing


@pytest.mark.poor_device
def test_writing_in_place() -> None:
    def write(x: Tensor) -> list[Tensor]:
        view = x[2:6]
        view.add_(1)
        x[::2].mul_(3)
        x.view(2, 4).t().add_(x.view(2, 4).t().clone())
        x.view(2, 4).cumsum_(1)
        x[1:3] += x[5:7]
        x.masked_fill_(x > 9, -1.0)
        return [x, view]

    agrees(write, torch.randn(8))


@pytest.mark.poor_device
def test_what_is_read_is_read_before_it_is_written() -> None:
    """Where what is written is read at other places of the same memory; torch refuses most of that on the CPU."""
    x = torch.randn(6, 6)
    y = x.to("vulkan")
    torch.mm(y, y, out=y)
    torch.testing.assert_close(y.cpu(), x @ x)
    y = x.to("vulkan")
    y[:, 1:].copy_(y[:, :-1])
    torch.testing.assert_close(y.cpu()[:, 1:], x[:, :-1])


def test_out() -> None:
    def write(x: Tensor, out: Tensor) -> list[Tensor]:
        torch.exp(x, out=out)
        half = torch.empty(3, 4, dtype=torch.float16, device=x.device)
        torch.add(x, 1, out=half)
        empty = torch.empty(0, device=x.device)
        torch.sum(x, 0, out=empty)
        values, places = torch.empty(0, device=x.device), torch.empty(0, dtype=torch.int64, device=x.device)
        torch.max(x, 1, out=(values, places))
        return [out, half, empty, values, places]

    agrees(write, torch.randn(3, 4), torch.empty(4, 3).t())


def test_wrong_arguments_raise_what_torch_raises() -> None:
    x = torch.randn(2, 3, device="cpu").to("vulkan")
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.ones(4, device="vulkan")
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        x[0].add_(x.clone())
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        x.view(-1)[1:].add_(x.view(-1)[:-1])
    with pytest.raises(RuntimeError, match=r"same device.*vulkan:0 and cpu"):
        x + torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.ones(3, dtype=torch.int64, device="vulkan").add_(0.5)
    assert not fallbacks()


# --- what runs on the CPU


def test_fallback_warns_once_and_is_counted() -> None:
    x = torch.tensor([0.0, 1.0, 2.0]).to("vulkan")
    with pytest.warns(UserWarning, match=r"aten\.nonzero\.default runs on the CPU.*depends on data.*LAPILLI_STRICT"):
        assert x.nonzero().device.type == "vulkan"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert x.nonzero().tolist() == [[1], [2]]
    assert fallbacks() == {"aten.nonzero.default": 2}


def test_strict_mode_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPILLI_STRICT", "1")
    x = torch.tensor([0.0, 1.0, 2.0]).to("vulkan")
    with pytest.raises(NotImplementedError, match=r"aten\.nonzero\.default on float32 tensors.*depends on data"):
        x.nonzero()
    wide = torch.zeros(3, dtype=torch.float64, device="vulkan")
    with pytest.raises(
        NotImplementedError, match=r"aten\.add\.Tensor on float64.*runs there on float32.*\.to\(torch\.float32\)"
    ):
        wide + wide
    assert not fallbacks()


@pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning")
def test_integers_beyond_32_bits_are_not_computed_by_kernels() -> None:
    x = torch.tensor([2**40, -3, 5])
    y = x.to("vulkan")
    assert (
        torch.equal(y.cpu(), x) and torch.equal(y.clone().cpu(), x) and torch.equal(y[::2].contiguous().cpu(), x[::2])
    )
    assert torch.equal((y + 1).cpu(), x + 1) and torch.equal((y.clone() * 2).cpu(), x * 2)
    assert torch.equal(
        (torch.ones(3, dtype=torch.int64, device="vulkan") + 2**33).cpu(), torch.ones(3, dtype=torch.int64) + 2**33
    )
    assert set(fallbacks()) == {"aten.add.Tensor", "aten.mul.Tensor"}


WIDE: dict[str, Callable[[str], torch.Tensor]] = {
    "arange": lambda device: torch.arange(2**33, 2**33 + 5, device=device) + 1,
    "arange up to it": lambda device: torch.arange(0, 2**33, 2**31, device=device),
    "full": lambda device: torch.full((3,), 2**33, device=device) * 2,
    "full_like": lambda device: torch.full_like(torch.ones(3, dtype=torch.int64, device=device), -(2**33)) - 1,
    "fill_": lambda device: torch.ones(3, dtype=torch.int64, device=device).fill_(2**33) + 1,
    "pad": lambda device: torch.nn.functional.pad(torch.ones(3, dtype=torch.int64, device=device), (1, 0), value=2**33),
    "pow": lambda device: torch.pow(2**33, torch.ones(3, dtype=torch.int64, device=device)),
    "list": lambda device: torch._foreach_add([torch.ones(3, dtype=torch.int64, device=device)], 2**33)[0],
}


@pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning")
@pytest.mark.parametrize("name", WIDE)
def test_numbers_beyond_32_bits(name: str) -> None:
    assert torch.equal(WIDE[name]("vulkan").cpu(), WIDE[name]("cpu"))


@pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning")
def test_masks_and_numbers() -> None:
    x = torch.randn(4, 5)
    y = x.to("vulkan")
    assert torch.equal(y[y > 0].cpu(), x[x > 0]) and torch.equal(y[torch.tensor([0, 2])].cpu(), x[[0, 2]])
    assert (
        y.sum().item() == pytest.approx(x.sum().item(), rel=1e-5)
        and torch.equal(y, y.clone())
        and not torch.equal(y, y + 1)
    )
    assert torch.allclose(y, y + 1e-9) and bool((y == y).all())
    y[y < 0] = 0
    assert torch.equal(y.cpu(), x.clamp(min=0))


# --- random numbers


def test_random_numbers_follow_the_seed() -> None:
    def draw() -> list[Tensor]:
        torch.vulkan.manual_seed(7)
        x = torch.empty(200, device="vulkan")
        assert torch.randint(3, 9, (50,), device="vulkan").unique().tolist() == [3, 4, 5, 6, 7, 8]
        reset_fallbacks()
        drawn = [
            x.normal_().clone(),
            x.uniform_(2, 4).clone(),
            x.bernoulli_(0.3).clone(),
            torch.rand(200, device="vulkan"),
        ]
        return [*(t.cpu() for t in drawn), torch.randperm(50, device="vulkan").cpu()]

    first, again = draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    normal, uniform, bernoulli, other, order = first
    assert (
        abs(normal.mean()) < 0.4 and uniform.min() >= 2 and uniform.max() < 4 and set(bernoulli.tolist()) == {0.0, 1.0}
    )
    assert not torch.equal(other, torch.rand(200, device="vulkan").cpu()) and sorted(order.tolist()) == list(range(50))
    dropped = nn.functional.dropout(torch.ones(1000, device="vulkan"), 0.25).cpu()
    kept = dropped[dropped != 0]
    assert torch.allclose(kept, torch.full_like(kept, 4 / 3)) and 650 < len(kept) < 850
    assert not fallbacks()


# --- training


def losses(
    device: str, make: Callable[[], nn.Module], x: Tensor, y: Tensor, optimizer: Callable[[Any], Any]
) -> list[float]:
    torch.manual_seed(0)
    model = make().to(device)
    step = optimizer(model.parameters())
    found = []
    for _ in range(4):
        step.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        step.step()
        found.append(loss.item())
    model.eval()
    return [*found, model(x.to(device)).sum().item()]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, stride=2),
        nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 5)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = (
            nn.LSTM(4, 6, batch_first=True),
            nn.GRU(6, 6, batch_first=True),
            nn.Linear(6, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


@pytest.mark.parametrize("make", [cnn, Transformer, Recurrent])
def test_training_tracks_the_cpu(make: Callable[[], nn.Module]) -> None:
    """Forward, backward and the optimizer run on the device, none of it on the CPU."""
    torch.manual_seed(1)
    x = {cnn: torch.randn(4, 3, 10, 10), Transformer: torch.randint(20, (4, 6)), Recurrent: torch.randn(4, 3, 4)}[make]
    y = torch.randint(5, (4,))
    optimizers: list[Callable[[Any], Any]] = [lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)]
    if make is cnn:
        optimizers.append(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for optimizer in optimizers:
        expected = losses("cpu", make, x, y, optimizer)
        assert losses("vulkan", make, x, y, optimizer) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert expected[3] < expected[0]
    assert not fallbacks()


# --- the cache on disk


@pytest.mark.long
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    program = """
        import torch
        from lapilli import autoload
        autoload.register()
        from lapilli.eager.programs import programs_of, target_of
        x = torch.arange(12.0).view(3, 4).to("vulkan")
        y = (x.t() @ x * 0.5).softmax(-1)[1:, :2].sum()
        print(y.item(), programs_of(target_of(0)).compiled)
    """

    def run() -> list[str]:
        environment = {**os.environ, "LAPILLI_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        printed = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True
        )
        assert printed.returncode == 0, printed.stderr
        return printed.stdout.split()

    first, second = run(), run()
    assert first[0] == second[0] and int(first[1]) > 3 and int(second[1]) == 0


def test_a_damaged_file_of_the_cache_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    own = Programs(target_of(0))
    signature = CallSignature(schema_of(aten.relu.default), (operand(torch.zeros(2, 3)),))
    own.find(signature, [])
    (file,) = (tmp_path / "eager").iterdir()
    assert Programs(target_of(0)).find(signature, [])[0].compiled == own.find(signature, [])[0].compiled
    file.write_bytes(file.read_bytes()[:-1])
    again = Programs(target_of(0))
    again.find(signature, [])
    assert again.compiled == own.compiled == 1


def test_defaults_that_the_user_changes() -> None:
    x = torch.tensor([1, 2, 3])
    y = x.to("vulkan")
    assert (y / 2).dtype is torch.float32
    torch.set_default_dtype(torch.float16)
    try:
        assert (y / 2).dtype is torch.float16 and torch.equal((y / 2).cpu(), x / 2)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("vulkan"):
        assert (torch.arange(4) * 2).tolist() == [0, 2, 4, 6] and torch.eye(3).triu(1).sum().item() == 0
        assert sorted(torch.randperm(7).tolist()) == list(range(7)) and torch.linspace(0, 1, 5).tolist() == [
            0,
            0.25,
            0.5,
            0.75,
            1,
        ]
    assert (y / 2).dtype is torch.float32 and not fallbacks()


def test_names_of_a_device_share_a_program() -> None:
    names: tuple[Any, ...] = ("vulkan:0", "vulkan", torch.device("vulkan", 0))
    before = compiled()
    made = [torch.rand(3, 5, 7, 2, 1, 1, device=name) for name in names]
    assert compiled() <= before + 1
    shapes = {torch.rand_like(made[0], device=name).shape for name in names}
    assert compiled() <= before + 2 and shapes == {made[0].shape}
    assert all(((x.cpu() >= 0) & (x.cpu() < 1)).all() for x in made)
