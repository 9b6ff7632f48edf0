"""The names that users give to dynamic dimensions; torch.export calls their symbols s77 and the like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_flatten

from lapilli.capture.examples import Arguments


def dim_names(
    program: ExportedProgram, model: Any, example_inputs: Any = None, dynamic_shapes: Any = None
) -> dict[str, str]:
    """The name of the `Dim` of each symbol, by the symbol's name. Arguments after the first as for `capture`. A program that was
    exported earlier has lost the names."""
    if isinstance(model, ExportedProgram) or not dynamic_shapes:
        return {}
    if isinstance(example_inputs, Arguments):
        args, kwargs = example_inputs.args, example_inputs.kwargs
    else:
        keywords = isinstance(example_inputs, Mapping)
        args, kwargs = ((), dict(example_inputs)) if keywords else (tuple(example_inputs), {})
    given = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    inputs = [given.get(name) for name in program.graph_signature.user_inputs]
    places = {id(leaf): value for leaf, value in zip(tree_flatten((args, kwargs))[0], inputs, strict=False)}
    value: Any = args
    if isinstance(dynamic_shapes, Mapping):
        signature = program.module_call_graph[0].signature
        assert signature is not None and signature.forward_arg_names is not None
        value = dict(zip(signature.forward_arg_names, args, strict=False)) | kwargs
    names: dict[str, str] = {}
    for leaf, axis, dim in _dims(dynamic_shapes, value):
        val = places.get(id(leaf))
        size = val.shape[axis] if isinstance(val, torch.Tensor) else None
        symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
        if len(symbols) == 1:
            names.setdefault(next(iter(symbols)).name, getattr(dim, "root", dim).__name__)
    return names


def _dims(spec: Any, value: Any) -> Iterator[tuple[torch.Tensor, int, Any]]:
    """The Dims in a specification, each with its tensor and axis."""
    items = spec.items() if isinstance(spec, Mapping) else enumerate(spec) if isinstance(spec, list | tuple) else ()
    for key, part in items:
        if isinstance(value, torch.Tensor):
            if isinstance(part, Dim):
                yield value, key, part
        elif (isinstance(value, Mapping) and key in value) or (isinstance(value, list | tuple) and key < len(value)):
            yield from _dims(part, value[key])
