"""When a result is right: the rule of tools/measure.py, for environments in which only torch is installed."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from workers import Result

from comparison.cases import Inputs

BOUNDS = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
"""The relative error that a dtype may have."""

SLACK = 8
"""Or so many times torch's own error against float64."""


def expected(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """What torch's CPU gives, and in float64."""
    wide = [
        x.to(torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else x.dtype)
        for x in inputs
    ]
    return tree_leaves(model(*inputs)), tree_leaves(copy.deepcopy(model).double()(*wide))


def judge(got: Sequence[Tensor], want: Sequence[Tensor], exact: Sequence[Tensor]) -> Result:
    """got against torch's CPU results, and what it computes in float64: verdict, reason, the largest errors."""
    found: Result = {"verdict": "right", "error": 0.0, "torch_error": 0.0}
    if len(got) != len(want):
        return found | {"verdict": "wrong", "reason": f"{len(got)} results, not {len(want)}"}
    for ours, theirs, wide in zip(got, want, exact, strict=True):
        reason = ""
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            reason = f"{ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}"
        elif theirs.dtype not in BOUNDS:
            if not torch.equal(ours, theirs):
                reason = f"{int((ours != theirs).sum())} of {theirs.numel()} differ"
        else:
            error, torch_error = relative_error(ours, wide), relative_error(theirs, wide)
            found["error"], found["torch_error"] = max(found["error"], error), max(found["torch_error"], torch_error)
            bound = BOUNDS[theirs.dtype]
            if not (relative_error(ours, theirs) <= bound or error <= bound + SLACK * torch_error):
                reason = f"relative error {error:.2g}; torch's own {torch_error:.2g}"
        if reason:
            found |= {"verdict": "wrong", "reason": reason}
    return found


def relative_error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of b."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    size = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(a - b)) / (size or 1.0)


def first_line(error: BaseException | str) -> str:
    """The first line that says something."""
    text = str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return (line if isinstance(error, str) else f"{type(error).__name__}: {line}")[:240]
