"""Quantizes small models in every way that is taken, compiles them, and writes a table to docs/quantization.md.

    python tools/quantization.py [--only qnnpack] [--page docs/quantization.md]

Of each configuration: the largest difference from torch's quantized model, in steps of 255 of its range; how many of its products
and convolutions are sums of integers; beside those of the float model, bytes of constants in the file, device memory (constants and
values between layers) and the time of a run; or the sentence with which it is refused. Exit status 1 if a result is more than two
steps off. LAPILLI_DEVICE chooses the device; tables of other devices are kept.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.ao import quantization as recipe
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import lapilli
from lapilli.errors import LapilliError
from lapilli.quantization import VulkanQuantizer, get_symmetric_quantization_config

INT4: Any = getattr(torch, "int4")  # noqa: B009  (no stub has it)
BEGIN, END = "<!-- quantization -->", "<!-- /quantization -->"
MOST_STEPS = 2.0
RUNS = 9


class Feed(torch.nn.Module):
    """Two linear layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(F.gelu(self.first(x)))
        return out


class Network(torch.nn.Module):
    """Norms, depthwise layers, residual sums, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = recipe.QuantStub(), recipe.DeQuantStub()
        self.stem, self.norm, self.relu = torch.nn.Conv2d(3, 32, 3, 2, 1), torch.nn.BatchNorm2d(32), torch.nn.ReLU()
        self.depthwise, self.relu2 = torch.nn.Conv2d(32, 32, 3, 1, 1, groups=32), torch.nn.ReLU()
        self.point, self.sum = torch.nn.Conv2d(32, 32, 1), torch.ao.nn.quantized.FloatFunctional()
        self.wide, self.relu3 = torch.nn.Conv2d(32, 64, 3, 1, 1), torch.nn.ReLU()
        self.pool, self.mean = torch.nn.MaxPool2d(2), torch.nn.AdaptiveAvgPool2d(1)
        self.last = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.stem(self.quant(x))))
        x = self.sum.add(x, self.point(self.relu2(self.depthwise(x))))
        x = self.relu3(self.wide(self.pool(x)))
        out: torch.Tensor = self.dequant(self.last(self.mean(x).flatten(1)))
        return out


@dataclass(frozen=True)
class Made:
    """plain: the float model. source: what is compiled. reference: torch's quantized model."""

    plain: torch.nn.Module
    source: Any
    reference: Callable[..., torch.Tensor]
    inputs: torch.Tensor


def weights(config: Any) -> Callable[[], Made]:
    def make() -> Made:
        plain, model, x = Feed().eval(), Feed().eval(), torch.randn(8, 512)
        model.load_state_dict(plain.state_dict())
        quantize_(model, config)
        return Made(plain, model, model, x)

    return make


def graph(quantizer: Callable[[], Any], qat: bool = False) -> Callable[[], Made]:
    def make() -> Made:
        plain, x = Network().eval(), torch.randn(1, 3, 96, 96)
        prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(torch.export.export(plain, (x,)).module(), quantizer())
        for _ in range(3):
            prepared(torch.randn_like(x))
        model = convert_pt2e(prepared)
        return Made(plain, torch.export.export(model, (x,)), model, x)

    return make


def eager(engine: str, turned: Callable[[Any, torch.Tensor], Any]) -> Callable[[], Made]:
    def make() -> Made:
        torch.backends.quantized.engine = engine
        plain, x = Network().eval(), torch.randn(1, 3, 96, 96)
        model = recipe.fuse_modules(plain, [["stem", "norm", "relu"], ["depthwise", "relu2"], ["wide", "relu3"]])
        model.qconfig = recipe.get_default_qconfig(engine)
        recipe.prepare(model, inplace=True)
        for _ in range(3):
            model(torch.randn_like(x))
        model = recipe.convert(model)
        return Made(plain, turned(model, x), model, x)

    return make


def dynamic(dtype: torch.dtype) -> Callable[[], Made]:
    def make() -> Made:
        plain, x = Feed().eval(), torch.randn(8, 512)
        model = recipe.quantize_dynamic(plain, {torch.nn.Linear}, dtype=dtype)
        return Made(plain, model, model, x)

    return make


def ours(**options: Any) -> Callable[[], Any]:
    return lambda: VulkanQuantizer().set_global(get_symmetric_quantization_config(**options))


def x86(**options: Any) -> Callable[[], Any]:
    return lambda: X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(**options))


