"""Beam search: which of several beginnings of an answer go on, in the order of transformers' `num_beams`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lapilli.errors import InvalidInputError

RANKED = 32
"""How many tokens that may follow a program ranks."""
MOST_BEAMS = RANKED // 2


@dataclass(frozen=True)
class Beams:
    """How an answer is searched for; the names and what they do are those of transformers' `generate`.

    Attributes:
        count: how many beginnings of the answer are kept (`num_beams`), 1 to 16.
        length_penalty: the sum of a finished answer's log-probabilities is divided by its length to this power.
        early_stopping: True: the search ends with the first `count` finished answers; False: when the best beginning is worse than
            those, for its length; "never": when it could not become better at any length.

    Raises:
        InvalidInputError: one of them is none of these.
    """

    count: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 1 <= self.count <= MOST_BEAMS:
            raise InvalidInputError(f"beams is {self.count!r}; it can be 1 to {MOST_BEAMS}.")
        good = isinstance(self.length_penalty, int | float) and abs(self.length_penalty) <= 100
        if not good or isinstance(self.length_penalty, bool):
            raise InvalidInputError(f"length_penalty is {self.length_penalty!r}; it can be a number from -100 to 100.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidInputError(f'early_stopping is {self.early_stopping!r}; it can be True, False or "never".')


@dataclass(frozen=True)
class Beam:
    """A beginning of an answer, or a whole one. score: the sum of its log-probabilities, of a whole one divided as the search wants
    it. parent: which of the beams before it goes on with.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: np.float32
    parent: int


Ranked = tuple[Sequence[int], Sequence[float]]
"""Tokens that may follow, the likeliest ones first, and their log-probabilities."""


class BeamSearch:
    """running: the beams that go on, the best one first; none: it is over. finished: whole answers, the best one first."""

    def __init__(self, beams: Beams, ends: Container[int], kinds: int, longest: int) -> None:
        """ends: tokens that end an answer; kinds: how many these are. longest: how many tokens there can be."""
        self.beams, self.ends, self.longest = beams, ends, longest
        self.width = max(2, 1 + kinds) * beams.count
        """How many tokens that follow are looked at: as many of each beam must be ranked."""
        self.running = [Beam((), (), np.float32(0), 0)]
        self.finished: list[Beam] = []

    def take(self, ranked: Sequence[Ranked]) -> None:
        """Goes on by a token. ranked: of each running beam."""
        found = [
            Beam((*beam.tokens, int(t)), (*beam.logprobs, float(x)), beam.score + np.float32(x), k)
            for k, (beam, (tokens, values)) in enumerate(zip(self.running, ranked, strict=True))
            for t, x in zip(tokens, values, strict=True)
            if x > -np.inf
        ]
        found = sorted(found, key=lambda b: -b.score)[: self.width]
        whole = [b.tokens[-1] in self.ends or len(b.tokens) >= self.longest for b in found]
        count, length = self.beams.count, len(self.running[0].tokens) + 1
        ended = [
            Beam(b.tokens, b.logprobs, self._for_length(b.score, length), b.parent)
            for b, over in zip(found[:count], whole, strict=False)
            if over
        ]
        self.finished = sorted([*self.finished, *ended], key=lambda b: -b.score)[:count]
        self.running = [b for b, over in zip(found, whole, strict=True) if not over][:count]
        if self._over(length):
            self.running = []

    def _over(self, length: int) -> bool:
        if len(self.finished) < self.beams.count or not self.running:
            return not self.running
        early, best = self.beams.early_stopping, length
        if early is True:
            return True
        if early == "never" and self.beams.length_penalty > 0:
            best = self.longest
        return bool(self._for_length(self.running[0].score, best) <= self.finished[-1].score)

    def _for_length(self, score: np.float32, length: int) -> np.float32:
        return np.float32(score / np.float32(length**self.beams.length_penalty))
