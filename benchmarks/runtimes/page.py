"""docs/runtimes.md, from what was measured. What systems have besides is written by hand (FEATURES), not measured."""

from __future__ import annotations

from typing import Any

TITLES = {
    "lapilli": "Lapilli (lavapipe)",
    "torch": "PyTorch, TorchScript (CPU)",
    "onnxruntime": "onnxruntime (CPU)",
    "ncnn": "ncnn (CPU)",
    "ncnn-vulkan": "ncnn (lavapipe)",
    "executorch": "ExecuTorch (XNNPACK, CPU)",
    "tinygrad": "tinygrad (CPU)",
    "mlx": "MLX (CPU)",
}
MODELS = {
    "convolutions": "eight 3×3 convolutions, a picture of 128×128",
    "transformer": "four encoder blocks, 128 × 256",
    "products": "three products, 64 × 1024 × 1024",
}
COLUMNS = ("Lapilli", "onnxruntime", "ncnn", "ExecuTorch", "tinygrad", "MLX")
FEATURES: dict[str, tuple[str, ...]] = {
    "reads": (
        "torch.export, TorchScript, ONNX, GGUF",
        "ONNX",
        "its own; pnnx converts TorchScript and ONNX",
        "torch.export",
        "ONNX, GGUF, weights",
        "weights, GGUF",
    ),
    "GPUs of its wheel": (
        "any with Vulkan 1.1",
        "none in this package (others: CUDA, DirectML, WebGPU)",
        "any with Vulkan",
        "none on Linux (Vulkan: built from source)",
        "CUDA, AMD, OpenCL, Metal, WebGPU",
        "Metal; CUDA in another package",
    ),
    "what runs the file": (
        "a C library, 2 files",
        "a C++ library",
        "a C++ library",
        "a C++ library",
        "Python",
        "C++ or Python",
    ),
    "kernels are made": (
        "ahead, for classes of devices",
        "by hand, in the library",
        "by hand, in the library",
        "by hand, in the library",
        "at run time, by a compiler",
        "by hand, some at run time",
    ),
    "open sizes": (
        "yes",
        "yes",
        "yes, planned anew each time",
        "yes, within bounds",
        "by variables",
        "compiled anew",
    ),
    "training": (
        "torch.compile, device `vulkan`",
        "another package",
        "no",
        "partly",
        "yes",
        "yes",
    ),
    "language models": (
        "yes, OpenAI's interface",
        "another package",
        "some",
        "yes (llama runner)",
        "examples",
        "mlx-lm",
    ),
}


def page(installed: dict[str, Any], rounds: dict[str, list[dict[str, Any]]], about: dict[str, Any]) -> str:
    """The page as Markdown."""
    order = [name for name in TITLES if name in rounds]
    lines = [
        "# Lapilli beside other runtimes of models",
        "",
        "Made by `make runtimes`: each system in an environment of its own, as pip installs it, and the same "
        "weights and inputs for "
        "all. Lapilli and ncnn also run by Vulkan, here on lavapipe, which computes on the CPU: this "
        "compares what runs on processors, "
        "and says nothing about GPUs. [Comparison](comparison.md) has the ways of running PyTorch on Vulkan, "
        "[Performance](performance.md) a GPU.",
        "",
        f"Measured on {about['started']} on {about['cores']} cores; load average {about['load'][0]:.1f} at the start, "
        f"{about['load'][1]:.1f} at the end; other programs used {about['others']:.2f} cores. Float32 "
        f"everywhere, each system's own "
        f"number of threads, from NumPy array to NumPy array; rounds of all systems in turn: {about['rounds']}. "
        "Where others use the cores, medians say little: compare the least.",
        "",
        "## Milliseconds of a run: the median, and the least",
        "",
        "| | " + " | ".join(MODELS.values()) + " | first result, s | memory, MB |",
        "|---|" + "---|" * (len(MODELS) + 2),
    ]
    notes: list[str] = []
    for system in order:
        cells = []
        for name in MODELS:
            found = [r.get(name, {"failed": r.get("failed", "")}) for r in rounds[system]]
            good = [f for f in found if "median" in f]
            if not good:
                notes.append(f"- {TITLES[system]}, {name}: {found[0]['failed']}")
                cells.append("no result")
                continue
            best = min(good, key=lambda f: f["median"])
            if best["error"] > 1e-5:
                notes.append(f"- {TITLES[system]}, {name}: relative error {best['error']:.1e}")
            least = min(f["fastest"] for f in good)
            cells.append(
                f"{best['median'] * 1e3:.2f} / {least * 1e3:.2f}" + (" (wrong)" if best["error"] > 1e-5 else "")
            )
        first = [r["convolutions"]["first"] for r in rounds[system] if "first" in r.get("convolutions", {})]
        peak = [r["peak"] for r in rounds[system] if "peak" in r]
        cells.append(f"{min(first):.2f}" if first else "")
        cells.append(f"{min(peak) / 1e6:.0f}" if peak else "")
        lines.append(f"| {TITLES[system]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "A result is right if it differs from float64 by at most 1e-5 of the largest value; all others are "
        "marked. *First result*: the "
        "first model's, imports and loading included; kernels in caches on the disk are those of the round "
        "before. *Memory*: of the "
        "process at most.",
        *(["", *notes] if notes else []),
        "",
        "## Installing",
        "",
        "| | version | packages | installed, MB |",
        "|---|---|---|---|",
    ]
    for name, facts in installed.items():
        if "failed" in facts:
            lines.append(f"| {name} | {facts['failed']} | | |")
        else:
            lines.append(f"| {name} | {facts['version']} | {facts['packages']} | {facts['installed'] / 1e6:.0f} |")
    lines += [
        "",
        "Lapilli is the player with what it needs (NumPy, cffi); ExecuTorch with torch, which its Python "
        "interface imports. tinygrad "
        "compiles its kernels for the CPU with clang, no package of pip, which is "
        + ("" if about["clang"] else "not ")
        + "installed here.",
        "",
        "## One file, any number of rows",
        "",
        "The products as an ONNX file whose first size is open, at 64, 1 and 17 rows: "
        + "; ".join(
            f"{TITLES[s].split(' (')[0]} {r.get('verdict') or 'refused: ' + r['failed']}"
            for s in order
            if (r := rounds[s][0].get("open sizes"))
        )
        + ". The others read no ONNX file.",
        "",
        "## What they have",
        "",
        "Written by hand, neither measured nor looked up for this page: check a cell before you rely on it.",
        "",
        f"| | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in FEATURES.items()),
        "",
    ]  # fmt: skip
    return "\n".join(lines)
