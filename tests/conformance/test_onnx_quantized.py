"""Quantized graphs of ONNX: sums of products are those of onnxruntime's integer kernels bit for bit, and weights stay packed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.random import Generator
from onnx import helper

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device")

NODE = helper.make_node
MICROSOFT = {"domain": "com.microsoft"}


def rng(seed: int = 0) -> Generator:
    return np.random.default_rng(seed)


def uint8(*shape: int, seed: int = 0) -> Any:
    return rng(seed).integers(0, 256, shape).astype(np.uint8)


def int8(*shape: int, seed: int = 0) -> Any:
    """Of 7 bits: where a processor adds pairs of products with saturation, onnxruntime's sums are not exact beyond."""
    return rng(seed).integers(-64, 64, shape).astype(np.int8)


def floats(*shape: int, seed: int = 0) -> Any:
    return rng(seed).standard_normal(shape).astype(np.float32)


class Pair:
    """A model in a file, in both. inputs and constants: arrays by name."""

    def __init__(
        self, folder: Path, nodes: Sequence[Any], inputs: dict[str, Any], constants: dict[str, Any], outputs: Sequence[str],
        **options: Any,
    ) -> None:  # fmt: skip
        self.arrays = {name: np.asarray(v) for name, v in inputs.items()}
        given = [_info(name, v) for name, v in self.arrays.items()]
        weights = [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
        graph = helper.make_graph(nodes, "g", given, [helper.make_empty_tensor_value_info(o) for o in outputs], weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self.wanted: list[Any] = list(session.run(None, self.arrays))
        del model.graph.output[:]
        model.graph.output.extend(_info(name, v) for name, v in zip(outputs, self.wanted, strict=True))
        path = folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        tensors = tuple(torch.from_numpy(v.copy()) for v in self.arrays.values())
        self.program = lapilli.compile(path, tensors, dynamic_shapes=(), **options)
        got = self.program(*tensors)
        self.got = [g.numpy() for g in ([got] if isinstance(got, torch.Tensor) else got)]

    def check_codes(self) -> None:
        """The same integers."""
        for got, wanted in zip(self.got, self.wanted, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)

    def check_close(self, bound: float = 1e-5) -> None:
        """Floats, as norms."""
        for got, wanted in zip(self.got, self.wanted, strict=True):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
            assert np.linalg.norm(got - wanted) <= bound * np.linalg.norm(wanted)

    def counts(self) -> tuple[int, int, int]:
        """How many products and convolutions compute in integers, how many in floats, and what runs on the CPU."""
        report = self.program.report()
        return len(report.in_integers), len(report.dequantized), len(report.on_cpu)


def _info(name: str, value: Any) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


# -- what runs in integers


DYNAMIC = [
    NODE("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
    NODE("MatMulInteger", ["q", "w", "z", "wz"], ["total"]),
    NODE("Cast", ["total"], ["sum"], to=onnx.TensorProto.FLOAT),
    NODE("Mul", ["s", "ws"], ["both"]),
    NODE("Mul", ["sum", "both"], ["y"]),
    NODE("MatMulInteger", ["q", "v", "z"], ["other"]),
]


def test_dynamically_quantized_layers_are_counted_and_exact(tmp_path: Path) -> None:
    constants = {"w": int8(300, 12), "wz": int8(12, seed=1), "ws": floats(12), "v": int8(300, 7, seed=2)}
    pair = Pair(tmp_path, DYNAMIC, {"x": floats(5, 300)}, constants, ["q", "total", "other"])
    pair.check_codes()
    assert pair.counts() == (2, 0, 0)
    assert "quantized: 2 in integers, 0 in floats" in str(pair.program.report())


def test_half_precision_rounds_no_sum_of_integers(tmp_path: Path) -> None:
    """Those of 300 products exceed what it has. Codes may differ: they are made of floats, which it rounds."""
    w = int8(300, 12)
    nodes = [*DYNAMIC[:1], NODE("MatMulInteger", ["q", "w", "z"], ["total"])]
    pair = Pair(tmp_path, nodes, {"x": floats(5, 300)}, {"w": w}, ["q", "z", "total"], precision="fp16")
    codes, zero, total = (v.astype(np.int64) for v in pair.got)
    np.testing.assert_array_equal((codes - zero) @ w.astype(np.int64), total)
    assert pair.counts() == (1, 0, 0)


def test_scales_follow_the_sum(tmp_path: Path) -> None:
    constants = {"w": int8(300, 12), "wz": int8(12, seed=1), "ws": floats(12), "v": int8(300, 7, seed=2)}
    pair = Pair(tmp_path, DYNAMIC, {"x": floats(2, 5, 300)}, constants, ["y"])
    pair.check_close(1e-6)


@pytest.mark.parametrize("length", [1, 37, 520, 3000])
def test_integer_products_of_any_length(length: int, tmp_path: Path) -> None:
    """Exact in float32, as sums of parts, and in 32-bit integers; with a zero point of each row."""
    nodes = [NODE("MatMulInteger", ["a", "b", "za", "zb"], ["y"])]
    constants = {"b": int8(length, 9), "za": np.uint8(251), "zb": np.int8(-7)}
    pair = Pair(tmp_path, nodes, {"a": uint8(3, length)}, constants, ["y"])
    pair.check_codes()
    assert pair.counts() == (1, 0, 0)


def test_products_of_two_inputs_and_their_zero_points(tmp_path: Path) -> None:
    nodes = [NODE("MatMulInteger", ["a", "b", "za", "zb"], ["y"])]
    inputs = {"a": uint8(2, 5, 37), "b": int8(2, 37, 8), "za": np.uint8(250), "zb": np.int8(3)}
    pair = Pair(tmp_path, nodes, inputs, {}, ["y"])
    pair.check_codes()
    assert pair.counts() == (1, 0, 0)


@pytest.mark.parametrize(
    "attributes", [{}, {"pads": [0, 1, 2, 1]}, {"pads": [1, 1, 1, 1], "group": 2}, {"auto_pad": "SAME_UPPER"}]
)
def test_integer_convolutions(attributes: dict[str, Any], tmp_path: Path) -> None:
    """Padding is the zero point of the input."""
    nodes = [NODE("ConvInteger", ["x", "w", "zx", "zw"], ["y"], **attributes)]
    constants = {"w": uint8(4, 6 // attributes.get("group", 1), 3, 2), "zx": np.uint8(200), "zw": np.uint8(130)}
    pair = Pair(tmp_path, nodes, {"x": uint8(2, 6, 9, 8)}, constants, ["y"])
    pair.check_codes()
    assert pair.counts() == (1, 0, 0)


# -- weights of few bits


@pytest.mark.parametrize("zeros", ["none", "packed", "floats"])
@pytest.mark.parametrize("bits, block, columns", [(4, 16, 256), (4, 32, 200), (8, 32, 200)])
def test_weights_of_few_bits_stay_packed(bits: int, block: int, columns: int, zeros: str, tmp_path: Path) -> None:
    """The file has no floats of them: it is smaller than one byte a weight of four bits, two of eight."""
    if bits == 8 and zeros == "floats":
        pytest.skip("onnxruntime's CPU does not have them")
    rows = 1500
    blocks = -(-columns // block)
    attributes: dict[str, Any] = {"K": columns, "N": rows, "bits": bits, "block_size": block, **MICROSOFT}
    constants = {"w": uint8(rows, blocks, block * bits // 8), "s": floats(rows * blocks)}
    if zeros == "packed":
        constants["z"] = uint8(rows * -(-blocks * bits // 8), seed=1)
    elif zeros == "floats":
        constants["z"] = 8 + floats(rows * blocks, seed=1)
    nodes = [NODE("MatMulNBits", ["x", *constants], ["y"], **attributes)]
    pair = Pair(tmp_path, nodes, {"x": floats(3, columns)}, constants, ["y"])
    pair.check_close()
    assert pair.counts() == (0, 1, 0)  # its activations are floats
    pair.program.save(tmp_path / "model.lap")
    stored = sum(v.nbytes for v in constants.values())
    assert (tmp_path / "model.lap").stat().st_size < stored + rows * columns
