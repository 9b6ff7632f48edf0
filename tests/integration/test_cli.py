"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from command_line import Cli, Page
from PIL import Image

import lapilli
from lapilli import Preprocess

ON_DEVICES = pytest.mark.poor_device
"""Of commands that use one; the others do the same on each."""


def pythons() -> list[str]:
    """This Python, and the one of an environment without torch that `make test` prepares."""
    bare = os.environ.get("LAPILLI_TEST_BARE_PYTHON")
    return [sys.executable, *([bare] if bare else [])]


@pytest.fixture(params=pythons(), ids=["with torch", "without torch"][: len(pythons())])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    return Cli(tmp_path, request.param)


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """A program that says which colour a photo has most of; with preprocessing and labels."""
    prepare = Preprocess(size=(8, 8), scale=1 / 255, mean=(0.0,) * 3, std=(0.1,) * 3)
    metadata = {"preprocess": prepare.dumps(), "labels": json.dumps(["red", "green", "blue"])}
    path = tmp_path / "classes.lap"
    path.write_bytes(tiny.classes(8, metadata))
    return path


def test_bare_environment_has_no_torch() -> None:
    bare = os.environ.get("LAPILLI_TEST_BARE_PYTHON")
    if bare is None:
        pytest.skip("LAPILLI_TEST_BARE_PYTHON is not set; `make test` sets it")
    code = "import importlib.util as u; print([n for n in ('torch', 'slangtorch', 'flatbuffers') if u.find_spec(n)])"
    assert subprocess.run([bare, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@ON_DEVICES
def test_devices(cli: Cli) -> None:
    found = json.loads(cli("devices", "--json").stdout)
    assert found and {"index", "name", "type", "driver", "memory", "features", "limits"} <= found[0].keys()
    assert found[0]["name"].split()[0] in cli("devices").stdout


@ON_DEVICES
def test_run_photo(cli: Cli, classes: Path, tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), (20, 200, 20)).save(tmp_path / "leaf.png")
    Image.new("RGB", (30, 40), (0, 0, 255)).save(tmp_path / "sky.jpg")
    text = cli("run", classes, "leaf.png", "sky.jpg", "--top", "2").stdout
    assert text.index("leaf.png") < text.index("green") < text.index("sky.jpg") < text.rindex("blue")
    runs = json.loads(cli("run", classes, "leaf.png", "sky.jpg", "--json", "--top", "1").stdout)["runs"]
    assert [run["outputs"][0]["top"][0]["label"] for run in runs] == ["green", "blue"]
    assert runs[0]["outputs"][0]["shape"] == [1, 3] and runs[0]["seconds"] > 0


@ON_DEVICES
def test_run_arrays(cli: Cli, scaled: Path, tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)
    np.save(tmp_path / "x.npy", x)
    assert "float32 2×3" in cli("run", scaled, "x.npy", "-o", "y.npy").stdout
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), [[1, 4, 9]] * 2)
    cli("run", scaled, "x.npy", "random", "-o", "y.npz")
    with np.load(tmp_path / "y.npz") as outputs:
        assert sorted(outputs) == ["0.y", "1.y"] and outputs["1.y"].shape == (1, 3)
    assert "float32 5×3" in cli("run", scaled, "random", "--input_dims", "5,3").stdout


def test_report(cli: Cli, tmp_path: Path) -> None:
    """It says what there is, and no name, weight or path of the user's."""
    secret = "secret_name"
    weights = np.array([0.12345, 2, 3], np.float32)
    path = tmp_path / f"{secret}.lap"
    path.write_bytes(tiny.scales(weights, rows="private_rows", metadata={"labels": "hidden", secret: secret}))
    text = cli("report", path).stdout
    for word in (
        "## versions",
        "numpy",
        "## devices",
        "driver",
        "## caches",
        "pipelines",
        "## program",
        "float32[size0, 3]",
    ):
        assert word in text
    found = json.loads(cli("report", path, "--json").stdout)
    assert found["versions"]["lapilli"] == lapilli.__version__ and found["devices"][0]["limits"]
    assert found["program"]["methods"][0]["plans"][0]["kernels"] == {"scale": 2}
    for said in (text, json.dumps(found)):
        for private in (secret, "private_rows", "hidden", "0.12345", str(tmp_path), str(Path.home()), os.sep + "usr"):
            assert private not in said
    assert "## program" not in cli("report").stdout


