"""Which layer norms products on matrix units take in (codegen/layer_norms.py, codegen/normed.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapilli.capture import capture
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.layer_norms import layer_norm
from lapilli.codegen.select import schedule_of, write_all
from lapilli.codegen.template import Asked
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.schedule.plan import Schedule
from lapilli.target import KNOWN, of_device

WIDTH = 256


class Block(nn.Module):
    """A product of what a function makes of rows, with weights of a norm."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], columns: int = 512) -> None:
        super().__init__()
        self.function = function
        self.gamma, self.beta = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.product = nn.Linear(WIDTH, columns)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(self.function(x, self.gamma, self.beta))
        return y


def schedule(
    model: nn.Module, *given: Tensor, device: str = "h100", asked: list[Asked] | None = None, **more: object
) -> Schedule:
    """Of a model in half precision. more: for `capture`."""
    with torch.no_grad():
        module = prepare(capture(model.half().eval(), tuple(x.half() for x in given), **more))
    target = of_device(KNOWN[device], half=True, matrix=device == "h100")
    return schedule_of(lower(module, "fp32", True), target, asked=asked)


def is_taken_in(made: Schedule) -> bool:
    inside = [t for t in made.order.run if isinstance(t.template, Tiles) and t.template.norms is not None]
    assert not inside or not any(layer_norm(t) for t in made.tasks)
    return bool(inside)


def module(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), gamma, beta)


