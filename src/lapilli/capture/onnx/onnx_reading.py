"""Reads ONNX files: checks them with the package `onnx`, and takes their graphs into plain data.

A file is not trusted. Data outside it is read from regular files in its own folder alone, and its size must be what the shape says
before any memory is taken for it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lapilli.capture.onnx.onnx_graph import BITS, DTYPES, STRING, WIDENED, OnnxGraph, OnnxInput, OnnxModel, OnnxNode
from lapilli.capture.onnx.onnx_registry import MICROSOFT, OPERATORS
from lapilli.errors import CompileError, UnsupportedOperatorError

FIRST, LAST = 7, 28
"""The versions of the default domain's operators that are known."""
_DEEPEST = 16
_OWN_DOMAINS = ("ai.onnx",)
"""Other names of the default domain."""
_INLINED_AFTER = 8  # expansions of operators that are made of others, which may have such operators themselves


def is_onnx_file(path: Path) -> bool:
    """Whether a file is named as ONNX's are."""
    return path.suffix.lower() == ".onnx"


def require_onnx() -> None:
    """Raises CompileError, which says what to install, if the package `onnx` is missing."""
    if find_spec("onnx") is None:
        raise CompileError(
            "Reading ONNX files needs the package onnx, not installed here. Do: pip install 'lapilli[onnx]'."
        )


def read(path: Path) -> OnnxModel:
    """The model in a file. Raises CompileError if it is damaged, and UnsupportedOperatorError, which names all of them, if it has
    operators that are not known."""
    require_onnx()
    import onnx

    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise CompileError(f"{path} cannot be read: {error}") from error
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:
        raise CompileError(f"{path} is no ONNX file: {error}") from error
    del data
    return model_of(proto, path.resolve().parent)


def model_of(proto: Any, folder: Path | None = None) -> OnnxModel:
    """A model of `onnx.ModelProto`, which is changed. folder: where its external data is."""
    import onnx

    _opsets(proto)
    external: dict[str, torch.Tensor] = {}
    for graph in _graphs(proto.graph):
        for tensor in graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                external[tensor.name] = _external(tensor, folder)
                del tensor.external_data[:]
                tensor.data_location = onnx.TensorProto.DEFAULT
                tensor.dims[:] = [0]
                if tensor.data_type in (onnx.TensorProto.STRING,):
                    raise CompileError(f"{tensor.name} is a tensor of strings, which no device computes with")
    _check(proto)
    proto = _expanded(proto)
    versions = _opsets(proto)
    _refuse_unknown(proto)
    kinds = _kinds(proto)
    reader = _Reader(versions, external)
    return OnnxModel(reader.graph(proto.graph, 0), kinds)


def _check(proto: Any) -> None:
    """Raises CompileError if the package `onnx` finds a model wrong.

    That a value has no shape is not wrong here: many files have such outputs, and nothing is done with the shape of an output.
    """
    import onnx

    shapeless = [
        v.type.tensor_type
        for g in _graphs(proto.graph)
        for v in (*g.input, *g.output)
        if v.type.WhichOneof("value") == "tensor_type" and not v.type.tensor_type.HasField("shape")
    ]
    for kind in shapeless:
        kind.shape.SetInParent()
    try:
        onnx.checker.check_model(proto)
    except Exception as error:
        raise CompileError(f"the ONNX model is not valid: {error}") from error
    for kind in shapeless:
        kind.ClearField("shape")


def _opsets(proto: Any) -> dict[str, int]:
    """The version of each domain. Raises CompileError if the default domain's is too old or too new."""
    versions = {("" if o.domain in _OWN_DOMAINS else o.domain): o.version for o in proto.opset_import}
    used = any(n.domain in ("", *_OWN_DOMAINS) for g in _graphs(proto.graph) for n in g.node)
    if used and not 1 <= versions.get("", 1) <= LAST:
        raise CompileError(f"the model is of opset {versions['']}; {FIRST} to {LAST} can be compiled")
    return versions


