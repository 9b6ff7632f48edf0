"""Quantized graphs of ONNX: sums of products are those of onnxruntime's integer kernels bit for bit, and weights stay packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_quantized import FAMILIES, MICROSOFT, NODE, Pair, floats, int8, model_of, random_pair, saved, uint8

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device")

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


VECTORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a vector times a matrix": ({"a": uint8(37)}, {"b": int8(37, 5)}),
    "a matrix times a vector": ({"a": uint8(4, 37)}, {"b": int8(37)}),
    "a weight on the left": ({"b": int8(37, 5)}, {"a": uint8(4, 37)}),
    "batches of a weight": ({"a": uint8(3, 4, 37)}, {"b": int8(3, 37, 5)}),
}


@pytest.mark.parametrize("what", VECTORS)
def test_integer_products_of_other_ranks(what: str, tmp_path: Path) -> None:
    inputs, constants = VECTORS[what]
    nodes = [NODE("MatMulInteger", ["a", "b", "za"], ["y"])]
    pair = Pair(tmp_path, nodes, inputs, constants | {"za": np.uint8(199)}, ["y"])
    pair.check_codes()
    assert pair.counts() == (1, 0, 0)


def test_open_sizes_stay_open(tmp_path: Path) -> None:
    """Of a convolution whose padding has two widths, and of a product."""
    grid = {"s": np.float32(0.02), "z": np.uint8(201), "sy": np.float32(0.4), "zy": np.uint8(90), "zw": np.int8(0)}
    names = ["x", "s", "z", "w", "s", "zw", "sy", "zy"]
    convolution = NODE("QLinearConv", names, ["y"], pads=[0, 1, 2, 1])
    nodes = [convolution, NODE("MatMulInteger", ["x", "v", "z"], ["t"])]
    outputs = [onnx.helper.make_empty_tensor_value_info(o) for o in ("y", "t")]
    model = model_of(nodes, {"x": uint8(1, 3, 8, 9)}, grid | {"w": int8(4, 3, 3, 3), "v": int8(9, 5)}, outputs)
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    sizes[0].dim_param, sizes[2].dim_param = "n", "h"
    path = tmp_path / "open.onnx"
    path.write_bytes(onnx.shape_inference.infer_shapes(model).SerializeToString())
    session, program = onnxruntime.InferenceSession(path), lapilli.compile(path)
    for batch, height in ((1, 8), (3, 13)):
        x = uint8(batch, 3, height, 9, seed=height)
        for got, wanted in zip(program(x), session.run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert len(program.report().in_integers) == 2


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


def test_scales_and_zero_points_of_rows(tmp_path: Path) -> None:
    """The standard has them, onnxruntime not."""
    a, b = uint8(5, 70), int8(70, 6)
    za, zy = uint8(5, seed=1), uint8(5, seed=2)
    sa, sb, sy = (np.random.default_rng(k).random(n, np.float32) + np.float32(0.5) for k, n in enumerate((5, 6, 5)))
    names, weights = ["sa", "za", "b", "sb", "zb", "sy", "zy"], (sa, za, b, sb, np.zeros(6, np.int8), sy * 40, zy)
    path = saved(
        tmp_path,
        [NODE("QLinearMatMul", ["a", *names], ["y"])],
        {"a": a},
        dict(zip(names, weights, strict=True)),
        {"y": uint8(5, 6)},
    )
    program = lapilli.compile(path, (torch.from_numpy(a),), dynamic_shapes=())
    total = ((a.astype(np.int32) - za[:, None]) @ b.astype(np.int32)).astype(np.float32)
    wanted = np.rint(total * (sa[:, None] * sb / (sy * 40)[:, None])) + zy[:, None]
    np.testing.assert_array_equal(program(a), wanted.clip(0, 255).astype(np.uint8))
    assert len(program.report().in_integers) == 1


# -- between QuantizeLinear and DequantizeLinear


def _steps(name: str, scale: str, zero: str) -> list[Any]:
    """Numbers as codes and back."""
    there = NODE("QuantizeLinear", [name, scale, zero], [f"{name}_q"])
    return [there, NODE("DequantizeLinear", [f"{name}_q", scale, zero], [f"{name}_d"])]


def _weight(name: str, axis: int) -> Any:
    return NODE("DequantizeLinear", [name, f"s_{name}"], [f"{name}_d"], axis=axis)


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_a_network_between_codes_is_onnxruntimes(kind: Any, tmp_path: Path) -> None:
    """Convolutions with scales of channels and integer biases, an activation, a pool, a layer whose matrix is not turned; the pool
    moves codes."""
    offset = 128 if kind is np.int8 else 0
    scales = {"s0": np.float32(0.02), "s1": np.float32(0.05), "s2": np.float32(0.09), "s3": np.float32(0.3)}
    zeros = {
        "z0": kind(117 - offset),
        "z1": kind(0 if not offset else -128),
        "z2": kind(131 - offset),
        "z3": kind(250 - offset),
    }
    w = {"w": int8(8, 3, 3, 3), "v": int8(6, 8, 3, 3, seed=1), "u": int8(54, 5, seed=2)}
    s = {
        "s_w": np.full(8, 0.003, np.float32),
        "s_v": (1 + np.arange(6, dtype=np.float32)) / 999,
        "s_u": np.float32(0.004),
    }
    biases = {
        "bw": uint8(8).astype(np.int32) * 20,
        "sbw": scales["s0"] * s["s_w"],
        "bu": uint8(5).astype(np.int32),
        "sbu": scales["s2"] * s["s_u"],
    }
    nodes = [
        *_steps("x", "s0", "z0"), _weight("w", 0), NODE("DequantizeLinear", ["bw", "sbw"], ["bw_d"], axis=0),
        NODE("Conv", ["x_d", "w_d", "bw_d"], ["a"], pads=[1, 1, 1, 1]), NODE("Relu", ["a"], ["b"]), *_steps("b", "s1", "z1"),
        NODE("MaxPool", ["b_d"], ["c"], kernel_shape=[2, 2], strides=[2, 2]), *_steps("c", "s1", "z1"), _weight("v", 0),
        NODE("Conv", ["c_d", "v_d"], ["d"]), *_steps("d", "s2", "z2"), NODE("Flatten", ["d_d"], ["e"]), _weight("u", 1),
        NODE("DequantizeLinear", ["bu", "sbu"], ["bu_d"], axis=0), NODE("Gemm", ["e", "u_d", "bu_d"], ["f"]),
        NODE("QuantizeLinear", ["f", "s3", "z3"], ["y"]),
    ]  # fmt: skip
    pair = Pair(tmp_path, nodes, {"x": floats(2, 3, 10, 10)}, scales | zeros | w | s | biases, ["y"])
    pair.check_codes()
    assert len(np.unique(pair.got[0])) > 3
    assert pair.counts() == (3, 0, 0)


def test_products_of_two_quantized_activations(tmp_path: Path) -> None:
    grid = {"s": np.float32(0.02), "z": np.uint8(127), "sy": np.float32(0.04), "zy": np.uint8(3)}
    product = NODE("MatMul", ["a_d", "b_d"], ["c"])
    nodes = [*_steps("a", "s", "z"), *_steps("b", "s", "z"), product, NODE("QuantizeLinear", ["c", "sy", "zy"], ["y"])]
    pair = Pair(tmp_path, nodes, {"a": floats(2, 3, 5, 40), "b": floats(2, 3, 40, 6, seed=1)}, grid, ["y"])
    pair.check_codes()
    assert pair.counts() == (1, 0, 0)


def test_views_before_a_product_are_views_of_codes(tmp_path: Path) -> None:
    """Heads of an attention, split off and turned."""
    grid = {"s": np.float32(0.02), "z": np.uint8(120), "sy": np.float32(0.05), "zy": np.uint8(131)}
    nodes = [
        *_steps("x", "s", "z"), NODE("Reshape", ["x_d", "size"], ["r"]), NODE("Transpose", ["r"], ["a"], perm=[0, 2, 1, 3]),
        NODE("Transpose", ["r"], ["b"], perm=[0, 2, 3, 1]), NODE("MatMul", ["a", "b"], ["c"]),
        NODE("QuantizeLinear", ["c", "sy", "zy"], ["y"]),
    ]  # fmt: skip
    pair = Pair(tmp_path, nodes, {"x": floats(2, 5, 32)}, grid | {"size": np.array([2, 5, 4, 8])}, ["y"])
    pair.check_codes()
    assert pair.counts() == (1, 0, 0)


def test_a_bias_of_floats_is_added_as_one(tmp_path: Path) -> None:
    """onnxruntime leaves such a layer in floats, so a number between two codes may become either."""
    grid = {"s": np.float32(0.02), "z": np.uint8(127), "sy": np.float32(0.04), "zy": np.uint8(3)}
    layer = NODE("Gemm", ["a_d", "w_d", "bias"], ["c"])
    nodes = [*_steps("a", "s", "z"), _weight("w", 1), layer, NODE("QuantizeLinear", ["c", "sy", "zy"], ["y"])]
    weight = {"w": int8(40, 6), "s_w": np.float32(0.01), "bias": floats(6)}
    pair = Pair(tmp_path, nodes, {"a": floats(5, 40)}, grid | weight, ["y"])
    assert np.abs(pair.got[0].astype(int) - pair.wanted[0].astype(int)).max() <= 1
    assert pair.counts() == (1, 0, 0)


# -- weights of few bits


@pytest.mark.parametrize("zeros", ["none", "packed", "floats"])
@pytest.mark.parametrize("bits, block, columns", [(4, 16, 256), (4, 32, 200), (8, 32, 200)])
def test_weights_of_few_bits_stay_packed(bits: int, block: int, columns: int, zeros: str, tmp_path: Path) -> None:
    """The file has no floats of them: it is smaller than one byte a weight of four bits, two of eight. Nor has the device, where
    scales are float32, and perhaps zero points.
    """
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
    assert pair.program.memory().constants <= 1.05 * (stored + 4 * rows * blocks) + 8192


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("order", ["kept", "turned", "uneven"])
def test_columns_in_any_order_of_blocks(order: str, zeros: bool, tmp_path: Path) -> None:
    """As GPTQ orders them (`g_idx`): weights stay packed, unless some block has more columns than others. onnxruntime's CPU then
    takes 8 for every zero point that lies packed, whatever it is.
    """
    rows, columns, block = 700, 330, 32
    blocks = -(-columns // block)
    groups = np.arange(columns, dtype=np.int32) // block
    if order != "kept":
        np.random.default_rng(0).shuffle(groups)
    if order == "uneven":
        groups[:3] = 0
    constants = {"w": uint8(rows, blocks, block // 2), "s": floats(rows * blocks)}
    if zeros:
        constants["z"] = uint8(rows * -(-blocks // 2), seed=1)
    inputs = ["x", "w", "s", "z" if zeros else "", "g"]
    nodes = [NODE("MatMulNBits", inputs, ["y"], K=columns, N=rows, bits=4, block_size=block, **MICROSOFT)]
    pair = Pair(tmp_path, nodes, {"x": floats(3, columns)}, {**constants, "g": groups}, ["y"])
    if zeros:
        codes, points = (
            np.stack([constants[name].reshape(rows, -1) >> shift & 15 for shift in (0, 4)], -1).reshape(rows, -1)
            for name in "wz"
        )
        scale = constants["s"].reshape(rows, blocks).astype(np.float64)
        matrix = (codes[:, :columns].astype(np.float64) - points[:, groups]) * scale[:, groups]
        pair.wanted = [(floats(3, columns).astype(np.float64) @ matrix.T).astype(np.float32)]
    pair.check_close()
    if order != "uneven":
        stored = sum(v.nbytes for v in constants.values())
        assert pair.program.memory().constants <= 1.05 * (stored + 4 * rows * blocks) + 8192


@pytest.mark.parametrize("block", [32, 20])
@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4, np.uint8])
def test_weights_of_blocks_keep_their_bits(kind: Any, block: int, tmp_path: Path) -> None:
    """A matrix [k, n] whose blocks lie along k; codes of uint8 that are all near 255 take half a byte, too."""
    k, n = 640, 900
    low = 240 if kind is np.uint8 else -8 if kind is ml_dtypes.int4 else 0
    random = np.random.default_rng(block)
    w, z = (random.integers(low, low + 16, size).astype(kind) for size in ((k, n), (k // block, n)))
    scales = (random.random((k // block, n)) / 64).astype(np.float32)
    nodes = [
        NODE("DequantizeLinear", ["w", "s", "z"], ["w_d"], axis=0, block_size=block),
        NODE("MatMul", ["x", "w_d"], ["y"]),
    ]
    pair = Pair(tmp_path, nodes, {"x": floats(3, k)}, {"w": w, "s": scales, "z": z}, ["y"])
    pair.check_close()
    assert pair.counts() == (0, 1, 0)
    pair.program.save(tmp_path / "model.lap")
    stored = k * n // 2 + z.size + scales.nbytes
    assert (tmp_path / "model.lap").stat().st_size < stored + k * n // 4


# -- random attributes, sizes, types and zero points


@pytest.mark.part(20)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_give_onnxruntimes_integers(family: str, seed: int, tmp_path: Path) -> None:
    made, pair = random_pair(family, seed, tmp_path)
    if made.codes:
        pair.check_codes()
    else:
        pair.check_close()
    assert pair.counts()[0] == made.integers and not pair.counts()[2], str(pair.program.report())