def by_means(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return beta + gamma * (apart / (apart.square().mean(-1, keepdim=True) + 1e-6).sqrt())


NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "module": module,
    "without weights": lambda x, gamma, beta: F.layer_norm(x, (WIDTH,)),
    "without beta": lambda x, gamma, beta: F.layer_norm(x, (WIDTH,), gamma),
    "weights of one": lambda x, gamma, beta: F.layer_norm(x, (WIDTH,), 1 + gamma, beta - 1),
    "by means": by_means,
}
OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "of squares": lambda x, gamma, beta: F.rms_norm(x, (WIDTH,), gamma),
    "another variance": lambda x, gamma, beta: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * gamma,
    "another count": lambda x, gamma, beta: (x - x.sum(-1, True) / 200) * (
        (x - x.sum(-1, True) / 200).square().mean(-1, True) + 1e-5).rsqrt(),
    "weights of rows": lambda x, gamma, beta: F.layer_norm(x, (WIDTH,)) * x.amax(-1, True),
    "an end": lambda x, gamma, beta: F.layer_norm(x, (WIDTH,), gamma, beta).relu(),
    "of parts": lambda x, gamma, beta: F.layer_norm(x.unflatten(-1, (4, -1)), (WIDTH // 4,)).flatten(-2),
    "over rows": lambda x, gamma, beta: F.layer_norm(x.mT, (x.shape[-2],)).mT,
    "a softmax": lambda x, gamma, beta: x.softmax(-1),
    "another epsilon a row": lambda x, gamma, beta: (x - x.mean(-1, True)) * (
        (x - x.mean(-1, True)).square().mean(-1, True) + x.amax(-1, True).exp()).rsqrt(),
    "an epsilon that is computed": lambda x, gamma, beta: (x - x.mean(-1, True)) * (
        (x - x.mean(-1, True)).square().mean(-1, True) + x.square().sum()).rsqrt(),
    "rows across memory": lambda x, gamma, beta: F.layer_norm(x.reshape(1, WIDTH, -1).mT, (WIDTH,)),
    "small gammas": lambda x, gamma, beta: F.layer_norm(x, (WIDTH,), gamma * 1e-4),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_that_are_taken_in(name: str) -> None:
    made = schedule(Block(NORMS[name]), torch.randn(1, 200, WIDTH))
    assert is_taken_in(made)
    assert len(made.order.run) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_such_a_norm(name: str) -> None:
    assert not is_taken_in(schedule(Block(OTHERS[name]), torch.randn(1, 200, WIDTH)))


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
@pytest.mark.parametrize("rows", [1, 200])  # kernels of few rows take in norms, too
@pytest.mark.parametrize("part", [slice(None, 128), slice(128, None), slice(None, None, 2)])
def test_products_of_a_part_of_the_row(norm: Callable[..., Tensor], rows: int, part: slice) -> None:
    """Its sums are others than the row's."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(128, 96)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.product(norm(x, (WIDTH,))[:, part])
            return y

    made = schedule(Part(), torch.randn(rows, WIDTH))
    assert not is_taken_in(made)
    assert any(t.row is not None for t in made.order.run)


def test_pointwise_convolutions_leave_it() -> None:
    """A norm over channels before a 1x1 convolution: its tiles read rows as those of products do."""

    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.convolution = nn.LayerNorm(WIDTH), nn.Conv2d(WIDTH, 96, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.convolution(self.norm(x).permute(0, 3, 1, 2))
            return y

    assert not is_taken_in(schedule(Channels(), torch.randn(1, 14, 14, WIDTH)))


@pytest.mark.parametrize("layers", [2, 8])
def test_identical_layers_have_the_same_kernels(layers: int) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Residual(2) for _ in range(layers))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    made = schedule(Layers(), torch.randn(1, 200, WIDTH))
    texts = {w.source for t, w in write_all(made).items() if t in {r.out.id for r in made.order.run}}
    assert len(made.order.run) == 4 * layers
    assert len(texts) <= 6


class Read(nn.Module):
    """A norm that is read in several places. products: how many of them are products."""

    def __init__(self, products: int, elsewhere: bool) -> None:
        super().__init__()
        self.norm, self.elsewhere = nn.LayerNorm(WIDTH), elsewhere
        self.products = nn.ModuleList(nn.Linear(WIDTH, 96 + 32 * k) for k in range(products))

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.norm(x)
        return [p(y).relu() for p in self.products] + ([y.tanh()] if self.elsewhere else [])


@pytest.mark.parametrize(
    ("products", "elsewhere", "taken"), [(1, False, True), (2, False, True), (1, True, False), (4, False, False)]
)
def test_who_reads_it(products: int, elsewhere: bool, taken: bool) -> None:
    """All that read it must take it in, and four that do take longer than a kernel of its own."""
    assert is_taken_in(schedule(Read(products, elsewhere), torch.randn(1, 200, WIDTH))) == taken


class Residual(nn.Module):
    """A norm that products read, and what is added to their results."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.norm, self.depth = nn.LayerNorm(WIDTH), depth
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = z = self.norm(x)
        for p in self.products[: self.depth]:
            z = p(z).relu()
        return y + z


def test_a_residual_of_what_is_normed() -> None:
    """Two small kernels beside the product have the sums of rows. An epilogue of the same product would wait for them."""
    made = schedule(Residual(2), torch.randn(1, 200, WIDTH))
    assert is_taken_in(made)
    assert [len(made.order.run), sum(made.order.run_barriers)] == [4, 1]
    assert not is_taken_in(schedule(Residual(1), torch.randn(1, 200, WIDTH)))


def test_the_result_is_read_by_the_caller() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.product = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.norm(x)
            return y, self.product(y)

    assert not is_taken_in(schedule(Both(), torch.randn(1, 200, WIDTH)))


@pytest.mark.parametrize(("rows", "taken"), [(2, True), (16, True), (200, True), (4096, False)])
def test_large_products_leave_it(rows: int, taken: bool) -> None:
    """Where the level of a norm is little beside the products, sums in each of many rounds of tiles cost more."""
    assert is_taken_in(schedule(Block(module, 3072), torch.randn(1, rows, WIDTH))) == taken


@pytest.mark.parametrize("device", ["lavapipe", "swiftshader", "mali-g7x"])
def test_no_matrix_units(device: str) -> None:
    assert not is_taken_in(schedule(Block(module), torch.randn(1, 200, WIDTH), device=device))


def test_weights_that_are_arguments() -> None:
    """W times gamma is made at load, so both must be there."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(WIDTH, 96)

        def forward(self, x: Tensor, gamma: Tensor) -> Tensor:
            y: Tensor = self.product(F.layer_norm(x, (WIDTH,), gamma))
            return y

    assert not is_taken_in(schedule(Given(), torch.randn(200, WIDTH), torch.randn(WIDTH)))


@pytest.mark.parametrize("shape", [(), (200, 1), (200, WIDTH)])
@pytest.mark.parametrize("computed", [False, True])
def test_an_epsilon_that_is_read(shape: tuple[int, ...], computed: bool) -> None:
    """The kernel has nothing but the sums to make a scale of."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(WIDTH, 96)

        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            e = e.square().sum() if computed else e
            apart = x - x.mean(-1, keepdim=True)
            y: Tensor = self.product(apart * (apart.square().mean(-1, keepdim=True) + e).rsqrt())
            return y

    made = schedule(Given(), torch.randn(200, WIDTH), torch.rand(shape))
    assert not is_taken_in(made)
    assert write_all(made)


def test_open_rows_leave_it() -> None:
    rows = torch.export.Dim("rows", min=2, max=512)
    x = torch.randn(200, WIDTH)
    assert not is_taken_in(schedule(Block(module), x, dynamic_shapes={"x": {0: rows}}))


def test_work_of_load_is_done_at_load() -> None:
    """W', S and T are there before a run, and a run has the product alone."""
    made = schedule(Block(module), torch.randn(1, 200, WIDTH))
    assert sorted(t.out.name.rsplit("_", 1)[-1] for t in made.order.load) == ["added", "normed", "sums"]
    assert [t.out.name for t in made.order.run] == [made.tasks[-1].out.name]


def test_tuning_does_not_ask() -> None:
    """Candidates would be compared with and without the norm."""
    asked: list[Asked] = []
    assert is_taken_in(schedule(Block(module), torch.randn(200, WIDTH), asked=asked))
    assert not asked
