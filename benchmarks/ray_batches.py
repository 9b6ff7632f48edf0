"""What Ray adds to a batch: map_batches of `lapilli.ray` beside the same program in a loop, on one node of this machine.

    python benchmarks/ray_batches.py [--batches 200]

The program does next to nothing, so that what is left is the way there and back: blocks in the object store, the actor's call,
columns to arrays. Prints a table of milliseconds for a batch, the least of several runs; docs/scaling.md has it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import tiny

import lapilli
from lapilli.ray import batch_runs, columns, predict

CASES = ((256, 384), (256, 768 * 4), (16, 3 * 224 * 224))
"""Rows of a batch, float32 of a row: embeddings, a wide layer, pictures."""


class Doubling:
    """What Ray costs by itself: an actor that makes a new column of the same size by NumPy."""

    def __call__(self, table: Any) -> Any:
        """A batch with the column "y" in place of "data"."""
        return columns.with_columns(table, {"data"}, {"y": columns.to_array(table["data"]) * 2})


def seconds(run: Callable[[], Any], times: int) -> float:
    """The least time of a function: what others of the machine take comes on top, and is not its own."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    return min(took)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    ray.init(resources={"vulkan": 1}, num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    print(
        "| rows | bytes of a row | alone, ms | with columns, ms | through Ray, ms | NumPy through Ray, ms | driver's CPU, ms |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for rows, width in CASES:
            path = Path(folder) / f"{width}.lap"
            path.write_bytes(tiny.scales(np.ones(width, np.float32), high=rows))
            x = np.random.default_rng(0).random((rows, width), dtype=np.float32)
            batches = max(8, min(given.batches, (1 << 28) // x.nbytes))
            block = ray.data.from_numpy(x).take_batch(rows, batch_format="pyarrow")
            with lapilli.load(path) as program:
                method = program.methods["forward"]

                def whole() -> Any:
                    (y,) = batch_runs.run(method, [columns.to_array(block["data"])])  # noqa: B023
                    return columns.with_columns(block, {"data"}, {"y": y})  # noqa: B023

                alone = seconds(lambda: program(x), 20)  # noqa: B023
                local = seconds(whole, 20)
            few = ray.data.from_numpy([x] * 4).materialize()
            many = ray.data.from_numpy([x] * batches).materialize()

            def through(data: Any) -> None:
                done = predict(data, path, batch_size=rows, inputs={"x": "data"}).materialize()  # noqa: B023
                assert done.count() == data.count()

            def plain(data: Any) -> None:
                options: dict[str, Any] = {"batch_format": "pyarrow", "num_cpus": 0, "resources": {"vulkan": 1}}
                pool = ray.data.ActorPoolStrategy(size=1)
                data.map_batches(Doubling, batch_size=rows, compute=pool, **options).materialize()  # noqa: B023

            start = time.process_time()
            through(many)
            cpu = (time.process_time() - start) / batches
            through(few)
            plain(few)
            each, floor = (
                (seconds(lambda: run(many), given.repeat) - seconds(lambda: run(few), given.repeat)) / (batches - 4)  # noqa: B023
                for run in (through, plain)
            )
            times = " | ".join(f"{1e3 * seconds_:.2f}" for seconds_ in (alone, local, each, floor, cpu))
            print(f"| {rows} | {4 * width} | {times} |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
