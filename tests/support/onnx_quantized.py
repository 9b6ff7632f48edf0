"""Quantized ONNX graphs in Lapilli and in onnxruntime: a model of a few nodes in both, and random models from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.random import Generator
from onnx import helper

import lapilli

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


def model_of(nodes: Sequence[Any], inputs: dict[str, Any], constants: dict[str, Any], outputs: Sequence[Any]) -> Any:
    weights = [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "g", [_info(name, v) for name, v in inputs.items()], outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def saved(
    folder: Path, nodes: Sequence[Any], inputs: dict[str, Any], constants: dict[str, Any], outputs: dict[str, Any]
) -> Path:
    """A model in a file. outputs: arrays of their types and shapes, by name."""
    path = folder / "model.onnx"
    model = model_of(nodes, inputs, constants, [_info(name, v) for name, v in outputs.items()])
    path.write_bytes(model.SerializeToString())
    return path


class Pair:
    """A model in a file, in both. inputs and constants: arrays by name."""

    def __init__(
        self, folder: Path, nodes: Sequence[Any], inputs: dict[str, Any], constants: dict[str, Any], outputs: Sequence[str],
        **options: Any,
    ) -> None:  # fmt: skip
        self.arrays = {name: np.asarray(v) for name, v in inputs.items()}
        model = model_of(nodes, self.arrays, constants, [helper.make_empty_tensor_value_info(o) for o in outputs])
        settings = onnxruntime.SessionOptions()
        # A weight of blocks becomes MatMulNBits there, which otherwise rounds the other operand to 8 bits: 0.5 % of the result.
        settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        self.wanted: list[Any] = list(session.run(None, self.arrays))
        path = saved(folder, nodes, self.arrays, constants, dict(zip(outputs, self.wanted, strict=True)))
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


# -- random models


@dataclass(frozen=True)
class Random:
    """codes: whether results are the same integers; otherwise floats that are close. integers: how many sums are of integers."""

    nodes: list[Any]
    inputs: dict[str, Any]
    constants: dict[str, Any]
    outputs: list[str]
    codes: bool = True
    integers: int = 1


def _one(r: Generator, low: int, high: int) -> int:
    return int(r.integers(low, high + 1))


def _codes(r: Generator, kind: Any, *shape: int, few: bool = False) -> Any:
    """few: of 7 bits if they have a sign, as `int8`."""
    info = np.iinfo(kind)
    half = few and info.min < 0
    return r.integers(info.min // 2 if half else info.min, info.max // 2 + 1 if half else info.max + 1, shape).astype(
        kind
    )


def _scales(r: Generator, *shape: int) -> Any:
    return (0.5 + r.random(shape)).astype(np.float32) / 64


def _kinds(r: Generator) -> tuple[Any, Any]:
    """Of activations and weights, as onnxruntime's kernels have them."""
    return ((np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8))[_one(r, 0, 2)]


def _window(r: Generator, group: int = 0) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """A convolution: its attributes, the shapes of its input and of its weight."""
    rank, group = _one(r, 1, 2), group or _one(r, 1, 3)
    each, out = _one(r, 1, 7), _one(r, 1, 5) * group
    kernel = [_one(r, 1, 3) for _ in range(rank)]
    made: dict[str, Any] = {"kernel_shape": kernel, "group": group, "strides": [_one(r, 1, 2) for _ in range(rank)]}
    if r.random() < 0.7:
        made["pads"] = [_one(r, 0, k - 1) for k in (*kernel, *kernel)]
        made["dilations"] = [_one(r, 1, 2) for _ in range(rank)]
    else:
        made["auto_pad"] = str(r.choice(["VALID", "SAME_UPPER", "SAME_LOWER"]))
        made["strides"] = [min(s, k) for s, k in zip(made["strides"], kernel, strict=True)]
    sizes = [_one(r, 5, 11) for _ in range(rank)]
    return made, (_one(r, 1, 2), each * group, *sizes), (out, each, *kernel)


def _matmul_integer(r: Generator) -> Random:
    kind, of_weight = _kinds(r)
    k, n = _one(r, 1, 600), _one(r, 1, 20)
    a = _codes(r, kind, *[_one(r, 1, 4) for _ in range(_one(r, 1, 3))], k)
    constants = {"b": _codes(r, of_weight, k, n, few=True)}
    zeros = _one(r, 0, 3)
    if zeros:
        constants["za"] = _codes(r, kind) if zeros < 3 else _codes(r, kind, 1)
    if zeros > 1:
        constants["zb"] = _codes(r, of_weight) if zeros == 2 else _codes(r, of_weight, n)
    return Random([NODE("MatMulInteger", ["a", *constants][: 1 + len(constants)], ["y"])], {"a": a}, constants, ["y"])


