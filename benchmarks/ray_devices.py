"""Rows a second through Ray on one, two and more devices of this machine: ResNet50 on pictures, and sentence embeddings.

    python benchmarks/ray_devices.py [--devices 1 2 4] [--pictures 49152] [--texts 250000]

From Arrow blocks of the object store to Arrow blocks there; all are one block. Weights are random; pictures are bytes, normalized
in the program; a text has 64 tokens. Actors take seconds to start, at different times, so what counts is how fast blocks come once
two for each device have come: the slope of a line through all later ones, which come in bunches. What came before is said beside
it, and the same batches in this process: a program on one device, a pool on several. Prints a table; docs/scaling.md has it."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from performance.models import Sentence, classifier
from ray_batches import seconds
from torch import Tensor, nn
from torch.export import Dim

import lapilli
from lapilli.ray import columns, predict, ship

TOKENS = 64


class Pictures(nn.Module):
    """ResNet50 on bytes [batch, 3, 224, 224]; the result is [batch, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self.network = classifier("resnet50")
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1))

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.network((data / 255 - self.mean) / self.deviation)
        return result


class Texts(nn.Module):
    """Embeddings [batch, 384] of length 1 of tokens [batch, 64], int32."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Sentence(TOKENS)

    def forward(self, data: Tensor) -> Tensor:
        return nn.functional.normalize(self.encoder(data.long()).mean(1), dim=1)


def file(model: nn.Module, example: Tensor, most: int, path: Path) -> Path:
    batch = Dim("batch", min=1, max=most)
    with lapilli.compile(model, (example,), precision="fp16", dynamic_shapes=({0: batch},)) as program:
        program.save(path)
    return path


def alone(path: Path, block: Any, most: int, runs: int, devices: int) -> float:
    """Rows a second in this process."""
    with lapilli.load(path, device=0 if devices == 1 else list(range(devices))) as program:
        for _ in program.map([(block,)] * 2 * devices):
            pass
        return most * runs / seconds(lambda: list(program.map([(block,)] * runs)), 1)


def through_ray(path: Path, data: Any, rows: int, devices: int) -> tuple[float, float, Any]:
    """Rows a second, seconds until two blocks for each device had come, and a block of the result."""
    shipped, at_once, one = ship(path), data.shape[0], ray.data.from_numpy([data]).materialize()
    given = one.union(*[one] * (max(rows // at_once, 8 * devices) - 1)).materialize()  # a block, many times
    start = time.perf_counter()
    done = predict(given, shipped, batch_size=at_once, actors=devices, inputs={"data": "data"})
    came: list[float] = []
    many: list[int] = []
    for block in done.iter_batches(batch_size=None, batch_format="pyarrow"):
        came.append(time.perf_counter() - start)
        many.append(block.num_rows)
    assert sum(many) == given.count()
    later = slice(2 * devices, None)
    return float(np.polyfit(came[later], np.cumsum(many)[later], 1)[0]), came[2 * devices - 1], block


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--pictures", type=int, default=49_152, help="of each device; 0: none")
    parser.add_argument("--texts", type=int, default=250_000, help="of each device; 0: none")
    parser.add_argument("--rows", type=int, nargs=2, default=[64, 256], help="of a run: pictures and texts")
    parser.add_argument(
        "--runs", type=int, default=16, help="of a batch: the driver needs some milliseconds for each batch"
    )
    given = parser.parse_args()
    found = lapilli.devices()
    numbers = [n for n in given.devices if n <= len(found)]
    print(f"{found[0].name}, {len(found)} of them")
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (given.rows[0] * given.runs, 3, 224, 224), np.uint8)
    texts = random.integers(1, 2000, (given.rows[1] * given.runs, TOKENS), np.int32)
    ray.init(resources={"vulkan": len(found)}, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    print("| | devices | in this process, rows/s | of one | through Ray, rows/s | of one | to begin, s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, model, data, most, rows in (
            ("texts", Texts(), texts, given.rows[1], given.texts),
            ("pictures", Pictures(), pictures, given.rows[0], given.pictures),
        ):
            if not rows:
                continue
            path = file(model, torch.from_numpy(data[:2]), most, Path(folder) / f"{name}.lap")
            with lapilli.load(path, device=0) as program:
                wanted = program(data[:most])[:4]
            first: tuple[float, float] | None = None
            for n in numbers:
                here = alone(path, data[:most], most, max(2, rows // most) * n, n)
                ray_, start, done = through_ray(path, data, rows * n, n)
                got = columns.to_array(done[next(c for c in done.column_names if c != "data")])[: len(wanted)]
                assert np.allclose(got, wanted, atol=1e-2 * np.abs(wanted).max()), "Ray's rows are others"
                first = first or (here, ray_)
                shown = f"{here:,.0f} | {here / first[0]:.2f} | {ray_:,.0f} | {ray_ / first[1]:.2f} | {start:.1f}"
                print(f"| {name} | {n} | {shown} |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
