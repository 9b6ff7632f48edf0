"""Dropout at inference under torch.export: its result is its argument, not a copy.

torch records an operator whose schema does not say so, and loses in-place changes of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUT = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
"""(input, p, training, inplace); by default, training is True for dropout and False for alpha_dropout."""
_IN_TRAINING = _DROPOUT - {F.alpha_dropout, F.feature_alpha_dropout}
_OF_SCRIPTS = {
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default, torch.ops.aten.alpha_dropout.default, torch.ops.aten.feature_alpha_dropout.default,
}  # fmt: skip
"""(input, p, train)"""


class without_dropout(TorchFunctionMode):
    """A mode for tracing a model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if args and (func in _DROPOUT or func in _OF_SCRIPTS):
            p = args[1] if len(args) > 1 else given.get("p", 0.5)
            name = "training" if func in _DROPOUT else "train"
            training = args[2] if len(args) > 2 else given.get(name, func in _IN_TRAINING)
            if not training and 0 <= p <= 1:
                return args[0]
        return func(*args, **given)
