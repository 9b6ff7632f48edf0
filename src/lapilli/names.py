"""Text of a file that people read: names in it could move the cursor, hide what follows, or clear a terminal."""

from __future__ import annotations

_JOINERS = "\u200c\u200d"  # of letters and emoji: they move nothing


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control characters, marks of direction and other characters that are not shown written as `\\x1b`.

    keep: characters that stay as they are."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep or c in _JOINERS else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
