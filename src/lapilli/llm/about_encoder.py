"""What the metadata of a program say of its encoder: what it reads, and how answers begin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lapilli.errors import InvalidFileError

KEY = "llm.encoder"
MOST_PLACES = 1 << 20
_DAMAGED = "The metadata of the encoder are damaged: {!r}."


@dataclass(frozen=True)
class AboutEncoder:
    """places: how many tokens, or pairs of a spectrum's frames, it reads at most. start: the token that answers begin with. bins:
    of a spectrum; 0: it reads tokens. languages, tasks: the tokens that follow the first one, where there are some. untimed: the
    token for an answer without times, before those of times. latest: the number of the last time that can be the first one of an
    answer; None: any.
    """

    places: int
    start: int
    bins: int = 0
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    untimed: int | None = None
    latest: int | None = None

    def metadata(self) -> dict[str, str]:
        """As strings of a program."""
        return {KEY: json.dumps(asdict(self))}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str], words: int) -> AboutEncoder:
        """words: the size of the vocabulary. Raises InvalidFileError if they are none."""
        if KEY not in metadata:
            raise InvalidFileError("The file is a language model without an encoder: lapilli.LLM loads it.")
        try:
            given = json.loads(metadata[KEY])
            made = cls(**{k: given[k] for k in ("places", "start", "bins", "languages", "tasks", "untimed", "latest")})
            tokens = [made.start, *made.languages.values(), *made.tasks.values()]
            tokens += [] if made.untimed is None else [made.untimed]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidFileError(_DAMAGED.format(str(error)[:200])) from error
        good = all(_whole(t, words) for t in tokens) and _whole(made.bins, 1024)
        good = good and _whole(made.places, MOST_PLACES) and made.places > 1
        good = good and (made.latest is None or _whole(made.latest, words))
        if not good:
            raise InvalidFileError(_DAMAGED.format("numbers out of bounds"))
        return made


def _whole(x: Any, end: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < end
