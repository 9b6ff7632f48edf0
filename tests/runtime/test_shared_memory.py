"""Arguments and results of programs that share memory: refused where the result would depend on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lapilli


class Changes(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a.add_(1)
        return a + b, a * b


def test_shared_memory() -> None:
    with lapilli.compile(Changes(), (torch.ones(3), torch.ones(3))) as program:
        for numbers in (torch.arange(8.0), np.arange(8.0, dtype=np.float32)):
            x, y = numbers[:3], numbers[5:]
            for other in (x, numbers[2:5]):
                with pytest.raises(lapilli.InvalidInputError, match="shares memory with what was given as 'b'"):
                    program(x, other)
            assert x[0] == 0  # nothing was changed
            total, _ = program(x, y)
            assert total.tolist() == [6, 8, 10] and x.tolist() == [1, 2, 3]
        given = torch.ones(3), torch.ones(3)
        result = torch.empty(3)
        with pytest.raises(lapilli.InvalidInputError, match="give each its own"):
            program.bind(*given, outputs=(result, result))
        halves = torch.empty(6)
        program.bind(*given, outputs=(halves[:3], halves[3:]))()
        assert halves.tolist() == [3, 3, 3, 2, 2, 2]