def _graphs(graph: Any, depth: int = 0) -> Iterable[Any]:
    """A graph and those inside it."""
    if depth > _DEEPEST:
        raise CompileError(f"graphs are nested more than {_DEEPEST} deep")
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g, depth + 1)
            for inner in attribute.graphs:
                yield from _graphs(inner, depth + 1)


def _key(node: Any) -> tuple[str, str]:
    return ("" if node.domain in _OWN_DOMAINS else node.domain), node.op_type


def _expanded(proto: Any) -> Any:
    """The model without functions of its own, and with the standard's definition of operators that have no rule."""
    import onnx
    import onnx.inliner

    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    for _ in range(_INLINED_AFTER):
        missing = sorted({_key(n) for g in _graphs(proto.graph) for n in g.node if _key(n) not in OPERATORS})
        made = [key for key in missing if _has_definition(key)]
        if not made:
            break
        before = len(proto.graph.node)
        proto = onnx.inliner.inline_selected_functions(proto, made, inline_schema_functions=True)
        if len(proto.graph.node) == before:
            break
    return proto


def _has_definition(key: tuple[str, str]) -> bool:
    import onnx

    try:
        schema: Any = onnx.defs.get_schema(key[1], domain=key[0])
    except Exception:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _refuse_unknown(proto: Any) -> None:
    """Raises UnsupportedOperatorError if there are operators without a rule, or strings."""
    nodes: dict[str, list[str]] = {}
    for graph in _graphs(proto.graph):
        for node in graph.node:
            domain, op = _key(node)
            if (domain, op) not in OPERATORS:
                nodes.setdefault(f"{domain}.{op}" if domain else op, []).append(
                    node.name or next(iter(node.output), "")
                )
    strings = [x.name for x in (*proto.graph.input, *proto.graph.initializer) if _is_string(x)]
    if not nodes and not strings:
        return
    parts = []
    if nodes:
        shown = "; ".join(f"{op} ({_some(names)})" for op, names in sorted(nodes.items()))
        parts.append(f"{len(nodes)} operator(s) that Lapilli does not have: {shown}")
    if strings:
        parts.append(f"strings, which no device computes with ({_some(strings)})")
    raise UnsupportedOperatorError(f"the ONNX model uses {', and '.join(parts)}")


