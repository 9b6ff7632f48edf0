"""The graph passes in order, from an exported program to a module that is ready to be lowered."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lapilli.graph.complex import split_complex
from lapilli.graph.fold import fold_batch_norm, fold_constants, fold_padding
from lapilli.graph.functionalize import functionalize
from lapilli.graph.inline import inline_regions
from lapilli.graph.integers import absorb_limits, center, compute_in_integers, move, view_codes
from lapilli.graph.memory import write_out_memory
from lapilli.graph.merge import merge_linear
from lapilli.graph.module import Module
from lapilli.graph.packed import unpack
from lapilli.graph.quantized import narrow_zero_points, pack_codes, recognize, take_apart
from lapilli.graph.requantize import requantize
from lapilli.graph.shared_heads import share_heads
from lapilli.graph.split_large_weights import split_large_weights
from lapilli.graph.turned_codes import turn_codes
from lapilli.legalize.decompose import decompose, decompose_calls, tables
from lapilli.lower import is_supported
from lapilli.runtime.sequences import KINDS

aten = torch.ops.aten

SYNONYMS: dict[str, Any] = {"transformers.grouped_mm_fallback.default": aten._grouped_mm.default}
"""Operators of other packages that ATen has, too. (ATen's grouped product does not accept float64.)"""
RECURRENT: dict[str, Any] = {f"lapilli.{kind}.default": getattr(aten, kind).input for kind in KINDS}
"""Operators that capture does not decompose."""


def prepare(program: ExportedProgram) -> Module:
    """`functional`, followed by folding of batch norm and constants."""
    module = functional(program)
    optimize(module)
    return module


def functional(program: ExportedProgram) -> Module:
    """The program in functional operators that have lowerings, as far as possible.

    torch's own decomposition traces the whole model again, which takes seconds; it is skipped if single calls can be
    replaced.
    """
    module = _as_it_stands(program)
    if module is None:
        module = Module.from_exported(decompose(program))
        take_apart(module)
        recognize(module)
    return module


def optimize(module: Module) -> None:
    """The passes over one graph."""
    clean_up(module)
    split_complex(module, tables()[0])
    fold_batch_norm(module)
    fold_padding(module)
    fold_constants(module, is_supported=is_supported)
    narrow_zero_points(module)
    turn_codes(module)
    center(module)
    move(module)
    absorb_limits(module)
    view_codes(module)
    requantize(module)
    if compute_in_integers(module):
        fold_padding(module)
    pack_codes(module)
    if share_heads(module):
        module.clean()
    merge_linear(module)
    split_large_weights(module)


def _as_it_stands(program: ExportedProgram) -> Module | None:
    module = Module.from_exported(program, copy=True)
    inline_regions(module)
    take_apart(module)
    recognize(module)
    if not functionalize(module, program.graph_signature.inputs_to_buffers.values()):
        return None
    clean_up(module)
    if any(_updates_statistics(n) for n in module.graph.nodes) or not decompose_calls(module):
        return None
    return module


def _updates_statistics(node: fx.Node) -> bool:
    """Whether this is a norm in training mode; its schema does not say that it changes its running statistics."""
    norms = (aten.batch_norm.default, aten.instance_norm.default, aten.native_batch_norm.default)
    return node.target in norms and bool(node.args[5]) and node.args[3] is not None


def clean_up(module: Module) -> None:
    """Removes shape assertions (the player checks sizes against their bounds itself) and calls without effect at inference,
    and gives operators ATen's names.
    """
    write_out_memory(module)  # while .contiguous(), which is an identity of values, is still there
    for node in reversed(list(module.graph.nodes)):
        if node.op != "call_function":
            continue
        name = str(node.target)
        if name in SYNONYMS and node.meta["val"].dtype is not torch.float64:
            node.target = SYNONYMS[name]
        node.target = RECURRENT.get(name, node.target)
        if not node.users and ("assert" in name or "sym_constrain" in name):
            module.graph.erase_node(node)
        elif node.target is operator.getitem and isinstance(node.args[0], list | tuple):
            element: Any = node.args[0][node.args[1]]
            module.replace(node, element)
            module.graph.erase_node(node)
        elif _is_identity(node):
            module.replace(node, node.args[0])
            module.graph.erase_node(node)
    module.clean()
    unpack(module)


def _is_identity(node: fx.Node) -> bool:
    if node.target in (aten.dropout.default, aten.feature_dropout.default):
        return not _argument(node, 2)
    return node.target in (aten.contiguous.default, aten.detach.default, aten.alias.default)


def _argument(node: fx.Node, position: int) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get("train")
