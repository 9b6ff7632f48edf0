"""Image classifiers, batch 1: our time beside torch's in the same run, compile and load times, memory.

    python benchmarks/classifiers.py                      compile, then run here
    python benchmarks/classifiers.py --only compile       only write results/*.lap (needs the compiler)
    python benchmarks/classifiers.py --only run           only run results/*.lap (needs no compiler)

A compile and a load are timed in fresh processes: cold with every cache empty (kernels, pipelines, driver),
warm with the caches that the cold one left. Memory is the growth of peak RSS by load and runs in the warm process; on a
software driver it contains the device's memory too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from common import RESULTS, Caches, bench, cell, cuda_graph, fresh, median, report

MODELS = ("mobilenet_v2", "resnet18", "resnet50")


def build(name: str) -> Any:
    """A torchvision classifier with random weights of a fixed seed, in eval mode."""
    import torch
    import torchvision_without_ops

    torchvision_without_ops.allow()
    import torchvision

    torch.manual_seed(0)
    extra = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, weights=None, **extra).eval()


def compile_one(name: str, precision: str, path: Path) -> None:
    """The work of the compile process: prints its seconds (without imports and building the model)."""
    import torch

    import lapilli

    model, image = build(name), torch.rand(1, 3, 224, 224)
    start = time.perf_counter()
    with lapilli.compile(model, (image,), precision="fp16" if precision == "fp16" else "fp32") as program:
        program.save(path)
    print(json.dumps({"seconds": time.perf_counter() - start}))


def driver_memory() -> int:
    """Bytes of peak memory that the Vulkan drivers take as soon as devices are listed, before any program."""
    code = "from lapilli.cli.common import peak_memory as p; import lapilli; a = p(); lapilli.devices(); print(p() - a)"
    return int(fresh(["-c", code], Caches()))


def torch_times(name: str, precision: str, threads: int | None) -> dict[str, float]:
    """Median seconds of torch for the model: on the CPU (fp32), and with CUDA, host to host and as a CUDA graph."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torchvision") is None:
        return {}
    import torch

    if threads:
        torch.set_num_threads(threads)
    model, image = build(name), torch.rand(1, 3, 224, 224)
    times = {}
    with torch.inference_mode():
        times["torch CPU"] = median(lambda: model(image))
        if torch.cuda.is_available():
            dtype = torch.float16 if precision == "fp16" else torch.float32
            on_gpu = model.to("cuda", dtype)
            times["torch CUDA"] = median(lambda: on_gpu(image.to("cuda", dtype)).cpu(), 10, 100)
            static = image.to("cuda", dtype)
            queue, _ = cuda_graph(lambda: on_gpu(static))

            def replay() -> None:
                queue()
                torch.cuda.synchronize()

            times["CUDA graph"] = median(replay, 10, 100)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help=f"names of torchvision; default: {' '.join(MODELS)}")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "fp16"], default=["fp32"])
    parser.add_argument("--only", choices=["compile", "run"])
    parser.add_argument("--device", help="index or part of a name")
    parser.add_argument("--iter", type=int, default=30)
    parser.add_argument("--threads", type=int, help="threads of torch; default: torch's own choice")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "PRECISION", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compile_one(options.worker[0], options.worker[1], Path(options.worker[2]))
        return

    RESULTS.mkdir(exist_ok=True)
    raw: list[dict[str, Any]] = []
    device = ""
    for name in options.models:
        for precision in options.precision:
            path = RESULTS / f"{name}_{precision}.lap"
            row: dict[str, Any] = {"model": name, "precision": precision}
            if options.only != "run":
                caches = Caches()
                command = [__file__, "--worker", name, precision, str(path)]
                print(f"{name} {precision}: compiling", file=sys.stderr)
                row["compile cold"] = fresh(command, caches)["seconds"]
                row["compile warm"] = fresh(command, caches)["seconds"]
            if options.only != "compile":
                caches = Caches()
                print(f"{name} {precision}: running", file=sys.stderr)
                cold = bench(path, caches, 0, 1, options.device)
                warm = bench(path, caches, 5, options.iter, options.device)
                device = f"{warm['device']} ({warm['plan']})"
                row |= {
                    "load cold": cold["load_s"],
                    "load warm": warm["load_s"],
                    "load+run warm": warm["load_s"] + warm["first_run_s"],
                    "lapilli": warm["median_s"],
                    "memory": warm["peak_rss"] - warm["peak_rss_before_load"],
                    "driver": driver_memory(),
                    "file": path.stat().st_size,
                    "bench": warm,
                }
                row |= torch_times(name, precision, options.threads)
            raw.append(row)
    times = ["lapilli", "torch CPU", "torch CUDA", "CUDA graph", "load cold", "load warm", "load+run warm"]
    times += ["compile cold", "compile warm"]
    used = [key for key in times if any(key in row for row in raw)]
    rows = [
        [row["model"], row["precision"], *(cell(row.get(key)) for key in used)]
        + (
            [f"{row['memory'] / 1e6:.0f}", f"{row['driver'] / 1e6:.0f}", f"{row['file'] / 1e6:.1f}"]
            if "memory" in row
            else []
        )
        for row in raw
    ]
    columns = ["model", "precision", *(f"{key}, ms" for key in used)]
    columns += ["memory, +MB", "of it the driver", "file, MB"] if any("memory" in row for row in raw) else []
    report("classifiers", device or "compiling only", columns, rows, raw)


if __name__ == "__main__":
    main()
