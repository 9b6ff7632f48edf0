"""What the metadata of a program say of the language model that it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from lapilli.errors import InvalidFileError
from lapilli.llm.cache_size import CacheSize

KEY = "llm.model"
USUAL_CONTEXT = 4096
"""How many tokens the cache holds at most, unless the caller says otherwise."""


LONGEST = 512
"""The most tokens of a prompt that are read at once."""
Pooling = Literal["last", "mean"]
MOST_SEQUENCES = 256
SCORED = 128
"""The most tokens of a text whose logits are there at once."""
KNOWN = -1
"""Instead of the token of a row: that of the step before."""


def step_sizes(sequences: int) -> list[int]:
    """The numbers of rows for which there is a step: powers of two, and all sequences."""
    return [*(1 << k for k in range((sequences - 1).bit_length())), sequences]


def step_name(rows: int) -> str:
    """The method that does a step of so many rows."""
    return "step" if rows == 1 else f"step{rows}"


@dataclass(frozen=True)
class About:
    """context: the tokens of a sequence at most. words: the size of the vocabulary. sequences: how many are written at once.
    pooling: how embeddings are made of those of tokens. tokens: of all sequences that the cache has room for, None: all.
    """

    name: str
    context: int
    words: int
    sequences: int = 1
    pooling: Pooling = "last"
    tokens: int | None = None

    @property
    def cache(self) -> CacheSize:
        """Its pages and lines."""
        return CacheSize(self.sequences, self.context, self.tokens)

    def metadata(self) -> dict[str, str]:
        """As strings of a program."""
        return {KEY: json.dumps(asdict(self))}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> About:
        """Raises InvalidFileError if they are none."""
        if KEY not in metadata:
            raise InvalidFileError("The file is a program, but no language model: LLM.save writes those.")
        try:
            given = json.loads(metadata[KEY])
            context, words, sequences = (int(given[k]) for k in ("context", "words", "sequences"))
            tokens = None if given["tokens"] is None else int(given["tokens"])
            made = cls(str(given["name"])[:200], context, words, sequences, given["pooling"], tokens)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidFileError(f"The metadata of the language model is damaged: {str(error)[:200]!r}.") from error
        if made.context < 2 or made.words < 1 or not 1 <= made.sequences <= MOST_SEQUENCES:
            raise InvalidFileError(
                f"The language model is damaged: a context of {made.context}, {made.words} words, {made.sequences} sequences."
            )
        if not made.cache.is_enough:
            raise InvalidFileError(
                f"The language model is damaged: a cache of {tokens} tokens for a context of {context}."
            )
        if made.pooling not in ("last", "mean"):
            raise InvalidFileError(f"The language model is damaged: pooling {str(made.pooling)[:20]!r}.")
        return made
