"""A language model as it comes from a file or a folder, before it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lapilli.llm.decoder import Shape
from lapilli.llm.text import Text

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "phi3")
"""The architectures that are taken, by GGUF's names."""


@dataclass
class Source:
    """tensors: by GGUF's names, as `Decoder` takes them. notes: sentences about what was converted."""

    name: str
    shape: Shape
    tensors: Mapping[str, Any]
    text: Text
    notes: list[str] = field(default_factory=list)