def _conv_integer(r: Generator) -> Random:
    attributes, size, of_weight = _window(r)
    constants = {"w": _codes(r, np.uint8, *of_weight), "zx": _codes(r, np.uint8), "zw": _codes(r, np.uint8)}
    nodes = [NODE("ConvInteger", ["x", *constants][: 2 + _one(r, 0, 2)], ["y"], **attributes)]
    used = {k: v for k, v in constants.items() if k in nodes[0].input}
    return Random(nodes, {"x": _codes(r, np.uint8, *size)}, used, ["y"])


def _dynamic(r: Generator) -> Random:
    k, n = _one(r, 1, 300), _one(r, 1, 20)
    x = floats(*[_one(r, 1, 4) for _ in range(_one(r, 1, 3))], k, seed=_one(r, 0, 999)) * float(
        r.choice([0.01, 1, 100])
    )
    x = np.abs(x) if r.random() < 0.3 else x
    each = r.random() < 0.5
    constants = {"w": _codes(r, np.int8, k, n, few=True), "wz": _codes(r, np.int8, *([n] if each else []))}
    nodes = [NODE("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), NODE("MatMulInteger", ["q", "w", "z", "wz"], ["y"])]
    return Random(nodes, {"x": x}, constants, ["q", "s", "z", "y"])


def _operands(r: Generator, k: int, channels: int, kinds: tuple[Any, Any]) -> dict[str, Any]:
    """Scales and zero points of an input, a weight and a result, of which few are beyond its codes."""
    kind, of_weight = kinds
    each = [channels] if r.random() < 0.5 else []
    zero = np.full(each, _codes(r, of_weight, few=True) if of_weight is np.uint8 or not each else 0, of_weight)
    sx, sw = _scales(r), _scales(r, *each)
    sy = np.float32(sx * sw.mean() * 100 * np.sqrt(k))
    return {"sx": sx, "zx": _codes(r, kind), "sw": sw, "zw": zero, "sy": sy, "zy": _codes(r, kind)}


def _bias(r: Generator, channels: int) -> Any:
    return r.integers(-20000, 20000, channels).astype(np.int32)


def _qlinear_conv(r: Generator) -> Random:
    attributes, size, of_weight = _window(r)
    kinds = _kinds(r)
    c = _operands(r, int(np.prod(of_weight[1:])), of_weight[0], kinds)
    names = ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"]
    c["w"] = _codes(r, kinds[1], *of_weight, few=True)
    if r.random() < 0.5:
        c["bias"] = _bias(r, of_weight[0])
        names.append("bias")
    return Random([NODE("QLinearConv", names, ["y"], **attributes)], {"x": _codes(r, kinds[0], *size)}, c, ["y"])


def _qlinear_matmul(r: Generator) -> Random:
    k, n, kinds = _one(r, 1, 300), _one(r, 1, 20), _kinds(r)
    c = _operands(r, k, n, kinds)
    c["w"] = _codes(r, kinds[1], k, n, few=True)
    x = _codes(r, kinds[0], *[_one(r, 1, 4) for _ in range(_one(r, 1, 3))], k)
    return Random([NODE("QLinearMatMul", ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"], ["y"])], {"x": x}, c, ["y"])


def _qgemm(r: Generator) -> Random:
    m, k, n, kinds = _one(r, 1, 9), _one(r, 1, 300), _one(r, 1, 20), _kinds(r)
    c = _operands(r, k, n, kinds)
    ta, tb = _one(r, 0, 1), _one(r, 0, 1)
    c |= {"w": _codes(r, kinds[1], *((n, k) if tb else (k, n)), few=True), "bias": _bias(r, n)}
    names = ["x", "sx", "zx", "w", "sw", "zw", "bias" if r.random() < 0.7 else "", "sy", "zy"]
    alpha = float(r.choice([1.0, 0.5, 1.7]))
    nodes = [NODE("QGemm", names, ["y"], transA=ta, transB=tb, alpha=alpha, **MICROSOFT)]
    used = {key: v for key, v in c.items() if key in names}
    return Random(nodes, {"x": _codes(r, kinds[0], *((k, m) if ta else (m, k)))}, used, ["y"])


def _dequantized(name: str, axis: int = 1) -> Any:
    return NODE("DequantizeLinear", [name, f"s{name}", f"z{name}"], [f"{name}_float"], axis=axis)


def _around(r: Generator, layer: Any, x: Any, c: dict[str, Any], axis: int, channels: int, biased: bool) -> Random:
    """A layer between DequantizeLinear and QuantizeLinear."""
    nodes = [_dequantized("x"), _dequantized("w", axis), layer, NODE("QuantizeLinear", ["float", "sy", "zy"], ["y"])]
    if biased:
        c |= {"bias": _bias(r, channels), "sbias": c["sx"] * c["sw"]}
        nodes.insert(2, NODE("DequantizeLinear", ["bias", "sbias"], ["bias_float"], axis=0))
        layer.input.append("bias_float")
    return Random(nodes, {"x": x}, c, ["y"])


def _qdq_conv(r: Generator) -> Random:
    attributes, size, of_weight = _window(r)
    kinds = ((np.uint8, np.int8), (np.int8, np.int8))[_one(r, 0, 1)]
    c = _operands(r, int(np.prod(of_weight[1:])), of_weight[0], kinds)
    c |= {"w": _codes(r, kinds[1], *of_weight, few=True)}
    layer = NODE("Conv", ["x_float", "w_float"], ["float"], **attributes)
    return _around(r, layer, _codes(r, kinds[0], *size), c, 0, of_weight[0], r.random() < 0.5)


def _qdq_product(r: Generator) -> Random:
    k, n = _one(r, 1, 300), _one(r, 1, 20)
    kinds = ((np.uint8, np.int8), (np.int8, np.int8))[_one(r, 0, 1)]
    c = _operands(r, k, n, kinds)
    if r.random() < 0.5:
        c["w"] = _codes(r, kinds[1], k, n, few=True)
        x = _codes(r, kinds[0], *[_one(r, 1, 4) for _ in range(_one(r, 1, 3))], k)
        return _around(r, NODE("MatMul", ["x_float", "w_float"], ["float"]), x, c, 1, n, False)
    turned = _one(r, 0, 1)
    c["w"] = _codes(r, kinds[1], *((n, k) if turned else (k, n)), few=True)
    layer = NODE("Gemm", ["x_float", "w_float"], ["float"], transB=turned)
    return _around(r, layer, _codes(r, kinds[0], _one(r, 1, 9), k), c, 1 - turned, n, r.random() < 0.7)


def _grid(r: Generator) -> tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]:
    """A shape, the attributes of what quantizes it, and the shape of its scales: one, one of a place on an axis, or of a block."""
    shape = tuple(_one(r, 1, 9) for _ in range(_one(r, 1, 4)))
    axis = _one(r, -len(shape), len(shape) - 1)
    how = _one(r, 0, 2)
    if how == 0:
        return shape, {}, ()
    if how == 1:
        return shape, {"axis": axis}, (shape[axis],)
    block = _one(r, 1, 4)
    of_blocks = list(shape)
    of_blocks[axis] = -(-shape[axis] // block)
    if of_blocks == [1]:  # which onnxruntime takes for one scale
        return shape, {}, ()
    return shape, {"axis": axis, "block_size": block}, tuple(of_blocks)


def _quantize(r: Generator) -> Random:
    """Also of numbers that lie between two codes: half a step, to which a scale of a power of two adds nothing."""
    shape, attributes, of_scale = _grid(r)
    kind = (np.uint8, np.int8)[_one(r, 0, 1)]
    scale = _scales(r, *of_scale) if r.random() < 0.6 else (2.0 ** r.integers(-6, 1, of_scale)).astype(np.float32)
    x = (
        floats(*shape, seed=_one(r, 0, 999))
        if r.random() < 0.5
        else (r.integers(-300, 300, shape) / 128).astype(np.float32)
    )
    c = {"s": scale, "z": _codes(r, kind, *of_scale)}
    return Random([NODE("QuantizeLinear", ["x", "s", "z"], ["y"], **attributes)], {"x": x}, c, ["y"], integers=0)


def _dequantize(r: Generator) -> Random:
    shape, attributes, of_scale = _grid(r)
    kind = (np.uint8, np.int8)[_one(r, 0, 1)]
    c = {"s": _scales(r, *of_scale), "z": _codes(r, kind, *of_scale)}
    x = _codes(r, kind, *shape)
    return Random([NODE("DequantizeLinear", ["x", "s", "z"], ["y"], **attributes)], {"x": x}, c, ["y"], integers=0)


def _nbits(r: Generator) -> Random:
    bits, block = (4, 8)[_one(r, 0, 1)], (16, 32, 64, 128)[_one(r, 0, 3)]
    k, n = _one(r, 1, 300), _one(r, 1, 40)
    blocks = -(-k // block)
    c = {"b": _codes(r, np.uint8, n, blocks, block * bits // 8), "s": _scales(r, n * blocks)}
    zeros = _one(r, 0, 2)
    if zeros == 1:
        c["z"] = _codes(r, np.uint8, n * -(-blocks * bits // 8))
    elif zeros == 2 and bits == 4:
        c["z"] = (8 + r.standard_normal(n * blocks)).astype(np.float32)
    x = floats(*[_one(r, 1, 5) for _ in range(_one(r, 1, 2))], k, seed=_one(r, 0, 999))
    inputs = ["x", "b", "s", "z" if "z" in c else ""]
    if bits == 4 and "z" not in c and _one(r, 0, 1):  # onnxruntime ignores zero points then, and has no 8 bits
        c["g"] = r.permutation(np.arange(k, dtype=np.int32) // block)
        c["g"][: _one(r, 0, 2)] = 0
        inputs.append("g")
    nodes = [NODE("MatMulNBits", inputs, ["y"], K=k, N=n, bits=bits, block_size=block, **MICROSOFT)]
    return Random(nodes, {"x": x}, c, ["y"], codes=False, integers=0)


def _blocks_of_weight(r: Generator) -> Random:
    """A weight of blocks before a product of floats."""
    k, n, block = _one(r, 1, 200), _one(r, 1, 20), _one(r, 2, 40)
    kind, blocks = (np.uint8, np.int8)[_one(r, 0, 1)], -(-k // block)
    c = {"w": _codes(r, kind, k, n), "sw": _scales(r, blocks, n), "zw": _codes(r, kind, blocks, n)}
    nodes = [NODE("DequantizeLinear", ["w", "sw", "zw"], ["w_float"], axis=0, block_size=block)]
    nodes.append(NODE("MatMul", ["x", "w_float"], ["y"]))
    return Random(nodes, {"x": floats(_one(r, 1, 5), k, seed=_one(r, 0, 999))}, c, ["y"], codes=False, integers=0)


def _qlinear_mul(r: Generator) -> Random:
    shape, kind = tuple(_one(r, 1, 9) for _ in range(3)), (np.uint8, np.int8)[_one(r, 0, 1)]
    c = {"sa": _scales(r), "za": _codes(r, kind), "sb": _scales(r), "zb": _codes(r, kind)}
    c |= {"sy": _scales(r) * np.float32(0.9), "zy": _codes(r, kind)}
    inputs = {"a": _codes(r, kind, *shape), "b": _codes(r, kind, *shape[_one(r, 0, 2) :])}
    nodes = [NODE("QLinearMul", ["a", "sa", "za", "b", "sb", "zb", "sy", "zy"], ["y"], **MICROSOFT)]
    return Random(nodes, inputs, c, ["y"], integers=0)


FAMILIES: dict[str, Callable[[Generator], Random]] = {
    "MatMulInteger": _matmul_integer, "ConvInteger": _conv_integer, "DynamicQuantizeLinear": _dynamic, "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul, "QGemm": _qgemm, "QDQ convolution": _qdq_conv, "QDQ product": _qdq_product,
    "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize, "MatMulNBits": _nbits, "QLinearMul": _qlinear_mul,
    "blocks": _blocks_of_weight,
}  # fmt: skip
PLANS = ("cpu-fp32", "gpu-fp32", "gpu-fp16", "gpu-fp32-dot", "gpu-fp16-dot")


def random_pair(family: str, seed: int, folder: Path) -> tuple[Random, Pair]:
    """A model of a family, run in both, by kernels of one of the plans; floats are not rounded to 16 bits."""
    made = FAMILIES[family](np.random.default_rng([seed, *family.encode()]))
    has_floats = any(x.dtype == np.float32 for x in made.inputs.values())
    plans = [p for p in PLANS if "fp16" not in p or (made.integers and not has_floats)]
    plan = plans[seed % len(plans)]
    given = made.nodes, made.inputs, made.constants, made.outputs
    return made, Pair(folder, *given, target=plan, precision=plan.split("-")[1])
