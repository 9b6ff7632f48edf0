"""Wrong arguments of `lapilli.compile`: what was given, and what is accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import lapilli

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "metadata, a number": ({"metadata": 3}, "metadata is a int: give a dict that maps strings to strings"),
    "metadata, of numbers": ({"metadata": {"a": 3}}, "metadata must map strings to strings; 'a' is a int (use json.dumps)"),
    "metadata, ours": (
        {"metadata": {"lapilli.a": "b"}}, "metadata key 'lapilli.a': names that begin with 'lapilli.' are reserved"
    ),
    "progress": ({"progress": 3}, "progress is a int: give a function of (stage, done, all)"),
    "example_kwargs": ({"example_kwargs": 3}, "example_kwargs is a int: give a dict of arguments by name"),
    "fallback": ({"fallback": "gpu"}, "fallback is 'gpu': choose \"cpu\" or \"error\""),
    "tune": ({"tune": 2.5}, "tune is 2.5: choose True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_they_are_refused(name: str) -> None:
    wrong, text = WRONG[name]
    with pytest.raises(lapilli.CompileError, match=re.escape(text)):
        lapilli.compile(nn.ReLU(), (torch.zeros(3),), **wrong)
