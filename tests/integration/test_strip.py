"""Smaller files for known devices, and where the bytes of a file are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from click.testing import CliRunner

import lapilli
from lapilli import InvalidInputError, player
from lapilli.cli import main
from lapilli.format.container import read_header
from lapilli.program.strip import strip
from lapilli.runtime.description import Description
from lapilli.runtime.file_sizes import FileSizes


def cli(*args: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(a) for a in args])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """A model with a plan for any device and plans for GPUs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5))
    path = tmp_path_factory.mktemp("strip") / "model.lap"
    lapilli.compile(model.eval(), (torch.rand(1, 3, 8, 8),)).save(path)
    return model, path


def sizes_of(data: bytes) -> FileSizes:
    return FileSizes.of(player.describe(data), len(data), read_header(data).structure_size)


def test_a_plan_alone_runs_as_before(compiled: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    model, path = compiled
    x = torch.rand(1, 3, 8, 8)
    before = lapilli.load(path)
    taken = player.NativeProgram.load(path.read_bytes()).info()["methods"][0]["plan"]
    small = tmp_path / "small.lap"
    cli("strip", path, "-o", small, "--plans", taken)
    assert small.stat().st_size < path.stat().st_size
    after = lapilli.load(small)
    assert torch.equal(after(x), before(x)) and torch.allclose(after(x), model(x), atol=1e-5)
    assert [p.name for p in Description.of(small).methods[0].plans] == [taken]
    assert "no plan none" in cli("strip", path, "-o", small, "--plans", "none", code=1).replace("\n", " ")


def test_every_set_of_plans_is_a_valid_file_that_is_no_larger(compiled: tuple[torch.nn.Module, Path]) -> None:
    data = compiled[1].read_bytes()
    names = [plan.name for plan in Description.of(data).methods[0].plans]
    generator = random.Random(0)
    before = sizes_of(data)
    for _ in range(8):
        kept = generator.sample(names, generator.randint(1, len(names)))
        small = strip(data, kept)
        description, after = Description.of(small), sizes_of(small)
        assert [p.name for p in description.methods[0].plans] == [n for n in names if n in kept]
        assert len(small) <= len(data) and strip(small, kept) == small  # there is nothing more to drop
        by_name = {plan.name: plan for plan in before.plans}
        for plan in after.plans:
            assert (plan.kernels, plan.constants) == (by_name[plan.name].kernels, by_name[plan.name].constants)
        if len(kept) == len(names) - 1:
            (dropped,) = set(names) - set(kept)
            assert before.kernels - after.kernels == by_name[dropped].only_kernels
            assert before.constants - after.constants == by_name[dropped].only_constants


def test_metadata_stays_where_it_is_named(tmp_path: Path) -> None:
    data = tiny.scales(np.ones(4, np.float32), metadata={"labels": "[]", "more": "x" * 1000, "lapilli.schedule": "{}"})
    assert set(Description.of(strip(data)).metadata) == {"labels", "more"}
    assert set(Description.of(strip(data, keep_metadata=["labels"])).metadata) == {"labels"}
    assert not Description.of(strip(data, keep_metadata=[])).metadata
    assert len(strip(data, keep_metadata=[])) < len(data) - 1000
    with pytest.raises(InvalidInputError, match="no metadata other; it has labels"):
        strip(data, keep_metadata=["other"])
    path = tmp_path / "a.lap"
    path.write_bytes(data)
    cli("strip", path, "-o", tmp_path / "b.lap", "--keep-metadata", "none")
    assert not Description.of(tmp_path / "b.lap").metadata
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert np.array_equal(lapilli.load(tmp_path / "b.lap")(x), lapilli.load(path)(x))


def test_constants_of_scripts_keep_their_numbers(tmp_path: Path) -> None:
    class OnHost(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.qr(x + torch.arange(9.0).reshape(3, 3))[1] + 1

    program = lapilli.compile(OnHost(), (torch.rand(3, 3),))
    program.save(tmp_path / "a.lap")
    (tmp_path / "b.lap").write_bytes(strip((tmp_path / "a.lap").read_bytes(), keep_metadata=[]))
    x = torch.rand(3, 3)
    assert torch.equal(lapilli.load(tmp_path / "b.lap")(x), program(x))


def test_the_parts_of_a_file_add_up(compiled: tuple[torch.nn.Module, Path]) -> None:
    found = json.loads(cli("inspect", compiled[1], "--size", "--json"))
    parts = ("constants", "kernels", "metadata", "tables", "rest")
    assert sum(found[part] for part in parts) == found["total"] == compiled[1].stat().st_size
    assert all(found[part] >= 0 for part in parts) and found["kernels"] > 0
    assert "alone" in cli("inspect", compiled[1], "--size")
