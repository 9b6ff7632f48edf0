"""Runs a script in a fresh Python that finds Lapilli as if it were installed: PyTorch loads the device by its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def installed(folder: Path) -> dict[str, str]:
    """The variables of a process that finds the package and its entry points for PyTorch."""
    info = folder / "site" / "lapilli-0.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        lines = [
            line
            for group, declared in groups.items()
            for line in (f"[{group}]", *(f"{name} = {target}" for name, target in declared.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lapilli\nVersion: 0\n")
    path = os.pathsep.join([str(folder / "site"), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def run_installed(script: str, folder: Path, timeout: float = 120, **environment: str) -> str:
    """Runs a script with the environment changed by the keywords; returns what it printed. Fails where the script does."""
    (folder / "installed.py").write_text(textwrap.dedent(script))
    if "VK_DRIVER_FILES" in environment:
        environment["VK_ICD_FILENAMES"] = environment["VK_DRIVER_FILES"]  # its name in older loaders
    done = subprocess.run(
        [sys.executable, str(folder / "installed.py")], capture_output=True, text=True, timeout=timeout,
        env={**installed(folder), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
