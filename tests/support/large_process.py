"""Many operators on values that are larger than what the device binds at once, each compared with torch.

Run with LAPILLI_STORAGE_RANGE=8192: a device is then one that binds 8 KiB, and the player refuses more. Prints a line of JSON for
every case: its name, and what went wrong ("" where nothing did). With --gpu-plans the device takes kernels for GPUs, and only what
these compute in ways of their own is tried. Every second operator is, as in `in_parts`, unless LAPILLI_TEST_ALL is set."""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import as_gpu
import torch
import torch.nn.functional as F

import lapilli
import lapilli.program.schema as schema
import lapilli.target.record as targets

RANGE = 8192

Case = Callable[[torch.device], Any]
N = RANGE // 4  # numbers of 32 bits in the range


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on(f: Callable[..., Any], *given: torch.Tensor) -> Case:
    """f of tensors that are moved to the device, so that they go through a transfer as well."""
    return lambda device: f(*(x.to(device) for x in given))


def boundaries() -> Iterator[tuple[str, Case]]:
    """Sizes around multiples of what is bound at once, in every width of elements."""
    double = lambda x: x | x if x.dtype is torch.bool else x + x  # noqa: E731
    for n in (N - 1, N, N + 1, N + 4, 2 * N, 2 * N + 1, 5 * N + 3):
        yield f"{n} numbers", on(double, values(n))
    for dtype in (torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.bfloat16):
        yield str(dtype), on(double, (torch.arange(2 * RANGE // dtype.itemsize + 1) % 5).to(dtype))


def many() -> Iterator[tuple[str, Case]]:
    x, y = values(3, 37, 41), values(3, 37, 41, seed=1)
    ints = torch.randint(-50, 50, (5 * N + 3,), generator=torch.Generator().manual_seed(2))
    place = torch.randint(0, 3 * 37 * 41, (2000,), generator=torch.Generator().manual_seed(3))
    image = values(2, 4, 29, 31)
    yield "broadcast", on(lambda x, y: (x * y[:, :1] + y[0]).relu(), x, y)
    yield "where", on(lambda x, y: torch.where(x > y, x, -y), x, y)
    yield "in place", on(lambda x, y: x.clone().add_(y).mul_(2), x, y)
    yield "in place, a slice", on(lambda x, y: _written(x), x, y)
    yield "out", on(lambda x, y: torch.sub(x, y, out=torch.empty_like(x)), x, y)
    yield "to half", on(lambda x: x.half(), x)
    yield "to int64", on(lambda x: (x * 9).long(), x)
    yield "int64", on(lambda i: (i * 3 + 1, i // 7, i.sum(), i.max()), ints)
    yield "bool", on(lambda x: (x > 0, (x > 0).any(1), (x > 9).sum()), x)
    yield "sum", on(lambda x: (x.sum(), x.sum(0), x.sum(1), x.sum(2), x.mean((0, 2))), x)
    yield "extremes", on(lambda x: (x.max(), x.min(), x.argmax(), x.max(1)[0], x.max(1)[1], x.argmin(0)), x)
    yield "norms", on(lambda x: (x.var(2), x.norm(), F.layer_norm(x, (41,)), F.softmax(x, 1), F.log_softmax(x, 2)), x)
    yield "long rows", on(lambda x: (F.softmax(x.view(1, -1), 1), x.view(1, -1).logsumexp(1)), x)
    yield "scan", on(lambda i: (i.cumsum(0), i.float().cumsum(0)), ints)
    yield "sort", on(lambda x: (x.flatten()[:3000].sort()[0], x.topk(3, 1)[0]), x)
    yield "views", on(lambda x: (x.permute(2, 0, 1).contiguous(), x[:, 5:, ::2] + 1, x.flip(1), x.roll(7, 2)), x)
    yield "view of a part", on(lambda x: (x[1, 3:].clone(), x.flatten()[1023:1031] + 1), x)
    yield "repeat", on(lambda x: (x.repeat(2, 1, 1), x[:1].expand(5, -1, -1).contiguous()), x)
    yield "cat", on(lambda x, y: (torch.cat([x, y]), torch.cat([x, y], 2), torch.stack([x, y], 1)), x, y)
    yield "pad", on(lambda i: F.pad(i, (1, 2, 3, 4)), image)
    yield (
        "gather",
        on(lambda x, p: (x.flatten()[p], x.flatten().gather(0, p), x.flatten().index_select(0, p)), x, place),
    )
    yield "scatter", on(lambda x, p: x.flatten().scatter_add(0, p, torch.ones_like(p, dtype=torch.float32)), x, place)
    yield "index_put", on(lambda x, p: x.flatten().index_put_((p,), torch.zeros((), device=x.device)), x, place)
    yield "embedding", on(lambda p: F.embedding(p % 300, values(300, 8).to(p.device)), place)
    yield "matmul", on(lambda a, b: a @ b, values(67, 36), values(36, 53, seed=1))
    yield "batches", on(lambda a, b: (a @ b, b.mT @ a.mT), values(300, 3, 8), values(300, 8, 5, seed=1))
    yield "linear", on(lambda a, w: F.linear(a, w), values(300, 24), values(20, 24, seed=1))
    yield (
        "attention",
        on(lambda q, k: F.scaled_dot_product_attention(q, k, k), values(2, 3, 40, 16), values(2, 3, 50, 16)),
    )
    yield "convolution", on(lambda i, w: F.conv2d(i, w, stride=(1, 2), padding=1), image, values(6, 4, 3, 3, seed=1))
    yield "depthwise", on(lambda i, w: F.conv2d(i, w, padding=1, groups=4), image, values(4, 1, 3, 3, seed=1))
    yield "pointwise", on(lambda i, w: F.conv2d(i, w).relu(), image, values(12, 4, 1, 1, seed=1))
    yield "wide", on(lambda i, w: F.conv2d(i, w, padding=1), values(1, 32, 19, 23), values(32, 32, 3, 3, seed=1))
    yield "transposed", on(lambda i, w: F.conv_transpose2d(i, w, stride=2), image, values(4, 3, 3, 3, seed=1))
    yield "transposed, infinity", on(_infinite, image, values(4, 3, 3, 3, seed=1))
    yield "conv1d", on(lambda i, w: F.conv1d(i, w), values(2, 3, 997), values(5, 3, 7, seed=1))
    yield "pooling", on(lambda i: (F.max_pool2d(i, 3, 2, 1), F.avg_pool2d(i, 2), F.adaptive_avg_pool2d(i, 3)), image)
    yield "upsampling", on(lambda i: F.interpolate(i, scale_factor=2.0), image)
    yield "bilinear", on(lambda i: F.interpolate(i, (50, 47), mode="bilinear"), image)
    yield "channels last", on(lambda i: (i.contiguous(memory_format=torch.channels_last) + 1).sum(1), image)
    yield "gradients", lambda device: _gradients(device, image)


KERNELS_OF_GPUS = {
    "sum", "norms", "long rows", "matmul", "batches", "linear", "attention", "convolution", "depthwise", "pointwise", "wide",
    "transposed", "transposed, infinity", "conv1d", "gradients",
}  # fmt: skip
"""Contractions and rows: the others have one kernel for all devices."""


def _infinite(image: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """On the CPU in float64: in float32, torch's has NaN where zeros of its own meet infinity."""
    if image.device.type == "cpu":
        image, weight = image.double(), weight.double()
    found = F.conv_transpose2d(image, weight.masked_fill(weight > 2.5, torch.inf), stride=2).float()
    return found.isnan(), found.isinf(), found.nan_to_num(0, 1, -1)


def _written(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[1, 2:, ::3] = 7
    return made


def _gradients(device: torch.device, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = image.clone().to(device).requires_grad_()
    w = values(6, 4, 3, 3, seed=1).to(device).requires_grad_()
    return torch.autograd.grad(F.gelu(F.conv2d(x, w, padding=1)).square().sum(), [x, w])


ALL = bool(os.environ.get("LAPILLI_TEST_ALL"))
TAKEN = {name for name, _ in many() if ALL or crc32(name.encode()) % 2}
TAKEN_OF_GPUS = KERNELS_OF_GPUS & (TAKEN if ALL else {"attention", "depthwise", "linear", "sum", "transposed"})


class Photo(torch.nn.Module):
    """The parts of an image classifier, and what segments and restores."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.depthwise = torch.nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.pointwise = torch.nn.Conv2d(8, 12, 1)
        self.last = torch.nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.relu6(self.norm(self.first(x)))
        y = y + self.depthwise(y)
        z = torch.cat([F.hardswish(self.pointwise(y)), F.interpolate(F.max_pool2d(y, 2), y.shape[2:])], 1)
        return z, self.last(self.pointwise(y).mean((2, 3))), z.softmax(1), z.argmax(1), z > 0.5, z[:, 1::3]


def programs() -> Iterator[tuple[str, Case]]:
    torch.manual_seed(0)
    model, x = Photo().eval().requires_grad_(False), values(2, 3, 45, 49)
    batch = torch.export.Dim("batch", max=4)
    bounded = {"x": {0: batch}}

    def run(target: str | None, dynamic: Any = None) -> Case:
        def case(device: torch.device) -> Any:
            if device.type == "cpu":
                return model(x)
            gpu = schema.DeviceKind.gpu
            if target == "gpu-fp32":
                schema.DeviceKind.gpu = schema.DeviceKind.any  # kernels for GPUs run on lavapipe too
            program = lapilli.compile(model, (x,), target=target, dynamic_shapes=dynamic)
            schema.DeviceKind.gpu = gpu
            assert program.plan.endswith("-parts"), program.plan
            return [torch.as_tensor(o) for o in program(x)]

        return case

    def checked(device: torch.device) -> torch.Tensor:
        checks = [] if device.type == "cpu" else lapilli.verify(model, (x,))
        return torch.tensor([c.error > 1e-5 for c in checks]).any()

    recurrent = torch.nn.GRU(12, 16, batch_first=True).eval()

    def recurrence(device: torch.device) -> torch.Tensor:
        steps = values(9, 37, 12)
        if device.type == "cpu":
            return recurrent(steps)[0].detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, while it exports
            return torch.as_tensor(lapilli.compile(recurrent, (steps,))(steps)[0])

    yield "recurrence", recurrence
    yield "program", run(None)
    yield "program, kernel by kernel", checked
    yield "program, any device", run("any-fp32")
    yield "program, a GPU", run("gpu-fp32")
    yield "program, open sizes", run(None, bounded)
    f = lambda x: (torch.relu(x * 2 + 1).sum(1), x.t().contiguous() + 1, F.softmax(x, 1))  # noqa: E731
    for name, dynamic in (("", False), (" with open sizes", True)):
        compiled = torch.compile(f, backend="vulkan", dynamic=dynamic)
        for n in (3, 131, 17, 160):
            yield f"torch.compile{name} {n}", _either(f, compiled, values(n, 64))


def _either(f: Callable[..., Any], compiled: Callable[..., Any], x: torch.Tensor) -> Case:
    return lambda device: f(x) if device.type == "cpu" else compiled(x.to(device))


def difference(got: Any, wanted: Any) -> str:
    if isinstance(wanted, torch.Tensor):
        got = got.detach().cpu()
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return f"{got.dtype}{list(got.shape)} in place of {wanted.dtype}{list(wanted.shape)}"
        if not wanted.dtype.is_floating_point:
            wrong = int((got != wanted).sum())
            return f"{wrong} of {wanted.numel()} are wrong" if wrong else ""
        error = float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
        return f"the relative error is {error:.1e}" if not error <= 1e-5 else ""
    found = [difference(g, w) for g, w in zip(got, wanted, strict=True)]
    return "; ".join(x for x in found if x)


def main() -> None:
    targets.STORAGE = RANGE  # what programs for every device take as what every device can bind
    warnings.simplefilter("error")  # an operator that runs on the CPU instead
    operators = ((name, case) for name, case in many() if name in TAKEN)
    cases: Iterator[tuple[str, Case]] = itertools.chain(boundaries(), operators, programs())
    if "--gpu-plans" in sys.argv:
        as_gpu.on_any_device()
        cases = ((name, case) for name, case in operators if name in TAKEN_OF_GPUS)
    for name, case in cases:
        try:
            wanted = case(torch.device("cpu"))
            wrong = difference(case(torch.device("vulkan")), wanted)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        print(json.dumps([name, wrong]), flush=True)


if __name__ == "__main__":
    main()
