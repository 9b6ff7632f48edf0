"""ONNX files as a source of models: what torch.onnx.export writes of our small models, dynamic sizes, control flow, quantized
graphs, and random attributes of operators against onnxruntime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import image_models
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from command_line import Cli
from onnx import TensorProto, helper
from onnx_random import SEEDS, random_model
from torch import nn
from torch.export import Dim

import lapilli
from lapilli.capture import capture, prepared

INFO = helper.make_tensor_value_info


def onnxruntime_of(path: Path, *values: Any) -> list[Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    arrays = [v.numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for v in values]
    return list(session.run(None, dict(zip(names, arrays, strict=True))))


def exported(folder: Path, model: nn.Module, args: tuple[Any, ...], dynamic: Any = None) -> Path:
    path = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), args, path, dynamic_shapes=dynamic, verbose=False)
    return path


def distance(got: torch.Tensor, wanted: Any) -> float:
    wanted = torch.as_tensor(wanted)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def saved(
    folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: Any = (), opset: int = 21
) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs, [onnx.numpy_helper.from_array(v, n) for n, v in constants])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    return path


class Attending(nn.Module):
    """What language models are made of: embedding, norm, attention, a gate; shapes are computed from the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=True)
        self.gru = nn.GRU(32, 16, batch_first=True, bidirectional=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.words(ids))
        y, _ = self.gru(x)
        return torch.cat([y, x[:, -1:].expand(-1, x.shape[1], -1)], 2)


def test_exported_models_give_torchs_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for model, args in (
        (image_models.small(), (torch.randn(2, 3, 31, 29),)),
        (Attending(), (torch.randint(50, (2, 7)),)),
    ):
        path = exported(tmp_path, model, args)
        program = lapilli.compile(path, args)
        with torch.no_grad():
            assert distance(program(*args), model(*args)) < 1e-5
        assert not program.report().on_cpu


@pytest.mark.long
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "convnext_tiny"])
def test_exported_classifiers(name: str, tmp_path: Path) -> None:
    """Captured and run by torch: what differs from the model is the importer's."""
    model, x = image_models.model_of(name), image_models.image(name, 2)
    path = exported(tmp_path, model, (x,), ({0: Dim("batch", min=1, max=8)},))
    program = capture(*prepared(path, (x,))).module()
    with torch.no_grad():
        assert distance(program(x), model(x)) < 1e-5
        assert distance(program(x[:1]), model(x[:1])) < 1e-5


def test_declared_sizes_are_dynamic(tmp_path: Path) -> None:
    """With no example inputs, the model's own shapes and names of sizes."""
    torch.manual_seed(0)
    model = image_models.small()
    path = exported(tmp_path, model, (torch.randn(2, 3, 32, 32),), ({0: Dim("batch", min=1, max=8)},))
    program = lapilli.compile(path)
    for batch in (1, 3):
        x = torch.randn(batch, 3, 32, 32)
        with torch.no_grad():
            assert distance(program(x), model(x)) < 1e-5


