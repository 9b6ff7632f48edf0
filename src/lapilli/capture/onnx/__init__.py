"""ONNX files as a source of models: each node becomes ATen calls under torch.export.

`onnx_reading` checks a file and takes it into plain data, `onnx_interpreter` runs its graph, `onnx_module` is the module
that torch.export traces.
The other files have the operators, a family in each (`onnx_registry.OPERATORS`).
"""

from importlib import import_module

from lapilli.capture.onnx.onnx_module import OnnxModule
from lapilli.capture.onnx.onnx_module import examples as onnx_examples
from lapilli.capture.onnx.onnx_module import load as load_onnx
from lapilli.capture.onnx.onnx_reading import is_onnx_file

_FAMILIES = (
    "attention",
    "contrib",
    "control_flow",
    "convolution",
    "elementwise",
    "image",
    "indexing",
    "linear",
    "linear_attention",
    "normalization",
    "pooling",
    "quantization",
    "random",
    "recurrent",
    "reduction",
    "resize",
    "sequences",
    "shapes",
    "signal",
    "training",
    "trees",
)
for _family in _FAMILIES:
    import_module(f"lapilli.capture.onnx.onnx_{_family}")  # which enters its rules

__all__ = ["OnnxModule", "is_onnx_file", "load_onnx", "onnx_examples"]
