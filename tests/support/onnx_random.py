"""Models of one ONNX node with random attributes, shapes and types, from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.random import Generator
from onnx import helper

SEEDS = 120


@dataclass(frozen=True)
class Random:
    model: Any
    inputs: list[Any]
    described: str
    rtol: float = 1e-4
    atol: float = 1e-5


Made = tuple[str, dict[str, Any], list[Any], list[Any], int]
"""An operator, its attributes, its inputs (of the model, and constants after them), and the number of its outputs."""


def floats(rng: Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def _shape(rng: Generator, rank: int, most: int = 6) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(1, most + 1, rank))


def _axes(rng: Generator, rank: int) -> list[int]:
    count = int(rng.integers(1, rank + 1))
    return [int(a) - (rank if rng.random() < 0.5 else 0) for a in rng.permutation(rank)[:count]]


def _windows(rng: Generator, rank: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    kernel = [int(rng.integers(1, 4)) for _ in range(rank)]
    made: dict[str, Any] = {"kernel_shape": kernel, "strides": [int(rng.integers(1, 4)) for _ in range(rank)]}
    if rng.random() < 0.7:
        made["pads"] = [int(rng.integers(0, k)) for k in (*kernel, *kernel)]
    else:
        made["auto_pad"] = str(rng.choice(["VALID", "SAME_UPPER", "SAME_LOWER"]))
        # A stride beyond the window would make the padding negative, which the standard leaves open.
        made["strides"] = [min(s, k) for s, k in zip(made["strides"], kernel, strict=True)]
    return made


def _conv(rng: Generator) -> Made:
    rank = int(rng.integers(1, 4))
    group, each, out = (int(n) for n in rng.integers(1, 4, 3))
    sizes = tuple(int(n) for n in rng.integers(5, 9, rank))
    made = _windows(rng, rank, sizes) | {"group": group}
    if "auto_pad" not in made:
        made["dilations"] = [int(n) for n in rng.integers(1, 3, rank)]
    weight = floats(rng, out * group, each, *made["kernel_shape"])
    more = [floats(rng, out * group)] if rng.random() < 0.5 else []
    return "Conv", made, [floats(rng, 2, each * group, *sizes)], [weight, *more], 1


def _conv_transpose(rng: Generator) -> Made:
    rank = int(rng.integers(1, 3))
    group, each, out = (int(n) for n in rng.integers(1, 4, 3))
    kernel, strides = [int(n) for n in rng.integers(2, 4, rank)], [int(n) for n in rng.integers(1, 4, rank)]
    made = {
        "kernel_shape": kernel,
        "strides": strides,
        "group": group,
        "pads": [int(n) for n in rng.integers(0, 2, 2 * rank)],
    }
    made["output_padding"] = [int(rng.integers(0, s)) for s in strides]
    sizes = tuple(int(n) for n in rng.integers(3, 6, rank))
    return "ConvTranspose", made, [floats(rng, 2, each * group, *sizes)], [floats(rng, each * group, out, *kernel)], 1


def _pool(rng: Generator) -> Made:
    rank = int(rng.integers(1, 4))
    sizes = tuple(int(n) for n in rng.integers(5, 10, rank))
    made = _windows(rng, rank, sizes)
    name = str(rng.choice(["MaxPool", "AveragePool"]))
    if "auto_pad" not in made:
        made["ceil_mode"] = int(rng.integers(2))
    if name == "AveragePool":
        made["count_include_pad"] = int(rng.integers(2))
        if made.get("ceil_mode"):
            made["count_include_pad"] = 0  # where onnxruntime counts what the standard does not
    outputs = 2 if name == "MaxPool" and rng.random() < 0.5 else 1
    return name, made, [floats(rng, 2, 3, *sizes)], [], outputs


def _reduce(rng: Generator) -> Made:
    rank = int(rng.integers(1, 5))
    name = str(rng.choice(["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp"]))
    axes = np.array(_axes(rng, rank), np.int64)
    return f"Reduce{name}", {"keepdims": int(rng.integers(2))}, [floats(rng, *_shape(rng, rank))], [axes], 1


def _slice(rng: Generator) -> Made:
    rank = int(rng.integers(1, 5))
    x = floats(rng, *_shape(rng, rank, 8))
    axes = _axes(rng, rank)
    bounds = [rng.integers(-12, 12, len(axes)).astype(np.int64) for _ in range(2)]
    steps = rng.choice([-3, -2, -1, 1, 2, 3], len(axes)).astype(np.int64)
    return "Slice", {}, [x], [*bounds, np.array(axes, np.int64), steps], 1


def _gather(rng: Generator) -> Made:
    rank = int(rng.integers(1, 4))
    x = floats(rng, *_shape(rng, rank))
    axis = int(rng.integers(-rank, rank))
    size = x.shape[axis]
    if rng.random() < 0.5:
        places = rng.integers(-size, size, _shape(rng, int(rng.integers(0, 3))))
        return "Gather", {"axis": axis}, [x, np.asarray(places, np.int64)], [], 1
    places = rng.integers(-size, size, x.shape)
    return "GatherElements", {"axis": axis}, [x, np.asarray(places, np.int64)], [], 1


def _pad(rng: Generator) -> Made:
    rank = int(rng.integers(1, 5))
    x = floats(rng, *(int(n) for n in rng.integers(3, 6, rank)))
    mode = str(rng.choice(["constant", "reflect", "edge", "wrap"]))
    pads = rng.integers(-1 if mode == "constant" else 0, 3, 2 * rank).astype(np.int64)
    more = [np.float32(rng.standard_normal())] if mode == "constant" else []
    return "Pad", {"mode": mode}, [x], [pads, *more], 1


def _resize(rng: Generator) -> Made:
    mode = str(rng.choice(["nearest", "linear", "cubic"]))
    made: dict[str, Any] = {"mode": mode}
    made["coordinate_transformation_mode"] = str(
        rng.choice(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
    )
    if mode == "nearest":
        made["nearest_mode"] = str(rng.choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]))
    if mode == "cubic":
        made["cubic_coeff_a"] = float(rng.choice([-0.75, -0.5]))
        made["exclude_outside"] = int(rng.integers(2)) if made["coordinate_transformation_mode"] == "half_pixel" else 0
    x = floats(rng, 1, 2, *(int(n) for n in rng.integers(3, 8, 2)))
    # A place between two elements is rounded one way in float32 and the other in float64, except where scales are powers of two;
    # and with align_corners the standard's tests and onnxruntime differ where a size is no whole number (docs/onnx.md).
    corners = made["coordinate_transformation_mode"] == "align_corners"
    choice = [2, 3] if corners else [0.5, 2, 4] if mode == "nearest" else [0.5, 0.6, 1.5, 2, 3]
    scales = np.array([1, 1, *rng.choice(choice, 2)], np.float32)
    return "Resize", made, [x], [np.zeros(0, np.float32), scales], 1


def _norm(rng: Generator) -> Made:
    x = floats(rng, 2, 4, *_shape(rng, 2))
    name = str(
        rng.choice(["LayerNormalization", "InstanceNormalization", "LpNormalization", "LRN", "Softmax", "LogSoftmax"])
    )
    axis = int(rng.integers(-4, 4))
    if name == "LayerNormalization":
        size = x.shape[axis % 4 :]
        return name, {"axis": axis, "epsilon": 1e-3}, [x], [floats(rng, *size), floats(rng, *size)], 1
    if name == "InstanceNormalization":
        return name, {"epsilon": 1e-3}, [x], [floats(rng, 4), floats(rng, 4)], 1
    if name == "LpNormalization":
        return name, {"axis": axis, "p": int(rng.integers(1, 3))}, [x], [], 1
    if name == "LRN":
        return name, {"size": int(rng.choice([1, 3, 5])), "alpha": 0.01, "beta": 0.6, "bias": 1.5}, [x], [], 1
    return name, {"axis": axis}, [x], [], 1


def _matrices(rng: Generator) -> Made:
    m, k, n = (int(s) for s in rng.integers(1, 7, 3))
    if rng.random() < 0.5:
        ta, tb = (int(t) for t in rng.integers(0, 2, 2))
        made = {
            "transA": ta,
            "transB": tb,
            "alpha": float(rng.choice([1.0, 0.5])),
            "beta": float(rng.choice([1.0, 2.0])),
        }
        c = floats(rng, *((n,), (m, n), (1, n), (m, 1))[int(rng.integers(4))])
        return (
            "Gemm",
            made,
            [floats(rng, *((k, m) if ta else (m, k)))],
            [floats(rng, *((n, k) if tb else (k, n))), c],
            1,
        )
    batch = _shape(rng, int(rng.integers(0, 3)), 3)
    return "MatMul", {}, [floats(rng, *batch, m, k), floats(rng, k, n)], [], 1


def _recurrent(rng: Generator) -> Made:
    name = str(rng.choice(["LSTM", "GRU", "RNN"]))
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[name]
    direction = str(rng.choice(["forward", "reverse", "bidirectional"]))
    d = 2 if direction == "bidirectional" else 1
    steps, batch, width, hidden = (int(n) for n in rng.integers(1, 6, 4))
    made: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if name == "GRU":
        made["linear_before_reset"] = int(rng.integers(2))
    constants = [
        floats(rng, d, gates * hidden, width),
        floats(rng, d, gates * hidden, hidden),
        floats(rng, d, 2 * gates * hidden),
    ]
    if rng.random() < 0.5:
        constants.append(rng.integers(1, steps + 1, batch).astype(np.int32))
        constants.append(floats(rng, d, batch, hidden))
    return name, made, [floats(rng, steps, batch, width)], constants, 2


def _selection(rng: Generator) -> Made:
    rank = int(rng.integers(1, 4))
    x = floats(rng, *_shape(rng, rank))
    axis = int(rng.integers(-rank, rank))
    name = str(rng.choice(["TopK", "ArgMax", "ArgMin", "CumSum", "OneHot", "Trilu"]))
    if name == "TopK":
        k = np.array([int(rng.integers(1, x.shape[axis] + 1))], np.int64)
        return name, {"axis": axis, "largest": int(rng.integers(2))}, [x], [k], 2
    if name == "CumSum":
        made = {"exclusive": int(rng.integers(2)), "reverse": int(rng.integers(2))}
        return name, made, [x], [np.array(axis, np.int64)], 1
    if name == "OneHot":
        places = rng.integers(-5, 5, x.shape).astype(np.int64)
        return name, {"axis": axis}, [places], [np.array(5, np.int64), np.array([-1, 2], np.float32)], 1
    if name == "Trilu":
        return (
            name,
            {"upper": int(rng.integers(2))},
            [floats(rng, 4, 5)],
            [np.array(int(rng.integers(-6, 7)), np.int64)],
            1,
        )
    made = {"axis": axis, "keepdims": int(rng.integers(2)), "select_last_index": int(rng.integers(2))}
    return name, made, [np.round(x)], [], 1


def _quantized(rng: Generator) -> Made:
    """Scales are powers of two, so that ties are ties in any order of operations."""
    x = floats(rng, 3, 4)
    axis = int(rng.integers(-2, 2))
    dtype: Any = (np.uint8, np.int8)[int(rng.integers(2))]
    each = rng.random() < 0.5
    scale = 2.0 ** rng.integers(-5, 1, x.shape[axis] if each else ())
    zero = rng.integers(0, 100, scale.shape).astype(dtype)
    if rng.random() < 0.5:
        return "QuantizeLinear", {"axis": axis}, [x], [np.asarray(scale, np.float32), zero], 1
    q = rng.integers(0, 127, x.shape).astype(dtype)
    return "DequantizeLinear", {"axis": axis}, [q], [np.asarray(scale, np.float32), zero], 1


_FAMILIES: list[Callable[[Generator], Made]] = [
    _conv, _conv_transpose, _pool, _reduce, _slice, _gather, _pad, _resize, _norm, _matrices, _recurrent, _selection, _quantized,
]  # fmt: skip


def random_model(seed: int) -> Random:
    """The model of a seed, and values of its inputs."""
    rng = np.random.default_rng(seed)
    op, attributes, inputs, constants, outputs = _FAMILIES[seed % len(_FAMILIES)](rng)
    names = [f"x{k}" for k in range(len(inputs))]
    fixed = [f"c{k}" for k in range(len(constants))]
    results = [f"y{k}" for k in range(outputs)]
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs, strict=True)
    ]
    kept = [onnx.numpy_helper.from_array(np.asarray(c), n) for n, c in zip(fixed, constants, strict=True)]
    node = helper.make_node(op, [*names, *fixed], results, **attributes)
    graph = helper.make_graph([node], "g", given, [onnx.ValueInfoProto(name=n) for n in results], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model)
    shapes = [x.shape for x in inputs], [np.asarray(c).shape for c in constants]
    return Random(model, inputs, f"seed {seed}: {op} {attributes}, inputs and constants {shapes}")