def _some(names: list[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _is_string(value: Any) -> bool:
    if hasattr(value, "data_type"):
        return bool(value.data_type == STRING)
    kind = value.type
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        inner: Any = getattr(kind, kind.WhichOneof("value"))
        kind = inner.elem_type
    return bool(kind.tensor_type.elem_type == STRING)


def _kinds(proto: Any) -> dict[str, int]:
    """The element types of values that are computed in wider dtypes, by name; empty for the usual model, which has none."""
    import onnx

    given = [x.data_type for g in _graphs(proto.graph) for x in g.initializer]
    values = [v.type.tensor_type.elem_type for v in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)]
    for graph in _graphs(proto.graph):
        for node in graph.node:
            for a in node.attribute:
                values.append(
                    a.i if a.name in ("to", "dtype", "output_dtype") else a.t.data_type if a.HasField("t") else 0
                )
    if not WIDENED.intersection([*given, *values]):
        return {}
    typed = onnx.shape_inference.infer_shapes(proto)
    found: dict[str, int] = {}
    for graph in _graphs(typed.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            found[value.name] = _element(value.type)[1]
        found.update((t.name, t.data_type) for t in graph.initializer)
    return {name: kind for name, kind in found.items() if kind in WIDENED}


def _element(kind: Any) -> tuple[str, int, Any]:
    """The container of a type, the element type of its tensors, and their shape."""
    container = "tensor"
    while (which := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        if container == "tensor" or which == "sequence_type":
            container = str(which).partition("_")[0]
        kind = getattr(kind, which).elem_type
    return container, kind.tensor_type.elem_type, kind.tensor_type.shape if kind.tensor_type.HasField("shape") else None


class _Reader:
    def __init__(self, versions: Mapping[str, int], external: Mapping[str, torch.Tensor]) -> None:
        self.versions, self.external = versions, external
        self._since: dict[tuple[str, str], int] = {}

    def graph(self, proto: Any, depth: int) -> OnnxGraph:
        if depth > _DEEPEST:
            raise CompileError(f"graphs are nested more than {_DEEPEST} deep")
        constants = {}
        for tensor in proto.initializer:
            constants[tensor.name] = self.external[tensor.name] if tensor.name in self.external else tensor_of(tensor)
            tensor.ClearField("raw_data")  # what it held is in memory once
        if proto.sparse_initializer:
            raise CompileError("the model has sparse tensors; store them as dense ones")
        inputs = [_input(v) for v in proto.input if depth or v.name not in constants]
        nodes = [self.node(n, depth) for n in proto.node]
        return OnnxGraph(inputs, [v.name for v in proto.output], nodes, constants)

    def node(self, proto: Any, depth: int) -> OnnxNode:
        attributes = {a.name: self.attribute(a, depth) for a in proto.attribute}
        domain, op = _key(proto)
        return OnnxNode(
            op, domain, proto.name, tuple(proto.input), tuple(proto.output), attributes, self.since(domain, op)
        )

    def since(self, domain: str, op: str) -> int:
        """Since which version of its domain an operator has been as it is in the model."""
        import onnx

        if (domain, op) not in self._since:
            version = 0
            if domain != MICROSOFT:
                version = onnx.defs.get_schema(op, self.versions.get(domain, 1), domain).since_version
            self._since[domain, op] = version
        return self._since[domain, op]

    def attribute(self, proto: Any, depth: int) -> Any:
        import onnx

        if proto.ref_attr_name:
            raise CompileError(f"the attribute {proto.name} refers to one of a function that is not there")
        if proto.type == onnx.AttributeProto.GRAPH:
            return self.graph(proto.g, depth + 1)
        if proto.type == onnx.AttributeProto.TENSOR:
            return tensor_of(proto.t)
        if proto.type == onnx.AttributeProto.TENSORS:
            return [tensor_of(t) for t in proto.tensors]
        value = onnx.helper.get_attribute_value(proto)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if proto.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
            return list(value)
        if proto.type == onnx.AttributeProto.STRINGS:
            return [v.decode("utf-8", "replace") for v in value]
        if proto.type in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT):
            return value
        return UNKNOWN


UNKNOWN = object()
"""An attribute of a kind that no rule reads: types, sparse tensors."""


def _input(proto: Any) -> OnnxInput:
    container, kind, shape = _element(proto.type)
    sizes = None
    if shape is not None:
        sizes = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param.strip("? ") or None) for d in shape.dim)
    return OnnxInput(proto.name, kind, sizes, container)


# -- tensors


def tensor_of(proto: Any) -> torch.Tensor:
    """The tensor of a TensorProto that holds its data."""
    import onnx

    if proto.data_type == STRING:
        raise UnsupportedOperatorError(
            f"{proto.name or 'a constant'} is a tensor of strings, which no device computes with"
        )
    if proto.data_type not in DTYPES:
        raise CompileError(
            f"{proto.name or 'a constant'} has the element type {proto.data_type}, which is not supported"
        )
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        raise CompileError(f"{proto.name or 'a constant'} has external data, which only initializers may have")
    try:
        return from_numpy(onnx.numpy_helper.to_array(proto))
    except Exception as error:
        raise CompileError(f"the tensor {proto.name!r} is damaged: {error}") from error


