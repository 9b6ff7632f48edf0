"""What callers give where a text, or a list of something, is wanted: told apart, and named where it is neither."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lapilli.errors import InvalidInputError


def _shown(value: Any) -> str:
    """A value as a message names it."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"


def text_or_list(given: Any, what: str, accepted: str) -> str | list[Any]:
    """A text, or a list of what is in a sequence or an iterator. what: is given, and accepted instead, for the message.

    Raises:
        InvalidInputError: it is neither, but bytes, a dictionary, a tensor or a single thing.
    """
    if isinstance(given, str):
        return given
    advice = ""
    if isinstance(given, bytes | bytearray | memoryview):
        advice = " Bytes are no text: give their .decode()."
    elif hasattr(given, "tolist"):
        advice = " Give its .tolist()."
    elif isinstance(given, Mapping):
        advice = " Give a list of it."
    elif isinstance(given, Iterable):
        return list(given)
    raise InvalidInputError(f"{what} is {_shown(given)}; it can be {accepted}.{advice}")


def checked_tokens(given: list[Any], words: int, what: str, accepted: str) -> list[int]:
    """The same list. what, accepted: as of `text_or_list`. Raises InvalidInputError if an element is no token of so many."""
    for k, value in enumerate(given):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < words:
            raise InvalidInputError(f"{what} has {_shown(value)} at place {k}; it can be {accepted}.")
    return given


def whole_text(text: str) -> str:
    """A text of characters. Raises InvalidInputError if it has half of one: a surrogate, which UTF-8 does not have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"The text has {text[error.start]!a} at place {error.start}, which is half of a character (a lone surrogate): "
            "leave it out, or give the whole character."
        ) from None
    return text
