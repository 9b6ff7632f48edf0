"""What the metadata of a program say of the language model that it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lapilli.errors import InvalidFileError

KEY = "llm.model"
USUAL_CONTEXT = 4096
"""How many tokens the cache holds at most, unless the caller says otherwise."""


LONGEST = 512
"""The most tokens of a prompt that are read at once."""


@dataclass(frozen=True)
class About:
    """context: the length of the cache. words: the size of the vocabulary."""

    name: str
    context: int
    words: int

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
            made = cls(str(given["name"])[:200], int(given["context"]), int(given["words"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidFileError(f"The metadata of the language model is damaged: {str(error)[:200]!r}.") from error
        if made.context < 2 or made.words < 1:
            raise InvalidFileError(f"The language model is damaged: a context of {made.context}, {made.words} words.")
        return made
