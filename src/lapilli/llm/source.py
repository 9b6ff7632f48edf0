"""A language model as it comes from a file or a folder, before it is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapilli.errors import InvalidFileError, LapilliError
from lapilli.llm.about import Pooling
from lapilli.llm.blocks import BlockedMatrix
from lapilli.llm.decoder import Shape
from lapilli.llm.text import Text

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "phi2", "phi3", "starcoder2", "stablelm", "olmo2", "granite")
"""The architectures that are taken, by GGUF's names."""
KINDS = (
    "llama", "qwen2", "qwen3", "gemma", "phi", "phi3", "starcoder2", "stablelm", "olmo2", "mistral", "granite", "smollm3",
    "gemma3_text",
)  # fmt: skip
"""The model types that are taken, by Hugging Face's names."""

TEXT_KINDS, SPEECH_KINDS = ("t5", "mt5"), ("whisper",)
"""Those that `lapilli.SequenceToSequence` and `lapilli.Transcriber` take."""


@dataclass
class Source:
    """tensors: by GGUF's names, as `Decoder` takes them. notes: sentences about what was converted. pooling: as `About` has it."""

    name: str
    shape: Shape
    tensors: Mapping[str, Any]
    text: Text
    notes: list[str] = field(default_factory=list)
    pooling: Pooling = "last"

    def check(self) -> None:
        """Raises InvalidFileError if a tensor is missing or has another shape than the model's numbers say."""
        s, given = self.shape, self.tensors
        least = min(s.words, s.width, s.layers, s.heads, s.groups, s.size, s.inner, s.context)
        if least < 1 or s.heads % s.groups or s.size % 2 or not 0 < s.rotated <= s.size or s.rotated % 2:
            raise InvalidFileError(f"{self.name}: these numbers are no decoder's: {s}.")
        if s.factors is not None and len(s.factors) != s.rotated // 2:
            raise InvalidFileError(
                f"{self.name} has {len(s.factors)} factors of frequencies for {s.rotated // 2} pairs."
            )
        q, kv = s.heads * s.size, s.groups * s.size
        whole = {"token_embd": (s.words, s.width), "output": (s.words, s.width), "output_norm": (s.width,)}
        layer = {
            "attn_q": (q, s.width), "attn_k": (kv, s.width), "attn_v": (kv, s.width), "attn_output": (s.width, q),
            "ffn_gate": (s.inner, s.width), "ffn_up": (s.inner, s.width), "ffn_down": (s.width, s.inner),
            "attn_norm": (s.width,), "ffn_norm": (s.width,), "attn_q_norm": (s.size,), "attn_k_norm": (s.size,),
            "post_attention_norm": (s.width,), "post_ffw_norm": (s.width,),
        }  # fmt: skip
        optional = {"output", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"}
        if not s.gated:
            layer.pop("ffn_gate")
        if s.parallel:
            layer.pop("ffn_norm")
        together = {"attn_q_norm": (q,), "attn_k_norm": (kv,)}  # of all heads
        instead = {"attn_norm": "post_attention_norm", "ffn_norm": "post_ffw_norm"}
        named = [("", whole), *((f"blk.{k}.", layer) for k in range(s.layers))]
        for prefix, wanted in named:
            for name, size in wanted.items():
                key = f"{prefix}{name}"
                found = _size(given.get(f"{key}.weight"))
                if found is None and name in instead and f"{prefix}{instead[name]}.weight" in given:
                    continue
                if found is not None and found == together.get(name):
                    continue
                if found != size and not (found is None and name in optional):
                    raise InvalidFileError(
                        f"{self.name}: {key}.weight is of shape {found or 'none'}; the model's is {size}."
                    )
                bias = _size(given.get(f"{key}.bias"))
                if bias not in (None, size[:1]):
                    raise InvalidFileError(f"{self.name}: {key}.bias is of shape {bias}; the model's is {size[:1]}.")


def check_layers(path: Path, name: str, said: int, tensors: Iterable[str], prefix: str = "blk.") -> None:
    """Raises InvalidFileError if a file's number of layers, which is called so there, is not that of its weights."""
    found = len({key.removeprefix(prefix).split(".")[0] for key in tensors if key.startswith(prefix)})
    if said != found:
        raise InvalidFileError(
            f"{path}: {name} is {said}, and there are weights of {found} layers: one of them is wrong."
        )


def _size(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return (value.rows, value.columns) if isinstance(value, BlockedMatrix) else tuple(value.shape)


@contextmanager
def reading(path: Any) -> Iterator[None]:
    """Whatever damaged bytes lead to becomes InvalidFileError; errors that say what is wrong stay."""
    try:
        yield
    except (LapilliError, OSError):
        raise
    except KeyError as error:
        raise InvalidFileError(f"{path} lacks {error}, which a model of its architecture has.") from error
    except Exception as error:
        raise InvalidFileError(f"{path} cannot be read: {str(error)[:200]}.") from error
