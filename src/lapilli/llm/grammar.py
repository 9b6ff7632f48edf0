"""Which tokens may come next, by a JSON schema or a grammar: the package llguidance, fed with the tokens that were written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError
from lapilli.llm.packages import need
from lapilli.llm.text import Text

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of an object of JSON, whatever is in it."""
_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""Between the parts of JSON: models that may write any amount of it do."""
_LONGEST_GRAMMAR = 1 << 20


class Grammars:
    """Makes grammars for a model's tokens. words: how many there are."""

    def __init__(self, text: Text, words: int) -> None:
        """Raises MissingExtraError if the package is missing, InvalidInputError if it does not take the tokenizer."""
        self._package, self._words = need("llguidance", "A grammar", "grammar"), words
        if not text.ends:
            raise InvalidInputError("The model has no token that ends an answer, which a grammar needs.")
        try:
            self._tokens = self._package.LLTokenizer(text.tokenizer, n_vocab=words, eos_token=list(text.ends))
        except Exception as error:  # the package says ValueError, and others
            raise InvalidInputError(f"Grammars do not take this tokenizer: {str(error)[:300]}.") from error

    def of_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """Texts that are JSON of this schema. Raises InvalidInputError if it is none, or one that is not taken."""
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"json_schema is no JSON: {str(error)[:200]}.") from error
        space = {"whitespace_pattern": _SPACE}
        return self._made(
            "json_schema", lambda given: self._package.LLMatcher.grammar_from_json_schema(given, defaults=space), text
        )

    def of_rules(self, rules: str) -> Grammar:
        """Texts of a grammar in llama.cpp's GBNF, or in Lark's form. Raises InvalidInputError if it is none."""
        from llguidance.gbnf_to_lark import any_to_lark

        return self._made("grammar", lambda text: self._package.LLMatcher.grammar_from_lark(any_to_lark(text)), rules)

    def _made(self, name: str, compiled: Any, given: str) -> Grammar:
        if len(given) > _LONGEST_GRAMMAR:
            raise InvalidInputError(f"{name} has {len(given)} characters; {_LONGEST_GRAMMAR} are read.")
        try:
            matcher = self._package.LLMatcher(self._tokens, compiled(given), log_level=0)
        except Exception as error:
            raise InvalidInputError(f"{name} is not understood: {_reason(str(error))}.") from error
        if matcher.is_error():
            raise InvalidInputError(f"{name} is not understood: {_reason(matcher.get_error())}.")
        return Grammar(matcher, self._words)


class Grammar:
    """A text that is written by rules."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words, self._count = matcher, words, 0

    def allowed(self, written: Sequence[int]) -> NDArray[np.int32]:
        """Which tokens may follow those that are written, which are at least those of the call before: a bit for each.

        Raises:
            InvalidInputError: there are none, or the rules take too long to follow.
        """
        self._matcher.consume_tokens(list(written[self._count :]))
        self._count = len(written)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: -(-self._words // 32)]
        if self._matcher.is_error() or not bits.any():
            raise InvalidInputError(
                f"The grammar cannot go on: {_reason(self._matcher.get_error()) or 'no token fits'}."
            )
        return bits


def _reason(message: str) -> str:
    """What the package says is wrong, without where it is shown and what state its parser is in."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines and lines[0].startswith("NoExtension"):
        return "no token fits, or the rules have no end"
    said = [*lines[:1], *(line for line in lines[1:] if line.startswith("error:"))]
    return " ".join(said).split("<state>")[0].strip().rstrip(".")[:300]
