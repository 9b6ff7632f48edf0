"""Folds a TorchScript module for inference, by passes that every build of torch has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

passes: Any = torch._C  # its stubs lack most of the functions used here
Kind: Any = passes._MobileOptimizerType
wrapped: Any = torch.jit._recursive.wrap_cpp_module


def folded(
    module: torch.jit.ScriptModule, preserved: Sequence[str], blocked: Collection[Any]
) -> torch.jit.ScriptModule:
    """A copy of the module in eval mode, with its attributes as constants: batch norm folded into the preceding convolutions
    and linear layers, dropout removed, additions fused with a following ReLU, unless blocked."""
    clone = passes._hack_do_not_use_clone_module_with_class(module._c, [], [])
    copy = wrapped(clone)
    copy.eval()
    frozen = passes._freeze_module(copy._c, list(preserved), freezeInterfaces=True, preserveParameters=False)
    result: torch.jit.ScriptModule = wrapped(frozen)
    for name in frozen._method_names():
        graph = frozen._get_method(name).graph
        passes._jit_pass_inline(graph)
        if Kind.REMOVE_DROPOUT not in blocked:
            _remove_dropout(graph)
        if Kind.CONV_BN_FUSION not in blocked:
            passes._jit_pass_fold_frozen_conv_bn(graph)
            passes._jit_pass_fold_frozen_linear_bn(graph)
        if Kind.FUSE_ADD_RELU not in blocked:
            passes._jit_pass_fuse_add_relu(graph)
        passes._jit_pass_constant_propagation(graph)
        passes._jit_pass_peephole(graph)
        passes._jit_pass_dce(graph)
    return result


def _remove_dropout(block: Any) -> None:
    """Removes dropout, which is the identity in eval mode."""
    for node in list(block.nodes()):
        for inner in node.blocks():
            _remove_dropout(inner)
        if node.kind() in ("aten::dropout", "aten::dropout_", "aten::feature_dropout"):
            inputs = list(node.inputs())
            if inputs[2].toIValue() is False:
                node.output().replaceAllUsesWith(inputs[0])
                node.destroy()
