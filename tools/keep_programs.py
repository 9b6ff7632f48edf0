"""Writes small program files that later versions have to load, with inputs and what PyTorch gives for them: tests/kept.

    python tools/keep_programs.py

Only those that are missing: a file that was kept is never written again. After the format's version has changed it writes new ones
beside the old ones. `tests/integration/test_kept_programs.py` loads and runs them.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lapilli
from lapilli.format.container import FORMAT_VERSION

FOLDER = Path(__file__).parents[1] / "tests" / "kept"
F = torch.nn.functional


class Picture(torch.nn.Module):
    """Convolutions, a norm, a pool, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(8 * 2 * 2, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of 5 classes, for pictures of 8 × 8."""
        return self.layers(x)


class Nested(torch.nn.Module):
    """A dict in, a dict with a tuple out; integers, booleans, a sort."""

    def forward(self, given: dict[str, torch.Tensor], scale: float = 2.0) -> dict[str, Any]:
        """Names of the results."""
        order = torch.argsort(given["x"], dim=-1)
        return {"sorted": (torch.gather(given["x"], -1, order) * scale, order), "any": given["mask"].any()}


class Counting(torch.nn.Module):
    """Keeps a sum from run to run."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum so far."""
        self.total += x
        return self.total * 1.0


class Choosing(torch.nn.Module):
    """Control flow on the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One of two branches."""
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


class Attending(torch.nn.Module):
    """Attention with an open length, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of a sequence (1, length, 8)."""
        q, k, v = self.project(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, -1, 8)


def cases() -> dict[str, Callable[[], tuple[Any, list[tuple[Any, ...]], dict[str, Any]]]]:
    """By name: a module, the arguments of some calls in order, options of `lapilli.compile`."""
    length = torch.export.Dim("length", min=2, max=16)
    return {
        "picture": lambda: (Picture(), [(torch.randn(2, 3, 8, 8),)], {}),
        "picture-half": lambda: (Picture(), [(torch.randn(2, 3, 8, 8),)], {"precision": "fp16"}),
        "nested": lambda: (
            Nested(), [({"x": torch.randn(3, 7), "mask": torch.tensor([False, True])},)], {"metadata": {"made for": "tests"}},
        ),
        "counting": lambda: (Counting(), [(torch.arange(4.0),), (torch.ones(4),)], {}),
        "choosing": lambda: (Choosing(), [(torch.ones(3),), (-torch.ones(3),)], {}),
        "attending": lambda: (
            Attending(), [(torch.randn(1, 5, 8),), (torch.randn(1, 13, 8),)], {"dynamic_shapes": {"x": {1: length}}},
        ),
    }  # fmt: skip


def keep(name: str) -> bytes:
    """A zip archive: the program, the flat arrays of the inputs and of PyTorch's results of each call."""
    torch.manual_seed(0)
    model, calls, options = cases()[name]()
    model.eval()
    program = lapilli.compile(model, calls[0], **options)
    made = io.BytesIO()
    leaves = torch.utils._pytree.tree_leaves
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive, torch.no_grad():
        file = FOLDER / f".{name}.lap"
        program.save(file)
        archive.writestr("program.lap", file.read_bytes())
        file.unlink()
        for number, call in enumerate(calls):
            given = [leaf.clone() for leaf in leaves(call) if isinstance(leaf, torch.Tensor)]
            results = [leaf.numpy() for leaf in leaves(model(*call))]
            for kind, arrays in (("in", [leaf.numpy() for leaf in given]), ("out", results)):
                for place, array in enumerate(arrays):
                    data = io.BytesIO()
                    np.save(data, array)
                    archive.writestr(f"{number}/{kind}{place}.npy", data.getvalue())
    return made.getvalue()


def main() -> None:
    """Writes what is missing."""
    FOLDER.mkdir(exist_ok=True)
    for name in cases():
        path = FOLDER / f"{name}-{FORMAT_VERSION}.zip"
        if not path.exists():
            path.write_bytes(keep(name))
            print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
