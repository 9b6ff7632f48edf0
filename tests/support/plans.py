"""What the scheduler makes of a model, in the terms of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from agreement import Function
from torch import nn

from lapilli.capture import capture
from lapilli.codegen import select
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.schedule.plan import Schedule
from lapilli.target import ANY, Target


def plan(f: nn.Module | Callable[..., Any], *args: torch.Tensor, target: Target = ANY, dynamic: Any = None) -> Schedule:
    model = f if isinstance(f, nn.Module) else Function(f)
    return select.schedule_of(lower(prepare(capture(model.eval(), args, dynamic))), target)


def labels(s: Schedule) -> list[str]:
    return [t.label for t in s.order.run]