@ON_DEVICES
def test_bench(cli: Cli, scaled: Path) -> None:
    text = cli("bench", scaled, "--input_dims", "4,3", "--input_type", "float", "--warmup", "1", "--iter", "5").stdout
    for word in ("median", "p95", "min", "load", "Microseconds per iter: ", "Iters per second: ", "peak RSS", "arena"):
        assert word in text
    result = json.loads(cli("bench", scaled, "--json", "--warmup", "0", "--iter", "7").stdout)
    assert result["min_s"] <= result["median_s"] <= result["p95_s"] and result["iterations"] == 7
    assert result["microseconds_per_iter"] == pytest.approx(1e6 / result["iters_per_second"])
    assert result["inputs"] == [[1, 3]] and result["peak_rss"] > result["peak_rss_before_load"] > 1e6


@ON_DEVICES
@pytest.mark.part(2)
def test_profile(cli: Cli, scaled: Path, tmp_path: Path) -> None:
    text = cli("profile", scaled, "--repeat", "2").stdout
    assert "aten.scale" in text and "2 dispatches" in text and text.startswith("▏a run: ")
    assert ("of device" in text) == ("The device copies" in text) == cli.has_torch
    result = json.loads(cli("profile", scaled, "--json", "--trace", "t.json", "--input_dims", "16,3").stdout)
    assert [kernel["flops"] for kernel in result["kernels"]] == [48, 48] and result["seconds"] > 0
    assert result["kernel_seconds"] == pytest.approx(sum(kernel["seconds"] for kernel in result["kernels"]))
    assert ("limits" in result) == cli.has_torch
    if cli.has_torch:
        assert (
            result["limits"]["bytes"] > 1e8 and result["limits"]["flops"] > 1e8 and 0 < result["limits"]["floor"] < 0.1
        )
    assert "limits" not in json.loads(cli("profile", scaled, "--json", "--no-limits").stdout)
    for name in ("scaled.trace.json", "t.json"):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        timed = [event for event in events if event["ph"] == "X"]
        assert len(timed) == 2 and timed[1]["ts"] == pytest.approx(timed[0]["dur"]) and timed[0]["name"] == "aten.scale"


def test_inspect(cli: Cli, scaled: Path, classes: Path, tmp_path: Path) -> None:
    text = cli("inspect", scaled, "--set", "N=16").stdout
    for word in (
        "plan tiny",
        "2 dispatches, 1 barriers",
        "weights",
        "scale",
        "64×1×1",
        "most alive at once 512 B",
        "N=16",
    ):
        assert word in text
    result = json.loads(cli("inspect", scaled, "--json").stdout)
    assert result["sizes"] == {"N": 1} and result["memory"][0]["lower_bound"] == 512
    assert [plan["name"] for plan in result["methods"][0]["plans"]] == ["tiny"]
    cli("inspect", classes, "--html", "page.html")
    page = Page()
    page.feed((tmp_path / "page.html").read_text())
    assert "table" in page.tags and page.tags.count("script") == 1 and page.links == []
    assert not [name for name in page.attributes if name.startswith("on")]
    cli("inspect", scaled, "--html", "scaled.html")
    assert "<rect" in (tmp_path / "scaled.html").read_text()
    assert cli("inspect", scaled, "--profile", scaled, code=2).stderr.count("--html")
    for wrong in ("{", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}'):
        (tmp_path / "wrong.json").write_text(wrong)
        assert "wrong.json" in cli("inspect", scaled, "--html", "p.html", "--profile", "wrong.json", code=1).stderr
    (tmp_path / "a[b]c.lap").write_bytes(scaled.read_bytes())
    for command in (("inspect",), ("bench", "--iter", "1")):
        assert "a[b]c.lap" in cli(*command, "a[b]c.lap").stdout  # brackets are no markup, as in shapes


