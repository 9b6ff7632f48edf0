"""Dropout at inference under torch.export: its result is its argument, not a copy.

torch records an operator whose schema does not say so, and loses in-place changes of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.rewriting import Rewrite

_DROPOUT = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
"""(input, p, training, inplace); by default, training is True for dropout and False for alpha_dropout."""
_IN_TRAINING = _DROPOUT - {F.alpha_dropout, F.feature_alpha_dropout}
_OF_SCRIPTS = {
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default, torch.ops.aten.alpha_dropout.default, torch.ops.aten.feature_alpha_dropout.default,
}  # fmt: skip
"""(input, p, train)"""


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    name = "training" if func in _DROPOUT else "train"
    training = args[2] if len(args) > 2 else kwargs.get(name, func in _IN_TRAINING)
    return args[0] if args and not training and 0 <= p <= 1 else NotImplemented


REWRITES: dict[Any, Rewrite] = dict.fromkeys(_DROPOUT | _OF_SCRIPTS, _dropout)
