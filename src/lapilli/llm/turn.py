"""Answers that are written in turn, and what each has meanwhile: a line of the program's states, and pages of the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError
from lapilli.llm.answer_options import AnswerOptions

_LEAD = 8
"""Tokens that nobody has read yet, above which an answer waits for its reader."""

Written = tuple[int, float, list[tuple[int, float]]]
"""A token, its log-probability, and the most likely tokens with theirs."""

Allowed = Callable[[Sequence[int]], NDArray[np.int32]] | None
"""Bits of the tokens that may follow those that are written; None: all."""

Given = Sequence[NDArray[Any]] | None
"""What an encoder reads, the arguments of the method `encode`: equal to another only if it is the same object."""


class Slot:
    """What a sequence has. line: of the program's states. pages: of the cache. cached: the tokens in them, while it has no turn.
    used: when it was read last. bound: whether some tokens are not allowed in its line. given: what the encoder read for it. timed:
    whether its line is of an answer with times.
    """

    def __init__(self, line: int) -> None:
        self.line, self.pages, self.cached = line, list[int](), list[int]()
        self.turn: Turn | None = None
        self.used = 0
        self.bound = self.timed = False
        self.given: Given = None

    @property
    def known(self) -> list[int]:
        """The tokens in it that the host knows."""
        return self.cached if self.turn is None else self.turn.tokens[: self.turn.read]


class Turn:
    """Tokens after others. tokens: the prompt and what is written so far. read: how many tokens of it, known or not, are in the
    cache. steady: whether somebody reads it without pause, and so can wait for pages. age: since when it is written, a number that
    grows. parked: whether there were no pages for it.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        options: AnswerOptions,
        seed: int,
        count: int,
        ends: Container[int] = (),
        allowed: Allowed = None,
        given: Given = None,
        timed: bool = False,
    ) -> None:
        """count: how many tokens there are to be at most, where the cache ends for one. ends: tokens after which there is none.
        allowed: bits of the tokens that may follow those that are written. given: what they answer, of models with an encoder.
        timed: whether there are times among them.
        """
        self.options, self.seed, self.ends, self.allowed, self.given = options, seed, ends, allowed, given
        self.timed, self.steady, self.age, self.parked = timed, False, 0, False
        self.tokens, self.first = list(prompt), len(prompt)
        self.last = self.first + count  # the number of tokens at the end
        self.drawn = options.drawn()
        self.unread: deque[Written] = deque()
        self.read = 0
        self.slot: Slot | None = None
        self.ticket: object = None  # of its stay in a slot
        self.over = False  # nobody reads it any more
        self.error: InvalidInputError | None = None  # why it cannot go on

    def abandon(self) -> None:
        """Says, from any thread and without waiting, that nobody reads it any more."""
        self.over = True

    @property
    def in_prompt(self) -> bool:
        """Whether more than one of its tokens are not in the cache yet."""
        return len(self.tokens) - self.read > 1

    @property
    def wants_step(self) -> bool:
        """Whether a step can write its next token."""
        if self.in_prompt or self.read + 1 >= self.last or self.ended or self.error is not None:
            return False
        if self.allowed is not None and len(self.tokens) != self.read + 1:
            return False  # what is allowed depends on the token before
        return self.read + 1 - len(self.tokens) + len(self.unread) <= _LEAD

    @property
    def ended(self) -> bool:
        """Whether its last token ends it."""
        return len(self.tokens) > self.first and self.tokens[-1] in self.ends


def bits_of(tokens: Sequence[int], words: int) -> NDArray[np.int32]:
    """These tokens as those that are allowed, of so many words."""
    bits = np.zeros(-(-words // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
