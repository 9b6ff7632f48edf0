"""Neighbouring calls, of which none may be much slower than another: products, convolutions, attention, reductions and norms, with
the layouts, sizes and open dimensions that models have; and gradients of products and convolutions. `cliffs.py` times them; tests
check their results and their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

Maker = Callable[[torch.Generator], list[torch.Tensor]]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A call of a family.

    f: of tensors. shapes: of its arguments, float32 of a normal distribution. flops: of a call. weights: how many of the last
    arguments are weights. open: (argument, dimension) of sizes that are open. base: whether others of the family are compared with
    it. contraction: whether its time is that of a contraction.
    """

    family: str
    name: str
    f: Callable[..., Any]
    shapes: tuple[Shape, ...]
    flops: int
    weights: int = 0
    open: tuple[tuple[int, int], ...] = ()
    contraction: bool = True

    def arguments(self, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """The same ones for the same seed; weights small enough that results are about 1."""
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(shape, generator=generator) for shape in self.shapes]
        for k in range(len(made) - self.weights, len(made)):
            made[k] /= max(1, made[k][0].numel()) ** 0.5
        return [t.to(dtype) for t in made]

    def dynamic_shapes(self) -> tuple[tuple[dict[int, Any] | None, ...]] | None:
        """As torch.export takes them for a model with `*arguments`; None if all sizes are fixed."""
        if not self.open:
            return None
        count = len(self.shapes) - self.weights
        return (tuple({d: torch.export.Dim.AUTO for k, d in self.open if k == n} or None for n in range(count)),)

    def model(self, arguments: Sequence[torch.Tensor]) -> Call:
        return Call(self, arguments)


