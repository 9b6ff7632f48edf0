"""The program of a language model, and which tokens its cache holds. Several answers take turns in it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from lapilli.errors import InvalidFileError
from lapilli.llm.about import LONGEST
from lapilli.llm.answer_options import AnswerOptions
from lapilli.runtime.futures import Future
from lapilli.runtime.program import Program

_AHEAD, _AHEAD_ON_HOST = 2, 1
"""Steps that the device has to do while the host reads a token. What is queued at the end of an answer is done in vain."""
_RANDOM = "lapilli.random"


class Session:
    """cached: the tokens in places 0, 1, ... of the cache. turn: the answer that the device's states belong to."""

    def __init__(self, program: Program, context: int, words: int) -> None:
        self.program, self.context, self.words = program, context, words
        self.lock = threading.RLock()
        self.cached: list[int] = []
        self.turn: Turn | None = None
        self.ahead = _AHEAD_ON_HOST if program.device.type == "cpu" else _AHEAD
        self.read = 0  # tokens of prompts that were computed; those found in the cache are not


class Turn:
    """Tokens after others, one at a time. tokens: the prompt and what is written so far."""

    def __init__(self, session: Session, prompt: Sequence[int], options: AnswerOptions, seed: int, count: int) -> None:
        """count: how many tokens there are to be at most, where the cache ends for one."""
        self._session, self._options, self._seed = session, options, seed
        self.tokens, self._first = list(prompt), len(prompt)
        self._last = self._first + count  # the number of tokens at the end
        self._drawn = options.drawn()
        self._runs: deque[tuple[Future, Future | None]] = deque()
        self._submitted = 0  # tokens that were asked for, from the first on

    def next(self) -> tuple[int, float, list[tuple[int, float]]]:
        """The next token, its log-probability, and the most likely tokens with theirs (options.logprobs)."""
        session = self._session
        with session.lock:
            if session.turn is not self:
                self._begin()
            while len(self._runs) <= session.ahead and self._submitted < self._last:
                self._submit("step")
            run, likely = self._runs.popleft()
            try:
                token, logprob = run.result()
                listed = [] if likely is None else list(zip(*(x.tolist() for x in likely.result()), strict=True))
            except BaseException:
                session.turn, session.cached = None, []  # who knows what the device holds
                raise
            if not 0 <= token[0] < session.words:
                raise InvalidFileError(f"The model wrote token {token[0]}, and there are {session.words}.")
            self.tokens.append(int(token[0]))
            self._note()
        return self.tokens[-1], float(logprob[0]), listed[: self._options.logprobs]

    def _note(self) -> None:
        """What the cache holds: what was read, of which the host knows what is written."""
        self._session.cached = self.tokens[: self._submitted - 1] if self._submitted else []

    def _submit(self, method: str, *args: Any) -> None:
        methods = self._session.program.methods
        run = methods[method].submit(*args, *self._drawn)
        listed = None
        if self._options.logprobs:
            (spec,) = methods["likely"].inputs
            listed = methods["likely"].submit(np.zeros(spec.least_shape(), np.float32))
        self._runs.append((run, listed))
        self._submitted += 1

    def _begin(self) -> None:
        """Reads what the cache lacks of the tokens so far."""
        session, program = self._session, self._session.program
        if session.turn is not None:
            session.turn._runs.clear()  # it reads again when its turn comes
        session.turn = None  # whatever fails in the following
        known = 0
        for a, b in zip(session.cached, self.tokens[:-1], strict=False):  # the last one is read for its logits
            if a != b:
                break
            known += 1
        session.cached = session.cached[:known]
        if self._options.repetition_penalty != 1:
            seen = np.zeros(session.words, np.int32)
            seen[self.tokens] = 1
            program.set_state({"owner.seen": seen})
        self._runs.clear()
        rest = self.tokens[known:]
        session.read += len(rest)
        while len(rest) > 1:
            part = rest[:LONGEST]
            if len(rest) == len(part):
                break
            whole = program.methods["prompt"]
            whole.submit(np.array([part]), np.array([known]), *self._drawn)
            session.cached += part
            known, rest = known + len(part), rest[len(part) :]
        written = len(self.tokens) - self._first
        program.set_state({_RANDOM: np.array([written, self._seed], np.int32)})
        self._submitted = len(self.tokens)
        if len(rest) == 1:
            program.set_state({"owner.token": np.array(rest), "owner.place": np.array([known])})
            self._submit("step")
        else:
            self._submit("prompt", np.array([rest]), np.array([known]))
        session.turn = self
