"""Operators of com.microsoft against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn

from lapilli.capture import prepared

_RNG = np.random.default_rng(0)


def f(*shape: int) -> Any:
    return _RNG.standard_normal(shape).astype(np.float32)


def u(*shape: int) -> Any:
    return _RNG.integers(0, 256, shape).astype(np.uint8)


def s(*shape: int) -> Any:
    return _RNG.integers(-128, 128, shape).astype(np.int8)


S, Z = np.float32(0.25), np.uint8(120)
ANGLES = np.arange(32)[:, None] * 0.3 ** np.arange(4)[None]
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)
QKV = [f(2, 5, 32), f(2, 5, 16), f(2, 5, 16)]

Case = tuple[str, dict[str, Any], list[Any], int]
CASES: dict[str, Case] = {
    "gelu": ("Gelu", {}, [f(3, 4)], 1),
    "fast gelu": ("FastGelu", {}, [f(3, 4), f(4)], 1),
    "bias gelu": ("BiasGelu", {}, [f(3, 4), f(4)], 1),
    "quick gelu": ("QuickGelu", {"alpha": 1.5}, [f(3, 4)], 1),
    "fused matmul": ("FusedMatMul", {"transA": 1, "transB": 1, "alpha": 0.5}, [f(2, 4, 3), f(2, 5, 4)], 1),
    "skip layer norm": ("SkipLayerNormalization", {"epsilon": 1e-3}, [f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)], 1),
    "skip rms norm": ("SkipSimplifiedLayerNormalization", {"epsilon": 1e-3}, [f(2, 3, 8), f(2, 3, 8), f(8)], 1),
    "embedding": (
        "EmbedLayerNormalization", {"epsilon": 1e-3},
        [np.array([[1, 2, 3]], np.int32), np.array([[0, 1, 1]], np.int32), f(9, 8), f(6, 8), f(2, 8), f(8), f(8)], 2,
    ),
    "rotary": ("RotaryEmbedding", {}, [f(2, 4, 5, 8), np.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]]), COS, SIN], 1),
    "rotary, interleaved": ("RotaryEmbedding", {"interleaved": 1}, [f(2, 5, 32), np.array([3]), COS, SIN], 1),
    "attention": ("MultiHeadAttention", {"num_heads": 4}, [f(2, 5, 32), f(2, 6, 32), f(2, 6, 32)], 1),
    "attention, bias": (
        "MultiHeadAttention", {"num_heads": 4}, [f(2, 5, 32), f(2, 6, 32), f(2, 6, 32), f(96), None, f(1, 4, 5, 6)], 1,
    ),
    "packed attention": ("Attention", {"num_heads": 2, "unidirectional": 1}, [f(2, 5, 16), f(16, 48), f(48)], 1),
    "grouped attention": (
        "GroupQueryAttention", {"num_heads": 4, "kv_num_heads": 2},
        [*QKV, None, None, np.array([4, 4], np.int32), np.array(5, np.int32)], 3,
    ),
    "grouped attention, one more token, rotary": (
        "GroupQueryAttention", {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
        [f(2, 1, 64), f(2, 1, 32), f(2, 1, 32), f(2, 2, 3, 16), f(2, 2, 3, 16), np.array([3, 3], np.int32), np.array(4, np.int32),
         np.tile(COS, 2), np.tile(SIN, 2)], 3,
    ),
    "grouped attention, packed, a window": (
        "GroupQueryAttention", {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 2},
        [f(2, 5, 64), None, None, None, None, np.array([4, 4], np.int32), np.array(5, np.int32)], 3,
    ),
    "4 bits": ("MatMulNBits", {"K": 40, "N": 6, "bits": 4, "block_size": 16}, [f(3, 40), u(6, 3, 8), f(18)], 1),
    "4 bits, zeros": ("MatMulNBits", {"K": 40, "N": 6, "bits": 4, "block_size": 16}, [f(3, 40), u(6, 3, 8), f(18), u(12)], 1),
    "8 bits": ("MatMulNBits", {"K": 32, "N": 6, "bits": 8, "block_size": 16}, [f(3, 32), u(6, 2, 16), f(12)], 1),
    "dynamic": ("DynamicQuantizeMatMul", {}, [f(3, 8), s(8, 4), np.float32(0.1), np.int8(2), f(4)], 1),
    "integers to float": ("MatMulIntegerToFloat", {}, [u(3, 8), s(8, 4), S, np.float32(0.1), Z, np.int8(2), f(4)], 1),
    "add": ("QLinearAdd", {}, [u(3, 4), S, Z, u(3, 4), S, Z, np.float32(0.5), Z], 1),
    "mul": ("QLinearMul", {}, [u(3, 4), S, Z, u(3, 4), S, Z, np.float32(4), Z], 1),
    "sigmoid": ("QLinearSigmoid", {}, [u(3, 4), S, Z, np.float32(1 / 256), np.uint8(0)], 1),
    "leaky": ("QLinearLeakyRelu", {"alpha": 0.125}, [u(3, 4), S, Z, S, Z], 1),
    "concat": ("QLinearConcat", {"axis": 1}, [S, Z, u(3, 4), S, Z, u(3, 2), np.float32(0.5), Z], 1),
    "average": ("QLinearGlobalAveragePool", {}, [u(2, 3, 4, 4), S, Z, S, Z], 1),
    "gemm": ("QGemm", {"transB": 1}, [u(3, 8), S, Z, s(4, 8), S, np.int8(1), None, np.float32(8), Z], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_onnxruntime(name: str, tmp_path: Path) -> None:
    op, attributes, values, outputs = CASES[name]
    names = [f"x{k}" if v is not None else "" for k, v in enumerate(values)]
    given = {n: np.asarray(v) for n, v in zip(names, values, strict=True) if n}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in given.items()
    ]
    results = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op, names, results, domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name=n) for n in results])
    first = np.uint8 if op.startswith(("QLinear", "QGemm")) else np.float32
    kinds = [first, np.int32 if op == "EmbedLayerNormalization" else np.float32, np.float32]
    for value, kind in zip(graph.output, kinds, strict=False):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, given)
    inputs = [torch.from_numpy(v) for v in given.values()]
    module = prepared(path, inputs, ())[0]
    assert isinstance(module, nn.Module)
    with torch.no_grad():
        got = module(*inputs)
    for result, wanted in zip([got] if outputs == 1 else got, expected, strict=True):
        assert result.numpy().dtype == wanted.dtype and result.numpy().shape == wanted.shape
        if wanted.dtype == np.float32:
            np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-4, atol=2e-5)
        else:
            np.testing.assert_array_equal(result.numpy(), wanted)
