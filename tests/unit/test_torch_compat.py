"""What is changed in PyTorch for a while is as it was afterwards."""

from __future__ import annotations

import pytest
from torch.fx import config

from lapilli.torch_compat import without_stack_traces


@pytest.mark.parametrize("before", [False, True])
def test_stack_traces_are_left_out_for_a_while(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However those who leave them out overlap, as threads may, and whatever ends them."""
    monkeypatch.setattr(config, "do_not_emit_stack_traces", before)
    first, second = without_stack_traces(), without_stack_traces()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config.do_not_emit_stack_traces
    with pytest.raises(KeyError), without_stack_traces():
        raise KeyError
    assert config.do_not_emit_stack_traces
    second.__exit__(None, None, None)
    assert config.do_not_emit_stack_traces is before
