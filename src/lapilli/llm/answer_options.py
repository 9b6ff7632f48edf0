"""How an answer is written: what `generate` and the server take, checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError

MOST_STOPS, LONGEST_STOP = 16, 1000
_SHOWN = 60
"""Characters of what was given, in an error."""


class Choices(TypedDict, total=False):
    """The keywords of `LLM.generate`."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop: str | Sequence[str] | None
    seed: int | None
    logprobs: int | None
    json_schema: Mapping[str, Any] | None
    grammar: str | None


@dataclass(frozen=True)
class AnswerOptions:
    """The arguments of `LLM.generate`. Raises InvalidInputError where one is outside of what is accepted."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    json_schema: Mapping[str, Any] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        whole = self.max_tokens is None or (_whole(self.max_tokens) and self.max_tokens >= 0)
        self._check("max_tokens", whole, "a whole number >= 0, or None")
        self._check("temperature", _number(self.temperature, 0, 1e6), "between 0 and 1000000")
        self._check("top_k", _whole(self.top_k) and 0 <= self.top_k < 2**31, "a whole number >= 0 (0: all)")
        self._check("top_p", _number(self.top_p, 0, 1), "between 0 and 1")
        self._check("min_p", _number(self.min_p, 0, 1), "between 0 and 1")
        self._check("repetition_penalty", _number(self.repetition_penalty, 1e-3, 1e3), "between 0.001 and 1000")
        self._check("seed", self.seed is None or _whole(self.seed), "a whole number, or None")
        good = len(self.stop) <= MOST_STOPS and all(
            isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in self.stop
        )
        self._check("stop", good, f"a text, or at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters")
        most = 20
        self._check(
            "logprobs",
            self.logprobs is None or (_whole(self.logprobs) and 0 <= self.logprobs <= most),
            f"0 to {most}, or None",
        )

        self._check("json_schema", isinstance(self.json_schema, Mapping | None), "a schema as a dictionary, or None")
        self._check("grammar", isinstance(self.grammar, str | None), "rules in GBNF or Lark's form, or None")
        if self.json_schema is not None and self.grammar is not None:
            raise InvalidInputError("json_schema and grammar are given; an answer follows one of them.")

    @classmethod
    def of(cls, choices: Choices) -> AnswerOptions:
        """As a caller gives them: stop words may be one."""
        given: dict[str, Any] = dict(choices)
        for name in given:
            if name not in Choices.__annotations__:
                close = difflib.get_close_matches(name, Choices.__annotations__, 1)
                hint = f"Did you mean {close[0]}? " if close else ""
                raise InvalidInputError(
                    f"{name} is no option of an answer. {hint}There are {', '.join(Choices.__annotations__)}."
                )
        stop = given.pop("stop", None)
        one = isinstance(stop, str) or not isinstance(stop, Iterable)
        return cls(**given, stop=() if stop is None else (stop,) if one else tuple(stop))

    def _check(self, name: str, good: bool, accepted: str) -> None:
        if not good:
            given = repr(getattr(self, name))
            shown = given if len(given) <= _SHOWN else f"{given[:_SHOWN]}…"  # a text may be of any length
            raise InvalidInputError(f"{name} is {shown}; it can be {accepted}.")

    def drawn(self) -> tuple[int, NDArray[np.float32]]:
        """How a token is chosen, as the program's methods take it: top_k; temperature, top_p, floor and penalty."""
        floor = self.temperature * math.log(self.min_p) if self.min_p > 0 else -math.inf
        return self.top_k, np.array([self.temperature, self.top_p, floor, self.repetition_penalty], np.float32)


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _number(x: Any, low: float, high: float) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and low <= x <= high