CONFIGURATIONS: dict[str, Callable[[], Made]] = {
    "torchao: int4 weights, groups of 32": weights(IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(32))),
    "torchao: int4 weights, rows": weights(IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerAxis(0))),
    "torchao: int8 weights, rows": weights(IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))),
    "torchao: Int8WeightOnly": weights(Int8WeightOnlyConfig()),
    "torchao: 8da4w, groups of 32": weights(
        Int8DynamicActivationIntxWeightConfig(weight_dtype=INT4, weight_granularity=PerGroup(32))
    ),
    "torchao: 8da8w": weights(Int8DynamicActivationInt8WeightConfig()),
    "PT2E: VulkanQuantizer, per channel": graph(ours(is_per_channel=True)),
    "PT2E: VulkanQuantizer, per tensor": graph(ours()),
    "PT2E: VulkanQuantizer, 4-bit weights": graph(ours(is_per_channel=True, weight_bits=4)),
    "PT2E: VulkanQuantizer, 2-bit weights": graph(ours(weight_bits=2)),
    "PT2E: VulkanQuantizer, dynamic": graph(ours(is_dynamic=True)),
    "PT2E: VulkanQuantizer, training": graph(ours(is_per_channel=True, is_qat=True), True),
    "PT2E: X86InductorQuantizer": graph(x86()),
    "PT2E: X86InductorQuantizer, dynamic": graph(x86(is_dynamic=True)),
    "eager: qnnpack": eager("qnnpack", lambda m, x: m),
    "eager: x86": eager("x86", lambda m, x: m),
    "eager: x86, traced": eager("x86", lambda m, x: torch.jit.trace(m, x)),
    "eager: x86, scripted": eager("x86", lambda m, x: torch.jit.script(m)),
    "eager: quantize_dynamic, qint8": dynamic(torch.qint8),
    "eager: quantize_dynamic, float16": dynamic(torch.float16),
}


def row(name: str) -> tuple[str, bool]:
    """A line of the table, and whether it is right."""
    torch.manual_seed(0)
    try:
        made = CONFIGURATIONS[name]()
        with lapilli.compile(made.source, (made.inputs,), fallback="error") as program:
            got, wanted = program(made.inputs), made.reference(made.inputs)
            report, size, taken, held = (
                program.report(),
                stored(program),
                seconds(program, made.inputs),
                occupied(program),
            )
    except LapilliError as error:
        reason = re.sub(r" in \S+, line \d+: `[^`]*`", "", str(error).splitlines()[0])  # not where in torch's files
        return f"| {name} | refused: {reason} | | | | |", True
    with lapilli.compile(made.plain, (made.inputs,)) as program:
        floats, before, whole = stored(program), seconds(program, made.inputs), occupied(program)
    steps = float((got - wanted).abs().max() / ((wanted.max() - wanted.min()) / 255))
    layers = f"{len(report.in_integers)} of {len(report.in_integers) + len(report.dequantized)}"
    sizes = f"{size / floats:.2f}", f"{held / whole:.2f}"
    columns = (name, f"{steps:.2g}", layers, *sizes, f"{taken * 1e3:.1f} ({before * 1e3:.1f})")
    return f"| {' | '.join(columns)} |", steps <= MOST_STEPS


def stored(program: lapilli.Program) -> int:
    return sum(c.size for c in program.description.constants)


def occupied(program: lapilli.Program) -> int:
    """Bytes on the device, without what is given and returned."""
    memory = program.memory()
    return memory.constants + memory.states + memory.arena


def seconds(program: lapilli.Program, x: torch.Tensor) -> float:
    program(x)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        program(x)
        times.append(time.perf_counter() - start)
    return min(times)


def table(device: str, rows: list[str]) -> str:
    head = (
        "| configuration | steps off | layers in integers | file, of float's | device memory, of float's | ms (float) |"
    )
    head += f"\n|{'---|' * 6}"
    return f"**{device}**\n\n{head}\n" + "\n".join(rows) + "\n"


def written(page: str, device: str, text: str) -> str:
    """A page with this device's table in place of an older one, or after those of other devices."""
    before, _, rest = page.partition(BEGIN)
    inside, _, after = rest.partition(END)
    if not after and END not in page:
        raise SystemExit(f"the page has no place for tables: {BEGIN} and {END}")
    others = [t for t in re.split(r"(?m)^(?=\*\*)", inside.strip()) if t.strip() and not t.startswith(f"**{device}**")]
    tables = "\n".join(t.strip() + "\n" for t in (*others, text))
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a part of the name of a configuration; then no page is written")
    parser.add_argument("--page", type=Path, default=Path("docs/quantization.md"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, right = [], True
    for name in CONFIGURATIONS:
        if given.only in name:
            line, fine = row(name)
            print(line, flush=True)
            rows.append(line)
            right &= fine
    if not given.only:
        device = lapilli.devices()[0].name
        given.page.write_text(written(given.page.read_text(), device, table(device, rows)))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
