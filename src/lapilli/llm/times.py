"""Times within what a Whisper model writes: tokens that say how many fiftieths of a second of a part are over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lapilli.llm.turn import bits_of

STEP = 0.02
"""Seconds from one time to the next."""


@dataclass(frozen=True)
class Times:
    """Which tokens may follow others where times are written: as transformers has it, and Whisper's authors.

    They come in pairs, but for the first and the last one; none is less than the one before; an answer begins with one. That a time
    is written where all of them together are likelier than any other token is the program's part.

    untimed: the token before that of time 0. end: that which ends an answer. words: all tokens. latest: the number of the last time
    that may be the first one; None: any.
    """

    untimed: int
    end: int
    words: int
    latest: int | None

    @property
    def first(self) -> int:
        """The token of time 0."""
        return self.untimed + 1

    def allowed(self, written: Sequence[int]) -> NDArray[np.int32]:
        """As `Turn` takes it."""
        first, timed = self.first, [t >= self.first for t in written[-2:]]
        least = first
        if not written:
            most = self.words if self.latest is None else min(first + self.latest + 1, self.words)
            return bits_of(range(first, most), self.words)
        last = next((t for t in reversed(written) if t >= first), None)
        closing = timed == [False, True]  # the end of a segment: the next one begins here or later
        if last is not None:
            least = last if closing else last + 1
        text = range(self.end if closing else 0, first)
        times = range(0) if timed[-1] and not closing else range(least, self.words)
        return bits_of([t for t in (*text, *times) if t != self.untimed], self.words)

    def phrases(self, written: Sequence[int], seconds: float) -> list[tuple[float, float, list[int]]]:
        """Start, end and text tokens of each segment of an answer without its end. A segment ends with two times; what follows the
        last one ends with the answer's last time, or after so many seconds, where the part does.
        """
        first = self.first
        cuts = [k + 1 for k, (a, b) in enumerate(pairwise(written)) if min(a, b) >= first]
        found = []
        for a, b in pairwise([0, *cuts, len(written)]):
            part = written[a:b]
            times = [(t - first) * STEP for t in part if t >= first]
            text = [t for t in part if t < first]
            begin = times[0] if times and part[0] >= first else 0.0
            end = times[-1] if part and part[-1] >= first and len(part) > 1 else max(seconds, begin)
            if text:
                found.append((begin, end, text))
        return found
