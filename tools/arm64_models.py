"""Programs that this machine compiles, run by arm64's `lapilli-run` under emulation: results against torch, and against this
machine's own `lapilli-run`.

    python tools/arm64_models.py BUILD-OF-ARM64 BUILD-OF-THIS-MACHINE PREFIX-OF-THE-COMMAND...
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from skimage import data
from torch import nn

from lapilli.compiler import compile_to_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
demo = importlib.import_module("efficientnet_lite0")

BOUND = 1e-5
"""Relative error (norm) that results in float32 may have, as in tests/support/agreement.py."""


class Block(nn.Module):
    """Attention, a gate and a norm: (2, 13, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 61), nn.Linear(61, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.attention(x, x, x, need_weights=False)[0]
        return y + self.down(nn.functional.gelu(self.up(self.norm(y))))


class Integers(nn.Module):
    """Small and negative integers, comparisons, an index: what a signed or unsigned char would change."""

    def forward(self, a: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return a * 3 - 200, n.clamp(-5, 5).to(torch.int8), a[n.long() % a.shape[0]] > 0


def relative(found: NDArray[np.generic], wanted: NDArray[np.generic]) -> float:
    if wanted.dtype.kind != "f":
        return float(not np.array_equal(found, wanted))
    return float(np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))


def run(
    command: list[str], folder: Path, model: Path, inputs: list[NDArray[np.generic]], n: int
) -> list[NDArray[np.generic]]:
    arguments = [str(model)]
    for k, values in enumerate(inputs):
        np.save(folder / f"in{k}.npy", values)
        arguments += ["--input", str(folder / f"in{k}.npy")]
    for k in range(n):
        arguments += ["--output", str(folder / f"out{k}.npy")]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
    return [np.load(folder / f"out{k}.npy") for k in range(n)]


def halves_are_refused(emulated: list[str], folder: Path) -> bool:
    """Reading 16-bit floats would end the process with arm64's lavapipe of Mesa 22 (hal/known_faults.cpp); others run this."""
    path, inputs = folder / "half.lap", (torch.randn(5, 33),)
    path.write_bytes(compile_to_bytes(nn.Linear(33, 17), inputs, precision="fp16"))
    done = subprocess.run([*emulated, str(path)], capture_output=True, text=True)
    return done.returncode == 0 or (done.returncode > 0 and "ends the process with this driver" in done.stderr)


def main() -> None:
    arm, here = Path(sys.argv[1]), Path(sys.argv[2])
    emulated = [*sys.argv[3:], str(arm / "apps" / "lapilli-run")]
    own = [str(here / "apps" / "lapilli-run")]
    torch.manual_seed(0)
    photo = torch.from_numpy(demo.PREPARE(Image.fromarray(data.astronaut())))
    cases: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], float]] = {
        "attention": (Block().eval(), (torch.randn(2, 13, 32),), BOUND),
        "integers": (Integers(), (torch.arange(-7, 6, dtype=torch.int32), torch.arange(-90, 90, 17)), 0),
        "specials": (nn.Softplus(), (torch.tensor([np.nan, np.inf, -np.inf, 0.0, -0.0, 88.0, 1e-40]),), 0),
        "EfficientNet-Lite0": (demo.pretrained(), (photo,), BOUND),
    }
    failed = False
    print("| program | against torch | against x86-64 |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        for title, (model, inputs, bound) in cases.items():
            path = folder / "model.lap"
            path.write_bytes(compile_to_bytes(model, inputs))
            wanted = model(*inputs)
            wanted = [t.numpy() for t in (wanted if isinstance(wanted, tuple) else (wanted,))]
            arrays = [t.numpy() for t in inputs]
            found = run(emulated, folder, path, arrays, len(wanted))
            other = run(own, folder, path, arrays, len(wanted))
            if title == "specials":  # to compare what is no number, and signs of zeros
                assert np.array_equal(np.isnan(found[0]), np.isnan(wanted[0]))
                found, wanted, other = ([np.nan_to_num(v[0], posinf=1e3, neginf=-1e3)] for v in (found, wanted, other))
                bound = BOUND
            to_torch = max(map(relative, found, wanted))
            to_host = max(map(relative, found, other))
            failed = failed or not (to_torch <= bound and to_host <= bound)
            print(f"| {title} | {to_torch:.1e} | {to_host:.1e} |")
            if title == "EfficientNet-Lite0":
                best = [int(v[0].argmax()) for v in (found, wanted)]
                failed = failed or best[0] != best[1]
                print(f"\nThe photo is: {demo.LABELS[best[0]]}", file=sys.stderr)
        failed = not halves_are_refused(emulated, folder) or failed
    if failed:
        sys.exit("Results differ by more than they may.")


if __name__ == "__main__":
    main()