def from_numpy(values: Any) -> torch.Tensor:
    """An array as the tensor that computes with it: of the types that no device has, a wider one."""
    name = values.dtype.name
    if name == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint16).reshape(values.shape)
        return torch.from_numpy(bits.copy()).view(torch.bfloat16)
    if name.startswith("float8") or name.startswith("float4"):
        values = values.astype(np.float32)
    elif name in ("int4", "int2"):
        values = values.astype(np.int8)
    elif name in ("uint4", "uint2"):
        values = values.astype(np.uint8)
    elif name == "uint16":
        values = values.astype(np.int32)
    elif name == "uint32":
        values = values.astype(np.int64)
    elif name == "uint64":
        values = values.view(np.int64) if values.ndim else values.astype(np.int64)
    return torch.from_numpy(np.array(values, order="C"))


def _external(proto: Any, folder: Path | None) -> torch.Tensor:
    """The tensor of a TensorProto whose data is in another file.

    Raises CompileError unless that is a regular file in the model's folder, and holds what the shape says.
    """
    import onnx

    name = proto.name
    entries = {e.key: e.value for e in proto.external_data}
    location = entries.get("location", "")
    if not isinstance(location, str):  # bytes that are no text
        raise CompileError(f"the tensor {name!r} names the file {location!r}: it must be in the model's own folder")
    if folder is None:
        raise CompileError(
            f"the tensor {name!r} has external data, and the model has no folder: give the path of its file"
        )
    parts = Path(location).parts
    if (
        not location
        or "\0" in location
        or os.path.isabs(location)
        or ".." in parts
        or "\\" in location
        or ":" in location
    ):
        raise CompileError(f"the tensor {name!r} names the file {location!r}: it must be in the model's own folder")
    if proto.data_type not in DTYPES or proto.data_type == STRING:
        raise CompileError(f"the tensor {name!r} has the element type {proto.data_type}, which is not supported")
    bits = BITS[proto.data_type][0] if proto.data_type in BITS else 0
    itemsize = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(proto.data_type)).itemsize
    dims = list(proto.dims)
    if any(d < 0 for d in dims):
        raise CompileError(f"the tensor {name!r} has the shape {dims}")
    elements = prod(dims)
    wanted = (
        (elements * bits + 7) // 8
        if bits in (2, 4)
        else (elements + 1) // 2
        if proto.data_type == 23
        else elements * itemsize
    )
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", wanted))
    except ValueError:
        raise CompileError(f"the place of the tensor {name!r} in {location} is no number") from None
    if offset < 0 or length != wanted:
        raise CompileError(
            f"the tensor {name!r} of shape {dims} has {wanted} bytes, but {length} at {offset} are named"
        )
    data = _read(folder.joinpath(*parts), folder, name, offset, length)
    raw = onnx.TensorProto(name=name, data_type=proto.data_type, dims=dims)
    if bits in (2, 4) or proto.data_type == 23:
        raw.raw_data = bytes(data)
        return from_numpy(onnx.numpy_helper.to_array(raw))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(proto.data_type)
    return from_numpy(
        np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<") if dtype.kind != "V" else dtype).reshape(dims)
    )


def _read(path: Path, folder: Path, name: str, offset: int, length: int) -> bytearray:
    """Bytes of a regular file in a folder; links are not followed."""
    place = folder
    for part in path.relative_to(folder).parts[:-1]:
        place = place / part
        if place.is_symlink():
            raise CompileError(f"the data of {name!r} is in {path}, behind a link, which is not followed")
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        reason = "it is a link, which is not followed" if path.is_symlink() else error.strerror
        raise CompileError(f"the data of the tensor {name!r} in {path} cannot be read: {reason}") from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CompileError(f"the data of the tensor {name!r} is in {path}, which is no regular file")
        if offset + length > status.st_size:
            raise CompileError(
                f"the data of the tensor {name!r} ends at {offset + length}, and {path} has {status.st_size} bytes"
            )
        file.seek(offset)
        data = bytearray(length)
        if file.readinto(data) != length:
            raise CompileError(f"{path} has become shorter while it was read")
        return data