def test_arithmetic_with_sizes_stays_symbolic(tmp_path: Path) -> None:
    """Shape, Gather, Concat, Reshape, a bound of a Slice that is a size with a minus, and Range."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["t"]),
        helper.make_node("Neg", ["t"], ["minus"]),
        helper.make_node("Slice", ["table", "minus", "end", "zero"], ["last"]),  # the last rows, as many as tokens
        helper.make_node("Add", ["x", "last"], ["y"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Mul", ["n", "t"], ["nt"]),
        helper.make_node("Concat", ["nt", "four"], ["shape"], axis=0),
        helper.make_node("Reshape", ["y", "shape"], ["rows"]),
        helper.make_node("Squeeze", ["nt", "zero"], ["count"]),
        helper.make_node("Range", ["begin", "count", "step"], ["places"]),
    ]
    numbers = {"one": [1], "zero": [0], "end": [1 << 40], "four": [4]}
    constants: list[tuple[str, Any]] = [(n, np.array(v, np.int64)) for n, v in numbers.items()]
    constants += [("begin", np.int64(0)), ("step", np.int64(1)), ("table", np.random.rand(20, 4).astype(np.float32))]
    path = saved(
        tmp_path, nodes, [INFO("x", TensorProto.FLOAT, ["batch", "tokens", 4])],
        [INFO("rows", TensorProto.FLOAT, None), INFO("places", TensorProto.INT64, None)],
        [(n, np.asarray(v)) for n, v in constants],
    )  # fmt: skip
    program = lapilli.compile(path)
    for shape in ((2, 3), (1, 5), (4, 1)):
        x = torch.rand(*shape, 4)
        rows, places = program(x)
        expected = onnxruntime_of(path, x)
        assert distance(rows, expected[0]) < 1e-6 and torch.equal(places, torch.as_tensor(expected[1]))


def test_a_range_of_floats_ends_where_data_say(tmp_path: Path) -> None:
    """As voices have it, whose length is the sum of a mask; also backwards, by a step that does not divide it; also empty ones."""
    nodes = [
        helper.make_node("ReduceSum", ["mask"], ["n"], keepdims=0),
        helper.make_node("Cast", ["n"], ["length"], to=TensorProto.FLOAT),
        helper.make_node("Range", ["zero", "length", "one"], ["places"]),
        helper.make_node("Range", ["length", "zero", "step"], ["back"]),
    ]
    constants = [("zero", np.float32(0)), ("one", np.float32(1)), ("step", np.float32(-0.75))]
    path = saved(
        tmp_path, nodes, [INFO("mask", TensorProto.INT64, [7])],
        [INFO(name, TensorProto.FLOAT, [None]) for name in ("places", "back")], [(n, np.asarray(v)) for n, v in constants],
    )  # fmt: skip
    program = lapilli.compile(path)
    for ones in (0, 3, 7):
        mask = (torch.arange(7) < ones).long()
        for y, expected in zip(program(mask), onnxruntime_of(path, mask), strict=True):
            assert torch.equal(y, torch.as_tensor(expected))


def test_branches_and_loops_on_values(tmp_path: Path) -> None:
    """A condition and a number of turns that only the run knows; constants and outer values in the inner graphs."""
    then = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["a"])], "then", [], [INFO("a", TensorProto.FLOAT, None)]
    )
    otherwise = helper.make_graph(
        [
            helper.make_node("Constant", [], ["c"], value_floats=[3.0, 4.0]),
            helper.make_node("Add", ["x", "c"], ["b"]),
        ],
        "else", [], [INFO("b", TensorProto.FLOAT, None)],
    )  # fmt: skip
    body = helper.make_graph(
        [helper.make_node("Add", ["v", "x"], ["u"]), helper.make_node("Identity", ["k"], ["l"])], "body",
        [INFO("i", TensorProto.INT64, []), INFO("k", TensorProto.BOOL, []), INFO("v", TensorProto.FLOAT, [2])],
        [INFO("l", TensorProto.BOOL, []), INFO("u", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=then, else_branch=otherwise),
        helper.make_node("Loop", ["turns", "", "y"], ["z"], body=body),
    ]
    path = saved(
        tmp_path, nodes, [INFO("x", TensorProto.FLOAT, [2]), INFO("turns", TensorProto.INT64, [])],
        [INFO("z", TensorProto.FLOAT, [2])], [("zero", np.float32(0)), ("w", np.array([5, 7], np.float32))],
    )  # fmt: skip
    program = lapilli.compile(path)
    for sign in (1, -1):
        for turns in (0, 3):
            given = (sign * torch.tensor([1.0, 2.0]), torch.tensor(turns))
            assert distance(program(*given), onnxruntime_of(path, *given)[0]) < 1e-6


def test_quantized_graphs_have_the_integers_of_onnxruntime(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["y"]),
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        helper.make_node("QLinearMatMul", ["xq", "scale", "zero", "w", "scale", "wz", "scale", "zero"], ["m"]),
    ]
    constants = [
        ("w", rng.integers(-128, 128, (37, 11)).astype(np.int8)), ("wz", np.int8(3)), ("scale", np.float32(0.25)),
        ("zero", np.uint8(119)),
    ]  # fmt: skip
    outputs = [
        INFO("y", TensorProto.INT32, None),
        INFO("q", TensorProto.UINT8, None),
        INFO("m", TensorProto.UINT8, None),
    ]
    path = saved(
        tmp_path, nodes, [INFO("x", TensorProto.FLOAT, ["n", 37])], outputs, [(n, np.asarray(v)) for n, v in constants]
    )
    program = lapilli.compile(path)
    for rows in (1, 5):
        x = torch.from_numpy(rng.standard_normal((rows, 37)).astype(np.float32))
        for got, wanted in zip(program(x), onnxruntime_of(path, x), strict=True):
            assert torch.equal(got, torch.as_tensor(wanted))


def test_numbers_are_compiled_in(tmp_path: Path) -> None:
    path = saved(
        tmp_path, [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [INFO("x", TensorProto.FLOAT, [2, 6]), INFO("shape", TensorProto.INT64, [2])], [INFO("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    x = torch.rand(2, 6)
    with pytest.raises(lapilli.CompileError, match=r"node y \(Reshape\): .* list of Python's numbers"):
        lapilli.compile(path, (x, torch.tensor([3, 4])))
    program = lapilli.compile(path, {"x": x, "shape": [3, 4]})
    assert torch.equal(program(x, [3, 4]), x.reshape(3, 4))
    with pytest.raises(lapilli.InvalidInputError, match="cannot be"):
        program(x, [4, 3])


def test_command_line(tmp_path: Path) -> None:
    path = saved(
        tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [INFO("x", TensorProto.FLOAT, ["n", 3])],
        [INFO("y", TensorProto.FLOAT, ["n", 3])],
    )  # fmt: skip
    Cli(tmp_path)("compile", path)
    x = torch.randn(5, 3)
    assert torch.equal(lapilli.load(path.with_suffix(".lap"))(x), x.relu())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lapilli.capture.onnx import onnx_reading

    (tmp_path / "model.onnx").write_bytes(b"")
    monkeypatch.setattr(onnx_reading, "find_spec", lambda name: None)
    with pytest.raises(lapilli.CompileError, match=r"pip install 'lapilli\[onnx\]'"):
        lapilli.compile(tmp_path / "model.onnx")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_attributes_against_onnxruntime(seed: int, tmp_path: Path) -> None:
    """Lapilli's rules by torch, on nodes with random attributes and shapes."""
    path = tmp_path / "model.onnx"
    made = random_model(seed)
    path.write_bytes(made.model.SerializeToString())
    try:
        expected = onnxruntime_of(path, *made.inputs)
    except Exception:
        pytest.skip("onnxruntime has no such node")
    module = prepared(path, [torch.from_numpy(x) for x in made.inputs], ())[0]
    assert isinstance(module, nn.Module)
    with torch.no_grad():
        got = module(*(torch.from_numpy(x) for x in made.inputs))
    got = [got] if isinstance(got, torch.Tensor) else list(got)
    for g, e in zip(got, expected, strict=True):
        assert g.numpy().shape == e.shape and g.numpy().dtype == e.dtype, (made.described, g.shape, e.shape)
        np.testing.assert_allclose(g.numpy(), e, rtol=made.rtol, atol=made.atol, err_msg=made.described)
