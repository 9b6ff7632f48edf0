"""ONNX files of strangers: data outside the file, sizes that are not true, loops without end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import lapilli
from lapilli.capture import capture, prepared
from lapilli.capture.onnx import load_onnx

SIZE = 4


def saved(
    folder: Path, entries: dict[str, str], dims: tuple[int, ...] = (SIZE,), kind: int = TensorProto.FLOAT
) -> Path:
    """A model that adds a tensor, whose data is where the entries say."""
    weight = TensorProto(name="w", data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    shape = [SIZE]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)], [weight],
    )  # fmt: skip
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return path


def test_data_beside_the_file(tmp_path: Path) -> None:
    weights = np.arange(SIZE + 2, dtype=np.float32)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "weights").write_bytes(weights.tobytes())
    path = saved(tmp_path, {"location": "parts/weights", "offset": "8", "length": str(4 * SIZE)})
    module = load_onnx(path)
    assert torch.equal(module(torch.ones(SIZE)), torch.from_numpy(weights[2:] + 1))


@pytest.mark.parametrize(
    "location", ["../secret", "/etc/hostname", "parts/../../secret", "", "a\\..\\b", "C:secret", "w\0", ".."]
)
def test_no_file_outside_the_folder(tmp_path: Path, location: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret").write_bytes(b"s" * 4 * SIZE)
    with pytest.raises(lapilli.CompileError, match="must be in the model's own folder|is not valid"):
        load_onnx(saved(inner, {"location": location}))


def test_links_are_not_followed(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret").write_bytes(b"s" * 4 * SIZE)
    (inner / "w").symlink_to(tmp_path / "secret")
    (inner / "folder").symlink_to(tmp_path)
    for location in ("w", "folder/secret"):
        with pytest.raises(lapilli.CompileError, match="link, which is not followed"):
            load_onnx(saved(inner, {"location": location}))


@pytest.mark.parametrize(
    ("entries", "dims", "message"),
    [
        ({"offset": "8"}, (SIZE,), "ends at 24, and .* has 16 bytes"),
        ({"length": "8"}, (SIZE,), "has 16 bytes, but 8 at 0"),
        ({"offset": "-4"}, (SIZE,), "has 16 bytes, but"),
        ({"offset": "x"}, (SIZE,), "is no number"),
        ({}, (1 << 40,), "ends at 4398046511104, and"),  # no memory is taken for it
        ({}, (1 << 40, 1 << 40), "ends at"),
        ({}, (-1,), "has the shape"),
        ({"location": "missing"}, (SIZE,), "cannot be read"),
        ({"location": "pipe"}, (SIZE,), "no regular file"),
    ],
)
def test_sizes_are_those_of_the_file(tmp_path: Path, entries: dict[str, str], dims: Any, message: str) -> None:
    (tmp_path / "w").write_bytes(b"\0" * 4 * SIZE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(lapilli.CompileError, match=message):
        load_onnx(saved(tmp_path, {"location": "w"} | entries, dims))


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"not a model at all", b"\x08\x07\x3a\xff\xff\xff\xff\x0f"])
def test_files_that_are_no_models(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(lapilli.CompileError):
        lapilli.compile(path)


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    """Every byte changed: an error of our own, or a module."""
    (tmp_path / "w").write_bytes(b"\0" * 4 * SIZE)
    path = saved(tmp_path, {"location": "w"})
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([int(rng.integers(256))]) + whole[place + 1 :])
        with contextlib.suppress(lapilli.LapilliError):
            load_onnx(path)


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> onnx.ModelProto:
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 17)]
    )


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Constants that a small file makes large are not made while it is captured."""
    shape = helper.make_node("Constant", [], ["s"], value_ints=[1 << 20, 1 << 20])
    nodes = [shape, helper.make_node("ConstantOfShape", ["s"], ["big"]), helper.make_node("ReduceSum", ["big"], ["y"])]
    model = _model(nodes, [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    program = capture(*prepared(path))  # 4 TiB of zeros are a call in it
    assert any(node.target is torch.ops.aten.zeros.default for node in program.graph.nodes)


def test_a_loop_without_end_is_refused(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Add", ["v", "v"], ["w"])], "body",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, [1])],
        [info("d", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    model = _model(
        [helper.make_node("Loop", ["", "", "x"], ["y"], body=body)],
        [info("x", TensorProto.FLOAT, [1])], [info("y", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(lapilli.CompileError, match="more than 1024 turns"):
        lapilli.compile(path)


def test_unknown_operators_are_named_at_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("StringSplit", ["x"], ["a", "b"], name="first"),
        helper.make_node("Mystery", ["x"], ["y"], name="second", domain="com.example"),
        helper.make_node("Mystery", ["y"], ["z"], name="third", domain="com.example"),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.example", 1)]
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    with pytest.raises(
        lapilli.UnsupportedOperatorError, match=r"StringSplit \(first\); com.example.Mystery \(second, third\)"
    ):
        lapilli.compile(path)
