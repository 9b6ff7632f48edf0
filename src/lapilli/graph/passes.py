"""The graph stage: an exported program in, a module ready to be lowered out."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from lapilli.graph.decompose import decompose
from lapilli.graph.fold import fold_batch_norm, fold_constants
from lapilli.graph.module import Module


def prepare(program: ExportedProgram) -> Module:
    """Decompose, then fold. Order matters: batch norm is folded while its constants are still parameters."""
    module = Module.from_exported(decompose(program))
    remove_assertions(module)
    fold_batch_norm(module)
    fold_constants(module)
    return module


def remove_assertions(module: Module) -> None:
    """Shape assertions: the player checks sizes against their bounds itself."""
    for node in reversed(list(module.graph.nodes)):
        name = str(node.target)
        if node.op == "call_function" and not node.users and ("assert" in name or "sym_constrain" in name):
            module.graph.erase_node(node)
    module.clean()


_ = torch
