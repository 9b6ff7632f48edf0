"""Compiled models keep the structure of their inputs and outputs; the command line compiles `.pt2` files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from command_line import Cli

import lapilli


class Pair(NamedTuple):
    total: torch.Tensor
    parts: list[torch.Tensor]


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


torch.utils._pytree.register_dataclass(Output)


class Nested(torch.nn.Module):
    def forward(
        self, batch: dict[str, torch.Tensor], bias: torch.Tensor | None = None, factor: int = 1, *, scale: torch.Tensor
    ) -> Any:
        x = batch["image"] * scale * factor + batch["mask"]
        return Pair(x + 1, [x * 2, x - 1]), {"out": Output(x.relu()), "none": None, "factor": factor}


class Shifted(torch.nn.Module):
    def forward(self, image: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return image + shift


@pytest.mark.poor_device
def test_nested_model() -> None:
    batch = {"mask": torch.rand(4, 3), "image": torch.rand(4, 3)}
    scale = torch.rand(3)
    exported = torch.export.export(Nested(), (batch, None, 3), {"scale": scale}, strict=False)
    expected = Nested()(batch, None, 3, scale=scale)
    with lapilli.compile(exported) as program:
        for call in (
            lambda: program(batch, None, 3, scale=scale),
            lambda: program(batch, scale=scale),
            lambda: program.submit(batch, scale=scale).result(),
        ):
            pair, outputs = call()
            assert type(pair) is Pair and outputs["none"] is None and outputs["factor"] == 3
            torch.testing.assert_close(pair.total, expected[0].total)
            torch.testing.assert_close(pair.parts, expected[0].parts)
            torch.testing.assert_close(outputs["out"].logits, expected[1]["out"].logits)
        arrays = {key: value.numpy() for key, value in batch.items()}
        pair, _ = program(arrays, scale=scale.numpy())
        np.testing.assert_allclose(pair.total, expected[0].total.numpy(), rtol=1e-6)
        with pytest.raises(lapilli.InvalidInputError, match="was 3 when the model was compiled"):
            program(batch, None, 2, scale=scale)
        with pytest.raises(lapilli.InvalidInputError, match="has no 'mask'"):
            program({"image": batch["image"]}, scale=scale)


def test_positional_parameters_may_be_given_as_keywords() -> None:
    x = torch.rand(2, 3)
    with lapilli.compile(Shifted(), (x, torch.ones(3))) as program:
        torch.testing.assert_close(program(x, shift=torch.ones(3)), x + 1)
        torch.testing.assert_close(program(shift=torch.ones(3), image=x), x + 1)


@pytest.mark.long
def test_compile_command(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.ReLU())
    x = torch.rand(2, 6)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    (tmp_path / "labels.json").write_text(json.dumps(["a", "b", "c"]))
    cli = Cli(tmp_path)
    done = cli("compile", "model.pt2", "--metadata", "labels=@labels.json", "--metadata", "note=hello", "--json")
    result = json.loads(done.stdout)
    assert result["bytes"] == (tmp_path / "model.lap").stat().st_size and result["plans"]
    with lapilli.load(tmp_path / "model.lap") as program:
        assert program.metadata["note"] == "hello"
        torch.testing.assert_close(program(x), model(x).detach())
    assert "plans" in cli("compile", "model.pt2", "-o", "half.lap", "--precision", "fp16").stdout
    for args, code, message in (
        (["model.pt2", "-o", "model.pt2"], 1, "would replace the model"),
        (["model.pt2", "--metadata", "labels=a,b"], 1, "must be JSON"),
        (["model.pt2", "--metadata", "labels"], 1, "not KEY=VALUE"),
        (["model.pt2", "--target", "quantum"], 1, "quantum"),
        (["model.pt2", "--precision", "int3"], 2, "int3"),
        (["labels.json"], 1, ".pt2"),
    ):
        assert message in cli("compile", *args, code=code).stderr
