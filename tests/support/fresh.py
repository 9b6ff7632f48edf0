"""Python in a fresh process, as a reader has it who pastes code into a file: only `import torch` brings Lapilli in.

What the machine lacks is supplied by a sitecustomize: torchvision without its compiled operators, random weights in place of
those that torch.hub would download, and the entry points of a package that is not installed but found on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from installed import ROOT, installed

SITECUSTOMIZE = """
import torch
import torchvision_without_ops


def random_weights(url, *args, **kwargs):
    from torchvision import models

    name = next(n for n in models.list_models() if url.rpartition("/")[2].startswith(n + "-"))
    torch.manual_seed(0)
    model = models.get_model(name, weights=None)
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            # As well-conditioned as trained weights: the statistics of one batch, and norms that do not amplify errors.
            norm.momentum = 1.0
            torch.nn.init.uniform_(norm.weight, 0.4, 0.6)
            torch.nn.init.normal_(norm.bias, 1.0, 0.2)
    with torch.no_grad():
        model.train()(torch.rand(4, 3, 64, 64))
    return model.state_dict()


torch.hub.load_state_dict_from_url = random_weights  # before torchvision imports it
torchvision_without_ops.allow()
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables for a process that finds the package, its entry points and the sitecustomize in the folder."""
    variables = installed(folder)
    (folder / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join([variables["PYTHONPATH"], str(ROOT / "tools")])
    return variables | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def run(folder: Path, *blocks: str, code: int = 0) -> str:
    """Runs blocks of code, one after the other, in one fresh process in the folder; what it printed."""
    file = folder / "pasted.py"
    file.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, file.name],
        cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + (done.stderr if code else "")
