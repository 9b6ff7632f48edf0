"""The command line with photos, arrays, folders and narrow terminals as people have them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from click.testing import CliRunner
from numpy.typing import NDArray
from PIL import Image

import lapilli
from lapilli import InvalidInputError, Preprocess
from lapilli.cli import main
from lapilli.cli.common import to_bits
from lapilli.program import schema as fb
from lapilli.runtime import preprocess
from lapilli.runtime.preprocess import open_photo


def cli(*args: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(a) for a in args])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout if code == 0 else done.output  # beside results, notices of other work may be written


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    prepare = Preprocess(size=(8, 8), mean=(0.0,) * 3, std=(0.1,) * 3)
    metadata = {
        "preprocess": prepare.dumps(),
        "labels": json.dumps(["red", "green", "blue"]),
        "lapilli.own": "x" * 5000,
    }
    path = tmp_path / "classes.lap"
    path.write_bytes(tiny.classes(8, metadata))
    return path


def test_a_bad_photo_leaves_the_good_ones(classes: Path, tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), (20, 200, 20)).save(tmp_path / "leaf.png")
    Image.new("RGB", (30, 40), (0, 0, 255)).save(tmp_path / "sky.png")
    (tmp_path / "bad.png").write_bytes((tmp_path / "sky.png").read_bytes()[:40])
    photos = [tmp_path / name for name in ("leaf.png", "bad.png", "none.png", "sky.png")]
    text = cli("run", classes, *photos, "-o", tmp_path / "new" / "folder" / "scores.npz", "--top", "1", code=1)
    assert "green" in text and "blue" in text and "2 of 4 inputs failed" in text
    with np.load(tmp_path / "new" / "folder" / "scores.npz") as scores:
        assert sorted(scores) == ["0.scores", "3.scores"]
    text = cli("run", classes, *photos, "--json", code=1)
    runs = json.JSONDecoder().raw_decode(text)[0]["runs"]
    assert ["error" in run for run in runs] == [False, True, True, False]
    assert "cannot be read as a photo" in cli("run", classes, photos[1], code=1)


def test_folders_are_made_for_what_is_written(classes: Path, tmp_path: Path) -> None:
    cli("inspect", classes, "--html", tmp_path / "a" / "b.html")
    cli("profile", classes, "--trace", tmp_path / "c" / "d.json", "--repeat", "1")
    cli("run", classes, "random", "-o", tmp_path / "e" / "f.npy")
    assert (tmp_path / "a/b.html").exists() and (tmp_path / "c/d.json").exists() and (tmp_path / "e/f.npy").exists()
    (tmp_path / "file").write_text("")
    assert "file" in cli("run", classes, "random", "-o", tmp_path / "file" / "f.npy", code=1)


def test_places_where_nothing_can_be_written_are_refused_before_any_work(tmp_path: Path) -> None:
    """No command reads its model, which is none here."""
    given, blocked = tmp_path / "given", tmp_path / "file" / "more" / "result"
    given.write_text("no model")
    (tmp_path / "file").write_text("")
    for command in (
        ("compile", given, "-o"),
        ("compile", given, "--msl"),
        ("tune", given, "-o"),
        ("tune", "--export"),
        ("strip", given, "-o"),
        ("sign", given, "--key", given, "-o"),
        ("keygen",),
        ("run", given, "random", "-o"),
        ("inspect", given, "--html"),
        ("profile", given, "--trace"),
        ("generate", given, "-o"),
        ("transcribe", given, given, "-o"),
    ):
        text = " ".join(cli(*command, blocked, code=1).split())
        assert "because nothing can be put into" in text and "it is a file. Name another place." in text, (
            command,
            text,
        )
    cli("keygen", tmp_path / "keys" / "mine")
    assert (tmp_path / "keys" / "mine.pub").exists()


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "L", "RGB", "1", "P", "LA"])
def test_photos_of_16_bits_are_as_bright_as_those_of_8(tmp_path: Path, mode: str) -> None:
    grey = np.linspace(0, 255, 64).reshape(8, 8).astype(np.uint8)
    wide = grey.astype(np.uint16) * 257
    if mode == "I;16":
        Image.fromarray(wide).save(tmp_path / "grey.png")
        photo = open_photo(tmp_path / "grey.png")
    elif mode == "I;16B":
        photo = Image.frombytes(mode, (8, 8), wide.astype(">u2").tobytes())
    elif mode == "I":
        photo = Image.fromarray(wide.astype(np.int32))
    else:
        Image.fromarray(grey).convert(mode).save(tmp_path / "grey.png")
        photo = open_photo(tmp_path / "grey.png")
    prepare = Preprocess(size=(8, 8), scale=1.0, mean=(0.0,), std=(1.0,), interpolation="nearest")
    expected = grey if mode != "1" else np.asarray(Image.fromarray(grey).convert("1").convert("L"))
    assert np.abs(prepare(photo)[0, 0] - expected).max() <= 1


def test_photos_that_have_no_brightness_or_too_many_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Preprocess(size=(8, 8), resize=8192)
    for pixels in (np.full((4, 4), 0.5, np.float32), np.full((4, 4), 1 << 20, np.int32), np.full((4, 4), -1, np.int32)):
        with pytest.raises(InvalidInputError, match="8 or 16 bits"):
            prepare(Image.fromarray(pixels))
    with pytest.raises(InvalidInputError, match="pixels on its way"):
        prepare(Image.new("L", (60_000, 1)))  # 8192 × 491,520,000
    Image.new("L", (300, 300)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100 * 100)
    with pytest.raises(InvalidInputError, match="decompression bomb"):
        open_photo(tmp_path / "large.png")


@pytest.mark.parametrize(
    "change",
    [{"size": [1 << 20, 8]}, {"resize": 1 << 40}, {"size": [8.5, 8]}, {"size": "ab"}, {"size": 8}, {"size": [[8], 8]},
     {"scale": "x"},     {"mean": [float("nan")] * 3}, {"std": [float("inf")] * 3}, {"mean": [[]] * 3}, {"crop_pct": None},
     {"resize": True},
     {"interpolation": []}, {"mean": []}, {"__class__": 1}],
)  # fmt: skip
def test_preprocessing_that_no_photo_goes_through_is_refused(change: dict[str, object]) -> None:
    node = json.loads(Preprocess(size=(8, 8)).dumps()) | change
    with pytest.raises(InvalidInputError, match="preprocess"):
        preprocess.Preprocess.loads(json.dumps(node))


@pytest.mark.parametrize("text", ["", "[", "[]", "1", "null", "[" * 99999, '"' + "x" * (17 << 20) + '"'])
def test_preprocessing_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="preprocess"):
        preprocess.Preprocess.loads(text)


@pytest.mark.parametrize("labels", ["[", "{}", '[{"a": 1}, 2, 3]', "[" * 99999, '["\\u001b[2Jred", "g", "b"]'])
def test_labels_of_any_kind_leave_the_run_alone(tmp_path: Path, labels: str) -> None:
    path = tmp_path / "odd.lap"
    path.write_bytes(tiny.classes(8, {"labels": labels}))
    assert "\x1b[2J" not in cli("run", path, "random")


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_bfloat16_on_the_command_line(tmp_path: Path) -> None:
    path, x = tmp_path / "bf16.lap", np.array([1.5, -2.25, 3.1415927, 1e-3], np.float32)
    path.write_bytes(tiny.copies("bfloat16"))
    np.save(tmp_path / "x.npy", x)
    cli("run", path, tmp_path / "x.npy", "-o", tmp_path / "y.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), widened(to_bits(x)))
    assert "bfloat16" not in cli("run", path, "random") and "median" in cli(
        "bench", path, "--iter", "1", "--warmup", "0"
    )
    cli("profile", path, "--repeat", "1")
    with lapilli.load(path) as program:
        assert program.run_flat([to_bits(x)], bits=True)[0].dtype == np.uint16
        with pytest.raises(InvalidInputError, match="NumPy has no bfloat16"):
            program.run_flat([to_bits(x)])


def test_rounding_to_bfloat16_is_torchs() -> None:
    import torch

    words = np.random.default_rng(3).integers(0, 1 << 32, 100_000, np.uint32)
    x = np.concatenate(
        [words.view(np.float32), np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45], np.float32)]
    )
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widened(to_bits(x)), expected)


def test_a_program_without_inputs(tmp_path: Path) -> None:
    made = tiny.Tiny()
    weights, y = made.constant("w", np.array([1, 2, 3, 4], np.float32)), made.output("y", "float32", (4,))
    made.dispatch("copy", (weights, y), made.number(4))
    path = tmp_path / "constant.lap"
    path.write_bytes(made.bytes())
    assert fb.BufferKind.output is not None
    for args in ((), ("random",)):
        cli("run", path, *args, "-o", tmp_path / "y.npy")
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), [1, 2, 3, 4])
    assert "the program takes 0" in cli("run", path, "random", "random", code=1)
    cli("bench", path, "--iter", "1", "--warmup", "0")
    cli("profile", path, "--repeat", "1")


def test_outputs_may_be_called_as_anything(tmp_path: Path) -> None:
    made = tiny.Tiny()
    x = made.input("x", "float32", (4,))
    for name in ("file", "../up", "a/b"):
        made.dispatch("copy", (x, made.output(name, "float32", (4,))), made.number(4))
    (tmp_path / "named.lap").write_bytes(made.bytes())
    cli("run", tmp_path / "named.lap", "random", "-o", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as outputs:
        assert sorted(outputs) == [".._up", "a_b", "file"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").strip("│").split("│")]


def unfolded(text: str) -> str:
    """What is printed, with the parts of each cell, and of each line that is in no table, joined again."""
    lines = [cells(line) for line in text.splitlines()]
    most = max(map(len, lines))
    inside = ["".join(line[k] for line in lines if len(line) > k and len(line) > 1) for k in range(most)]
    return "\n".join([*inside, "".join(line[0].split("  ")[-1] for line in lines if len(line) == 1)])


def cells_of_wide_tables(text: str) -> list[str]:
    """Of tables that have more columns than 40 characters have room for."""
    return [cell for line in text.splitlines() if len(cells(line)) > 5 for cell in cells(line)]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_narrow_terminals_cut_nothing(columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "a_long_name_of_a_kernel_that_computes_a_matrix_product_and_adds_a_bias_0123456789"
    made = tiny.Tiny()
    x, y = made.input("x", "float32", (4,)), made.output("y", "float32", (4,))
    made.dispatch("copy", (x, y), made.number(4))
    made.program.kernels[0].name = made.plan.run[0].label = name
    made.constant(name, np.ones(4, np.float32))
    path = tmp_path / "long.lap"
    path.write_bytes(made.bytes())
    label = "a_breed_of_dogs_whose_name_is_longer_than_most_lines_0123456789_of_a_terminal_have_columns"
    Image.new("RGB", (40, 30), (200, 20, 20)).save(tmp_path / "dog.png")
    prepare = Preprocess(size=(8, 8), mean=(0.0,) * 3, std=(0.1,) * 3)
    named = tmp_path / "named.lap"
    named.write_bytes(tiny.classes(8, {"preprocess": prepare.dumps(), "labels": json.dumps([label, "green", "blue"])}))
    for args in (
        ("inspect", path),
        ("profile", path, "--repeat", "1"),
        ("devices",),
        ("verify", path),
        ("bench", path, "--iter", "1"),
        ("ops", "conv_transpose"),
        ("run", named, tmp_path / "dog.png"),
    ):
        text = cli(*args)
        assert "…" not in text.replace("… ", ""), text
        assert all(
            len(line) <= int(columns) for line in text.splitlines() if "Trace" not in line and "." not in line
        ), text
        if args[0] in ("inspect", "profile"):
            assert unfolded(text).count(name) >= 2, text  # the operators and the kernel
        if args[0] == "run":
            assert label in unfolded(text), text
        if columns == "40" and args[0] in ("inspect", "profile", "devices", "ops"):
            assert not any(len(cell) in range(1, 5) for cell in cells_of_wide_tables(text)), text


def test_metadata_of_the_compiler_is_not_shown(classes: Path) -> None:
    with lapilli.load(classes) as program:
        assert sorted(program.metadata) == ["labels", "preprocess"] and "lapilli.own" in program.description.metadata
    assert "lapilli.own" not in cli("inspect", classes)
    assert sorted(json.loads(cli("inspect", classes, "--json"))["metadata"]) == ["labels", "preprocess"]


def test_a_page_fits_a_telephone(classes: Path, tmp_path: Path) -> None:
    cli("inspect", classes, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'content="width=device-width"' in page and "lapilli.own" not in page
    assert page.count("<table>") == page.count('<div class="wide"><table>') and "overflow-x: auto" in page
