"""Random numbers of programs that run within torch: like torch's own, they follow torch.manual_seed."""

from __future__ import annotations

import numpy as np
import torch

from lapilli.runtime.description import RANDOM_STATE
from lapilli.runtime.program import Program


def draw_key(program: Program) -> None:
    """Gives the next run of a program that draws random numbers a key from torch's generator. (A program called on its own
    counts its runs instead, and needs no torch: `lapilli.lower.random`.)
    """
    if any(spec.name == RANDOM_STATE for spec in program.description.states):
        drawn = torch.empty(2, dtype=torch.int32, device="cpu").random_(-(2**31), 2**31)
        program.set_state({RANDOM_STATE: drawn.numpy().astype(np.int32)})