def test_generic_contractions_are_marked(cli: Cli, tmp_path: Path) -> None:
    """A convolution of volumes with little work, which is not worth a copy of them, has no kernel of its own."""
    model = torch.nn.Conv3d(6, 6, 3, groups=3).eval()
    lapilli.compile(model, (torch.zeros(1, 6, 8, 8, 8),)).save(tmp_path / "groups.lap")
    for command in ("profile", "inspect"):
        text = " ".join(cli(command, "groups.lap").stdout.split())
        assert "generic_convolution" in text and "1 product or convolution is computed element by element" in text


def test_ops(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    found = {entry["name"]: entry for entry in json.loads(cli("ops", "aten.relu", "linalg_eig.", "--json").stdout)}
    relu = found["aten.relu.default"]
    assert relu["core"] and relu["where"] == "gpu" and "pointwise.py" in relu["by"] and relu["dynamic"]
    assert {"float32", "float16", "int32"} <= set(relu["dtypes"])
    assert found["aten.relu_.default"] == relu | {
        "name": "aten.relu_.default",
        "core": False,
        "by": f"as aten.relu.default: {relu['by']}",
    }
    assert found["aten.relu6.default"]["where"] == "gpu" and not found["aten.relu6.default"]["core"]
    complex_ = found["aten.linalg_eig.default"]
    assert complex_["where"] == "cpu" and complex_["dtypes"] is None and complex_["by"]
    text = cli("ops", "relu6").stdout
    for word in ("relu6.default", "f32", "yes", "gpu", "as aten.relu6.default"):
        assert word in text


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["rnu"], 2, "Did you mean 'run'?"),
        (["run", "nothing.lap", "random"], 2, "nothing.lap"),
        (["bench", "scaled.lap", "--iter", "0"], 2, "--iter"),
        (["bench", "scaled.lap", "--iterations", "3"], 2, "--iter"),
        (["run", "scaled.lap"], 2, "INPUTS"),
        (["run", "scaled.lap", "photo.jpg"], 1, "There is no file photo.jpg"),
        (["run", "scaled.lap", "scaled.lap"], 1, "does not say how a photo becomes its input"),
        (["run", "classes.lap", "scaled.lap"], 1, "cannot be read as a photo"),
        (["run", "scaled.lap", "random", "--device", "Nonesuch"], 1, "Nonesuch"),
        (["run", "scaled.lap", "random", "-o", "y.txt"], 1, ".npy or .npz"),
        (["run", "scaled.lap", "random", "--input_dims", "17,3"], 1, "17"),
        (["bench", "scaled.lap", "--input_dims", "1,three"], 1, "1,three"),
        (["bench", "scaled.lap", "--input_dims", "1,3;1,3"], 1, "2 entries; the program has 1 inputs"),
        (["bench", "scaled.lap", "--input_type", "half"], 1, "the program takes 'x': float32[N=1..16, 3]"),
        (["inspect", "scaled.lap", "--set", "M=3"], 1, "dynamic size; the program has: N"),
        (["inspect", "broken.lap"], 1, "broken.lap"),
        (["bench", "broken.lap"], 1, "broken.lap"),
        (["ops", "softmxa"], 1, "No ATen operator has 'softmxa' in its name"),
    ],
)
def test_errors(tmp_path: Path, scaled: Path, classes: Path, args: list[str], code: int, message: str) -> None:
    (tmp_path / "broken.lap").write_bytes(scaled.read_bytes()[:-1])
    done = Cli(tmp_path)(*args, code=code)
    assert message in done.stderr.replace("\n", " ") and done.stdout == ""


def test_compile_without_torch_says_what_to_install(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"not a model")
    message = cli("compile", "model.pt2", code=1).stderr
    if cli.python != sys.executable:
        assert "pip install 'lapilli[compile]'" in message
    assert not (tmp_path / "model.lap").exists()
    assert "Error: " in message


def test_help_and_version(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    text = cli("--help").stdout
    for command in ("devices", "compile", "run", "bench", "profile", "inspect", "ops"):
        assert command in text and "Usage" in cli(command, "--help").stdout
    assert "0.1.0" in cli("--version").stdout
