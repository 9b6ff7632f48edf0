"""How each system runs a model from its file: a function of an array. Imported in the system's own environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Run = Callable[[Array], Array]


def lapilli(folder: Path, name: str) -> Run:
    """The program that is compiled from the ONNX file; only the player is imported here."""
    import lapilli as player

    program = player.load(folder / f"{name}.lap")
    return lambda x: np.asarray(program(x))


def torch(folder: Path, name: str) -> Run:
    import torch as pytorch

    model = pytorch.jit.load(str(folder / f"{name}.pt"))
    return lambda x: model(pytorch.from_numpy(x)).numpy()


def onnxruntime(folder: Path, name: str) -> Run:
    import onnxruntime as ort

    session = ort.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
    key = session.get_inputs()[0].name
    return lambda x: session.run(None, {key: x})[0]


def ncnn(folder: Path, name: str, vulkan: bool = False) -> Run:
    """What pnnx made of the TorchScript file. ncnn's tensors have no batch: that of these inputs is 1, or rows."""
    import ncnn as library

    net = library.Net()
    net.opt.use_vulkan_compute = vulkan
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, option, False)  # float32, as all others
    net.load_param(str(folder / f"{name}.ncnn.param"))
    net.load_model(str(folder / f"{name}.ncnn.bin"))

    def run(x: Array) -> Array:
        extractor = net.create_extractor()
        extractor.input("in0", library.Mat(x if name == "products" else x[0]))
        _, out = extractor.extract("out0")
        return np.array(out)

    return run


def ncnn_vulkan(folder: Path, name: str) -> Run:
    return ncnn(folder, name, True)


def executorch(folder: Path, name: str) -> Run:
    """The XNNPACK delegate, which the wheel has; its Vulkan runtime needs a build from source."""
    import torch as pytorch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    from runtimes.models import made

    model, x = made(name)
    exported = pytorch.export.export(model, (x,))
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    loaded = Runtime.get().load_program(program.buffer)
    method = loaded.load_method("forward")

    def run(given: Array) -> Array:
        assert loaded
        return method.execute([pytorch.from_numpy(given)])[0].numpy()

    return run


def tinygrad(folder: Path, name: str) -> Run:
    from tinygrad import Tensor, TinyJit
    from tinygrad.nn.onnx import OnnxRunner

    runner = OnnxRunner(str(folder / f"{name}.onnx"))
    key = next(iter(runner.graph_inputs))

    step = TinyJit(lambda x: next(iter(runner({key: x}).values())).realize())
    return lambda x: step(Tensor(x).realize()).numpy()


def mlx(folder: Path, name: str) -> Run:
    """Written by hand: MLX reads neither ONNX nor PyTorch's files. mx.compile, on its CPU."""
    import mlx.core as mx
    import mlx.nn as nn

    weights = {key: mx.array(value) for key, value in np.load(folder / f"{name}.npz").items() if key not in ("x", "y")}

    def linear(x: Any, key: str) -> Any:
        return mx.addmm(weights[f"{key}.bias"], x, weights[f"{key}.weight"].T)

    def conv(x: Any, key: str, stride: int) -> Any:
        return mx.conv2d(x, weights[f"{key}.weight"].transpose(0, 2, 3, 1), stride, 1) + weights[f"{key}.bias"]

    def norm(x: Any, key: str) -> Any:
        return mx.fast.layer_norm(x, weights[f"{key}.weight"], weights[f"{key}.bias"], 1e-5)

    def convolutions(x: Any) -> Any:
        x = x.transpose(0, 2, 3, 1)
        x = nn.relu(conv(nn.relu(conv(x, "first", 2)), "second", 2))
        for k in range(6):
            x = nn.relu(conv(x, f"rest.{k}", 1)) + x
        return linear(x.mean((1, 2)), "head")

    def transformer(x: Any) -> Any:
        width, heads = 256, 4
        for k in range(4):
            key = f"blocks.{k}"
            parts = linear(norm(x, f"{key}.norm1"), f"{key}.qkv").split(3, -1)
            q, keys, v = (t.reshape(1, -1, heads, width // heads).transpose(0, 2, 1, 3) for t in parts)
            mixed = mx.fast.scaled_dot_product_attention(q, keys, v, scale=(width // heads) ** -0.5)
            x = x + linear(mixed.transpose(0, 2, 1, 3).reshape(1, -1, width), f"{key}.out")
            x = x + linear(nn.gelu(linear(norm(x, f"{key}.norm2"), f"{key}.up")), f"{key}.down")
        return x

    def products(x: Any) -> Any:
        for k in range(3):
            x = nn.relu(linear(x, f"layers.{k}"))
        return x

    step = mx.compile({"convolutions": convolutions, "transformer": transformer, "products": products}[name])
    return lambda x: np.array(step(mx.array(x)))


SYSTEMS: dict[str, Callable[[Path, str], Run]] = {
    "lapilli": lapilli,
    "torch": torch,
    "onnxruntime": onnxruntime,
    "ncnn": ncnn,
    "ncnn-vulkan": ncnn_vulkan,
    "executorch": executorch,
    "tinygrad": tinygrad,
    "mlx": mlx,
}
OPEN = ("lapilli", "onnxruntime", "tinygrad")
"""Those that read an ONNX file with open sizes."""
