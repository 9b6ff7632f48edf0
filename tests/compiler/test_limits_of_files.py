"""What no file can hold is refused when it is compiled, not when it is loaded."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from lapilli.compiler import compile_to_bytes
from lapilli.errors import CompileError
from lapilli.program import writer


class Model(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a.flatten(), b.flatten()])


@pytest.mark.parametrize(("name", "most"), [("_MOST_SYMBOLS", 3), ("_MOST_TENSORS", 1)])
def test_more_than_a_file_holds(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    given = torch.rand(3, 4), torch.rand(5, 6)
    sizes = [{0: Dim("a", max=9), 1: Dim("b", max=9)}, {0: Dim("c", max=9), 1: Dim("d", max=9)}]
    compile_to_bytes(Model(), given, dynamic_shapes=sizes)
    monkeypatch.setattr(writer, name, most)
    with pytest.raises(CompileError, match="4 sizes that may vary, 2 inputs and 1 outputs; at most .* are possible"):
        compile_to_bytes(Model(), given, dynamic_shapes=sizes)
