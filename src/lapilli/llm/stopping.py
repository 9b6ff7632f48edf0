"""From tokens to text as it is written: no halves of characters, and nothing of a stop word."""

from __future__ import annotations

from collections.abc import Sequence

from lapilli.llm.text import Text

_HALF = "�"
_KEPT = 8
"""Tokens before the new ones that are decoded with them: decoders join what belongs together."""


class Reader:
    """Takes tokens, gives text. ended: whether a stop word was found, after which there is no more."""

    def __init__(self, text: Text, stop: Sequence[str]) -> None:
        self._text, self._stop = text, tuple(stop)
        self._tokens: list[int] = []
        self._begin = self._done = 0  # of what is decoded together; of what was given out
        self._held = ""  # may be the beginning of a stop word
        self.ended = False

    def take(self, token: int) -> str:
        """The text that is certain with one more token."""
        self._tokens.append(token)
        before = self._text.decode(self._tokens[self._begin : self._done])
        now = self._text.decode(self._tokens[self._begin :])
        if now.endswith(_HALF) or not now.startswith(before):
            return ""  # the next token completes it
        self._begin, self._done = max(self._done - _KEPT, self._begin, 0), len(self._tokens)
        return self._pass(now[len(before) :])

    def rest(self) -> str:
        """What was kept back, at the end of an answer."""
        if self.ended:
            return ""
        before = self._text.decode(self._tokens[self._begin : self._done])
        now = self._text.decode(self._tokens[self._begin :])
        found = self._pass(now[len(before) :])
        if not self.ended:
            found, self._held = found + self._held, ""
        return found

    def _pass(self, new: str) -> str:
        whole = self._held + new
        found = [at for at in (whole.find(s) for s in self._stop) if at >= 0]
        if found:
            self.ended, self._held = True, ""
            return whole[: min(found)]
        keep = max((_overlap(whole, s) for s in self._stop), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop word."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
