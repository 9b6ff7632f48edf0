"""apple/LapilliModule.mm: run here, on GNUstep's Foundation and GCC's runtime, and compiled for Apple's with Clang of zig."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lapilli
from lapilli.mobile import optimize_for_mobile

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "apple" / "LapilliModule.mm"
PLAYER = ROOT / "build" / "package" / "liblapilli.so"
INCLUDE = [f"-I{ROOT / folder}" for folder in ("apple/include", "native/include")]
APPLES = [
    sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos.11.0", "-fobjc-arc", "-std=c++17", "-Wall", "-Wextra",
    "-Werror", f"-I{ROOT / 'tests' / 'apple' / 'foundation'}", *INCLUDE,
]  # fmt: skip


class Net(nn.Module):
    """As MobileNetV2 is called, and as small as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 7, 4), nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.conv(x).relu().mean((2, 3)))
        return found


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("application") / "predict"
    gcc = Path(subprocess.check_output(["gcc", "-print-libgcc-file-name"], text=True)).parent
    subprocess.run(
        [
            "clang++", "-std=c++17", "-fobjc-runtime=gcc", "-fobjc-exceptions", "-fconstant-string-class=NSConstantString", "-Wall",
            "-Wextra", "-Werror", "-Wno-incomplete-implementation", "-isystem", "/usr/include/GNUstep", "-isystem", gcc / "include",
            *INCLUDE, SOURCE, ROOT / "tests" / "apple" / "predict.mm", PLAYER, "-lgnustep-base", f"-L{gcc}", "-lobjc",
            f"-Wl,-rpath,{PLAYER.parent}", "-o", made,
        ],
        check=True,
    )  # fmt: skip
    return made


@pytest.mark.parametrize("kind", ["lap", "pt"])
def test_it_predicts_what_python_does(application: Path, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(5)
    model, image, program = Net().eval(), torch.randn(1, 3, 224, 224), tmp_path / f"model.{kind}"
    if kind == "lap":
        lapilli.compile(model, (image,), target="metal").save(program)
    else:
        optimized = optimize_for_mobile(torch.jit.script(model), backend="metal")
        optimized(image)
        optimized._save_for_lite_interpreter(str(program))
    (tmp_path / "image").write_bytes(image.numpy().tobytes())
    done = subprocess.run(
        [application, program, tmp_path / "image"], capture_output=True, text=True, env=_environment(tmp_path)
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    found = np.array([float.fromhex(line) for line in lines[:11]], np.float32)
    wanted = lapilli.load(program)(image.numpy())[0]
    assert (found == wanted).all()
    with torch.no_grad():
        assert np.abs(found - model(image)[0].numpy()).max() < 1e-2
    assert lines[11].startswith("same 0 1 1 0 8 (1, 11) llvmpipe")
    assert "takes 4 bytes; 3 were given" in lines[12]
    assert "must be float32 of shape (1, 3, 224, 224)" in lines[13]
    assert lines[14] == "error 3: Cannot open /nowhere.lap: No such file or directory."
    assert len(lines) == 15


def test_without_a_file_it_says_so(application: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [application, tmp_path / "no.pt", "x"], capture_output=True, text=True, env=_environment(tmp_path)
    )
    assert done.returncode == 1 and "error 3: Cannot open" in done.stdout


def _environment(folder: Path) -> dict[str, str]:
    """With a home of its own, where Foundation has the folder of caches."""
    return {**os.environ, "HOME": str(folder), "GNUSTEP_USER_ROOT": str(folder)}


def test_it_compiles_for_apples_runtime(tmp_path: Path) -> None:
    """With reference counts by the compiler, and nullability as in Apple's headers."""
    made = tmp_path / "module.o"
    subprocess.run([*APPLES, "-c", SOURCE, "-o", made], check=True)
    symbols = made.read_bytes()
    assert b"_OBJC_CLASS_$_LapilliModule" in symbols and b"_objc_storeStrong" in symbols


def test_mistakes_of_it_are_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.mm"
    for change in (
        ("objectAtIndex:0", "firstOne"),
        ("[super init]", "[super release]"),
        ("(self = [super init])", "(self = nullptr]"),
    ):
        text = SOURCE.read_text()
        assert change[0] in text
        wrong.write_text(text.replace(*change))
        done = subprocess.run([*APPLES, "-c", wrong, "-o", tmp_path / "wrong.o"], capture_output=True, text=True)
        assert done.returncode != 0 and "error:" in done.stderr, change