class Call(torch.nn.Module):
    """A case as a model: the last arguments are its weights."""

    def __init__(self, case: Case, arguments: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.f, self.count = case.f, case.weights
        for k, weight in enumerate(arguments[len(arguments) - case.weights :]):
            self.register_buffer(f"w{k}", weight)

    def forward(self, *given: torch.Tensor) -> Any:
        return self.f(*given, *(getattr(self, f"w{k}") for k in range(self.count)))


def cases(size: int) -> list[Case]:
    """size: 1 for tests, 4 for a software driver, 16 for a large GPU; work grows with its square."""
    made = [*products(size), *convolutions(size), *attention(size), *rows(size)]
    assert len({(c.family, c.name) for c in made}) == len(made)
    return made


def gradients(size: int) -> list[Case]:
    """Of all arguments of products and convolutions, and of convolutions of other numbers of images."""
    made = []
    for case in [*products(size), *convolutions(size)]:
        made.append(gradient(case))
        if case.family.startswith("convolution"):
            for images in {1, 3} - {case.shapes[0][0]}:
                if "x[1:]" not in case.name:
                    shapes = ((images, *case.shapes[0][1:]), *case.shapes[1:])
                    flops = case.flops * images // case.shapes[0][0]
                    made.append(
                        gradient(replace(case, name=f"{case.name}, {images} images", shapes=shapes, flops=flops))
                    )
    return made


def gradient(case: Case) -> Case:
    """The gradients of all arguments of a case, as a case: its last argument is the result's gradient."""

    def f(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *arguments, grad = (t.detach().requires_grad_() for t in given)
        return torch.autograd.grad(_first(case.f(*arguments)), arguments, grad)

    arguments = case.arguments(torch.float32)
    grad = torch.ones_like(_first(case.f(*arguments)))
    graph = make_fx(f)(*arguments, grad)
    graph.graph.eliminate_dead_code()
    call = partial(torch.fx.GraphModule.__call__, graph)  # a function: modules would be part of the model
    shapes = (*case.shapes, tuple(grad.shape))
    return replace(
        case, family=f"gradient: {case.family}", f=call, shapes=shapes, flops=2 * case.flops, weights=0, open=()
    )


def _first(found: Any) -> torch.Tensor:
    result: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return result


def products(s: int) -> Iterator[Case]:
    m, k, n, b = 64 * s, 96, 64 * s, 6
    linear: Any = F.linear

    def case(name: str, f: Callable[..., Any], shapes: Sequence[Shape], rows: int, **more: Any) -> Case:
        return Case("product", name, f, tuple(shapes), 2 * rows * k * n, **more)

    yield case("linear", linear, [(m, k), (n, k)], m, weights=1)
    yield case("linear, open rows", linear, [(m, k), (n, k)], m, weights=1, open=((0, 0),))
    yield case("linear, open batch and length", linear, [(2, m // 2, k), (n, k)], m, weights=1, open=((0, 0), (0, 1)))
    yield case("linear of x[1:]", lambda x, w: linear(x[1:], w), [(m + 1, k), (n, k)], m, weights=1)
    yield case("linear of x[:, 1:]", lambda x, w: linear(x[:, 1:], w), [(4, m // 4 + 1, k), (n, k)], m, weights=1)
    yield case("linear of x[:, ::2]", lambda x, w: linear(x[:, ::2], w), [(4, m // 2, k), (n, k)], m, weights=1)
    yield case("linear of a chunk", lambda x, w: linear(x.chunk(2, -1)[1], w), [(m, 2 * k), (n, k)], m, weights=1)
    yield case("linear of a transposed matrix", lambda x, w: linear(x.mT, w), [(4, k, m // 4), (n, k)], m, weights=1)
    yield case(
        "linear of a permuted tensor",
        lambda x, w: linear(x.permute(0, 3, 2, 1), w),
        [(2, k, 8, m // 16), (n, k)],
        m,
        weights=1,
    )
    yield case("linear with a second reader", lambda x, w: (linear(x, w), x * 2), [(m, k), (n, k)], m, weights=1)
    yield case(
        "linear of what is computed",
        lambda x, w: linear(x[:, 1:].relu(), w),
        [(4, m // 4 + 1, k), (n, k)],
        m,
        weights=1,
    )
    yield case("x @ w", torch.matmul, [(m, k), (k, n)], m, weights=1)
    yield case("a @ b", torch.matmul, [(m, k), (k, n)], m)
    yield case("a @ b[1:]", lambda a, b: a @ b[1:], [(m, k), (k + 1, n)], m)
    yield case("a @ b.mT", lambda a, b: a @ b.mT, [(m, k), (n, k)], m)
    yield case("a.mT @ b", lambda a, b: a.mT @ b, [(k, m), (k, n)], m)
    yield case("a.mT @ b.mT", lambda a, b: a.mT @ b.mT, [(k, m), (n, k)], m)
    yield case("batches", torch.matmul, [(b, m, k), (b, k, n)], b * m)
    yield case("batches, one matrix", torch.matmul, [(b, m, k), (k, n)], b * m)
    yield case("batches, [4, 3] @ [3]", torch.matmul, [(4, 3, m // 2, k), (3, k, n)], 6 * m)
    yield case("batches, [4, 1] @ [1, 3]", torch.matmul, [(4, 1, m // 2, k), (1, 3, k, n)], 6 * m)
    yield case("batches in the second dimension", lambda a, b: a.transpose(0, 1) @ b, [(m, b, k), (b, k, n)], b * m)
    yield case("open batches", torch.matmul, [(b, m, k), (b, k, n)], b * m, open=((0, 0), (1, 0)))
    for odd in ("m", "n", "k"):
        sizes = {"m": m, "k": k, "n": n, odd: {"m": m, "k": k, "n": n}[odd] + 1}
        yield Case(
            "product", f"linear, odd {odd}", linear, ((sizes["m"], sizes["k"]), (sizes["n"], sizes["k"])),
            2 * sizes["m"] * sizes["k"] * sizes["n"], weights=1,
        )  # fmt: skip
    yield Case("product of few rows", "1", linear, ((1, 4 * k), (8 * n, 4 * k)), 64 * k * n, weights=1)
    yield Case("product of few rows", "4", linear, ((4, 4 * k), (8 * n, 4 * k)), 256 * k * n, weights=1)
    yield Case("product of few rows", "1, a @ b", torch.matmul, ((1, 4 * k), (4 * k, 8 * n)), 64 * k * n)
    yield Case("product of few rows", "3, a @ b.mT", lambda a, b: a @ b.mT, ((3, 4 * k), (8 * n, 4 * k)), 192 * k * n)
    yield Case(
        "product of few rows",
        "x[:, -1]",
        lambda x, w: linear(x[:, -1], w),
        ((1, 7, 4 * k), (8 * n, 4 * k)),
        64 * k * n,
        weights=1,
    )


def convolutions(s: int) -> Iterator[Case]:
    c, size, b = 16, 4 * s + 4, 4

    def case(name: str, ins: int, outs: int, kernel: Sequence[int], batch: int = b, f: Any = None, **how: Any) -> Case:
        rank, groups = len(kernel), how.get("groups", 1)
        stride = how.get("stride", 1)
        shape = (batch, ins, *{1: [size * size], 2: [size, size], 3: [8, size, size // 2]}[rank])
        conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
        padding = tuple(k // 2 for k in kernel)
        call = f or (lambda x, w: conv(x, w, padding=padding, **how))
        places = 1
        for d in shape[2:]:
            places *= -(-d // stride)
        taps = ins // groups
        for k in kernel:
            taps *= k
        family = f"convolution, {rank}-D" if groups == 1 else "convolution in groups"
        return Case(
            family, name, call, (shape, (outs, ins // groups, *kernel)), 2 * batch * places * taps * outs, weights=1
        )

    yield case("3x3", 4 * c, 4 * c, (3, 3))
    yield case("3x3, one image", 4 * c, 4 * c, (3, 3), batch=1)
    yield case("3x3, stride 2", 4 * c, 4 * c, (3, 3), stride=2)
    yield case("3x3, dilation 2", 4 * c, 4 * c, (3, 3), f=lambda x, w: F.conv2d(x, w, padding=2, dilation=2))
    yield case("1x1", 4 * c, 4 * c, (1, 1))
    yield case("3x3, 30 channels", 30, 4 * c, (3, 3))
    yield case("3x3, 50 results", 4 * c, 50, (3, 3))
    yield case("7x7, 3 channels", 3, 4 * c, (7, 7), stride=2)
    yield case("3x3 of an image that is turned", 4 * c, 4 * c, (3, 3), f=lambda x, w: F.conv2d(x.mT, w, padding=1))
    yield case("3x3 of x[1:]", 4 * c, 4 * c, (3, 3), f=lambda x, w: F.conv2d(x[1:], w, padding=1))
    yield case("9", 4 * c, 4 * c, (9,))
    yield case("9, 30 channels", 30, 4 * c, (9,))
    yield case("3x3x3", 2 * c, 2 * c, (3, 3, 3))
    yield case("3x3x3, stride 2", 2 * c, 2 * c, (3, 3, 3), stride=2)
    yield case("1x3x3", 2 * c, 2 * c, (1, 3, 3))
    yield case("3x1x1", 2 * c, 2 * c, (3, 1, 1))
    yield case("3x3, 4 groups", 8 * c, 8 * c, (3, 3), groups=4)
    yield case("3x3, 4 groups, one image", 8 * c, 8 * c, (3, 3), batch=1, groups=4)
    yield case("3x3, 16 groups", 8 * c, 8 * c, (3, 3), groups=16)
    yield case("3x3, groups of 3", 6 * c, 6 * c, (3, 3), groups=2 * c)
    yield case("3x3, groups of 6", 6 * c, 6 * c, (3, 3), groups=c)
    yield case("9, 4 groups", 8 * c, 8 * c, (9,), groups=4)
    yield case("3x3x3, 4 groups", 4 * c, 4 * c, (3, 3, 3), groups=4)
    for kernel in (3, 7, 9):
        yield case(f"depthwise {kernel}x{kernel}", 8 * c, 8 * c, (kernel, kernel), groups=8 * c)
    yield case("depthwise 5x5, stride 2", 8 * c, 8 * c, (5, 5), stride=2, groups=8 * c)
    yield case(
        "depthwise 3x3, dilation 2", 8 * c, 8 * c, (3, 3), groups=8 * c,
        f=lambda x, w: F.conv2d(x, w, padding=2, dilation=2, groups=8 * c),
    )  # fmt: skip
    yield case("depthwise 3x3x3", 4 * c, 4 * c, (3, 3, 3), groups=4 * c)
    yield case("depthwise 3x3x3, stride 2", 4 * c, 4 * c, (3, 3, 3), stride=2, groups=4 * c)
    yield case("depthwise 9", 8 * c, 8 * c, (9,), groups=8 * c)
    yield case("depthwise 3x3, channels in no fours", 8 * c + 1, 8 * c + 1, (3, 3), groups=8 * c + 1)
    yield case("depthwise, two results a channel", 4 * c, 8 * c, (3, 3), groups=4 * c)
    yield case("depthwise, three results a channel in no fours", 2 * c + 1, 6 * c + 3, (3, 3), groups=2 * c + 1)
    yield Case(
        "convolution, 3-D", "transposed, larger than its input",
        lambda x, w: F.conv_transpose3d(x, w, stride=2, padding=(0, 0, 1), output_padding=1),
        ((b, 2 * c, 8, size // 2, size // 2), (2 * c, 2 * c, 1, 1, 2)), 64 * b * (size // 2) ** 2 * 2 * 4 * c * c, weights=1,
    )  # fmt: skip
    yield Case(
        "convolution, 2-D", "transposed, stride 2", lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        ((b, 4 * c, size // 2, size // 2), (4 * c, 4 * c, 4, 4)), 2 * b * (size // 2) ** 2 * 256 * c * c, weights=1,
    )  # fmt: skip
    yield Case(
        "convolution, 2-D", "transposed, stride 3, dilation 2",
        lambda x, w: F.conv_transpose2d(x, w, stride=3, padding=1, dilation=2),
        ((b, 4 * c, size // 3, size // 3), (4 * c, 4 * c, 3, 3)), 2 * b * (size // 3) ** 2 * 144 * c * c, weights=1,
    )  # fmt: skip


def attention(s: int) -> Iterator[Case]:
    b, h, d, n = 2, 4, 32, 48 * s
    sdpa: Any = F.scaled_dot_product_attention

    def flops(queries: int, keys: int, width: int = d, batch: int = b, heads: int = h) -> int:
        return 4 * batch * heads * queries * keys * width

    def case(name: str, f: Callable[..., Any], shapes: Sequence[Shape], count: int, **more: Any) -> Case:
        return Case("attention", name, f, tuple(shapes), count, **more)

    heads = (b, h, n, d)
    tokens = (b, n, h, d)
    yield case("[b, h, n, d]", sdpa, [heads] * 3, flops(n, n))
    yield case("[b, n, h, d], transposed", lambda *x: sdpa(*(t.transpose(1, 2) for t in x)), [tokens] * 3, flops(n, n))
    yield case(
        "one tensor for all three", lambda x: sdpa(*(t.unflatten(-1, (h, d)).transpose(1, 2) for t in x.chunk(3, -1))),
        [(b, n, 3 * h * d)], flops(n, n),
    )  # fmt: skip
    yield case("causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), [heads] * 3, flops(n, n))
    yield case(
        "a mask of floats", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), [*[heads] * 3, (b, 1, n, n)], flops(n, n)
    )
    yield case(
        "a mask of keys",
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m[:, None, None] > -1),
        [*[heads] * 3, (b, n)],
        flops(n, n),
    )
    yield case(
        "one set of keys for all heads",
        lambda q, k, v: sdpa(q, k.expand(-1, h, -1, -1), v.expand(-1, h, -1, -1)),
        [heads, (b, 1, n, d), (b, 1, n, d)],
        flops(n, n),
    )
    yield case(
        "grouped queries",
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        [heads, (b, 2, n, d), (b, 2, n, d)],
        flops(n, n),
    )
    yield case("odd lengths", sdpa, [(b, h, n + 5, d), (b, h, n + 1, d), (b, h, n + 1, d)], flops(n + 5, n + 1))
    yield case("heads of 20", sdpa, [(b, h, n, 20)] * 3, flops(n, n, 20))
    for width in (64, 80, 128, 160, 256):
        yield case(f"heads of {width}", sdpa, [(1, h, n, width)] * 3, flops(n, n, width, 1))
    yield case("open length", sdpa, [heads] * 3, flops(n, n), open=tuple((k, 2) for k in range(3)))
    yield case("open batch", sdpa, [heads] * 3, flops(n, n), open=tuple((k, 0) for k in range(3)))
    yield case(
        "windows", lambda x: sdpa(*_windows(x, h)), [(b, 4 * (n // 8), 8, 3 * h * d)],
        flops(16, 16, batch=b * 4 * (n // 8) // 4 * 2),
    )  # fmt: skip
    yield case("written out", lambda q, k, v: ((q @ k.mT) * d**-0.5).softmax(-1) @ v, [heads] * 3, flops(n, n))


def _windows(x: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Swin's: [b, H, W, 3 * c] in windows of 4 by 4."""
    b, height, width, c = x.shape
    x = x.view(b, height // 4, 4, width // 4, 4, c).transpose(2, 3).reshape(-1, 16, 3, heads, c // 3 // heads)
    return tuple(x.permute(2, 0, 3, 1, 4).unbind(0))


def rows(s: int) -> Iterator[Case]:
    m, n = 96 * s, 64 * s

    def case(
        family: str, name: str, f: Callable[..., Any], shapes: Sequence[Shape], weights: int = 0, **more: Any
    ) -> Case:
        return Case(family, name, f, tuple(shapes), 0, weights, contraction=False, **more)

    yield case("norm", "softmax", lambda x: x.softmax(-1), [(m, n)])
    yield case("norm", "softmax, odd rows", lambda x: x.softmax(-1), [(m, n + 1)])
    yield case("norm", "softmax, first dimension", lambda x: x.softmax(0), [(m, n)])
    yield case("norm", "softmax, long row", lambda x: x.softmax(-1), [(1, m * n)])
    yield case("norm", "softmax, short rows", lambda x: x.softmax(-1), [(m * n // 16, 16)])
    yield case("norm", "softmax, open rows", lambda x: x.softmax(-1), [(m, n)], open=((0, 0),))
    yield case("norm", "layer_norm", lambda x, w: F.layer_norm(x, (n,), w), [(m, n), (n,)], weights=1)
    yield case(
        "norm",
        "layer_norm of x[:, 1:]",
        lambda x, w: F.layer_norm(x[:, 1:], (n,), w),
        [(4, m // 4 + 1, n), (n,)],
        weights=1,
    )
    yield case("norm", "rms_norm", lambda x, w: F.rms_norm(x, (n,), w), [(m, n), (n,)], weights=1)
    yield case("norm", "group_norm", lambda x: F.group_norm(x, 4), [(4, 32, m // 8, n // 16)])
    yield case(
        "norm",
        "batch_norm in training",
        lambda x: F.batch_norm(x, None, None, training=True),
        [(4, 32, m // 8, n // 16)],
    )
    image = (4, m // 8, n // 16, 32)  # with its channels last, as it lies between convolutions
    yield case("norm", "group_norm, channels last", lambda x: F.group_norm(x.movedim(-1, 1), 4), [image])
    yield case("norm", "instance_norm, channels last", lambda x: F.instance_norm(x.movedim(-1, 1)), [image])
    yield case("norm", "softmax of images, channels last", lambda x: x.flatten(1, 2).softmax(1), [image])
    yield case("norm", "gate of means, channels last", lambda x: x * x.mean((1, 2), keepdim=True).sigmoid(), [image])
    yield case("norm", "turned", lambda x: x.mT * 2, [(m, n)])
    for dims in ((-1,), (0,), (0, 1), (1,)):
        shape = (m, n) if dims != (1,) else (8, m // 8, n)
        yield case("reduction", f"sum over {dims} of {len(shape)}", lambda x, d=dims: x.sum(d), [shape])
    yield case("reduction", "max over the last", lambda x: x.max(-1), [(m, n)])
    yield case("reduction", "argmax over all", lambda x: x.argmax(), [(m, n)])
    yield case("reduction", "mean of images", lambda x: x.mean((2, 3)), [(4, 32, m // 8, n // 16)])
    yield case("reduction", "norm over all", lambda x: x.norm(), [(m, n)])
