"""When each word of a recording was said: by where the heads of a Whisper model attend to after each token, and the path of least
cost through that ("dynamic time warping"), as transformers and Whisper's authors do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FILTER = 7
"""Places of which the middle one in size counts."""
_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_BEFORE, _AFTER = "\"'“¡¿([{-", "\"'.。,\uff0c!\uff01?\uff1f:\uff1a”)]}、"


@dataclass(frozen=True)
class Word:
    """A word with the punctuation around it.

    Attributes:
        start: where it begins, in seconds of the recording, to 0.02.
        end: where it ends.
        text: the word.
    """

    start: float
    end: float
    text: str


def ends_of_tokens(attention: NDArray[np.float32]) -> NDArray[np.int64]:
    """The place where each token ends, [tokens]. attention: of heads to each place, after each token, [heads, tokens, places]."""
    deviation = attention.std(1, keepdims=True)
    scaled = (attention - attention.mean(1, keepdims=True)) / np.where(deviation > 0, deviation, 1)
    side = _FILTER // 2
    if scaled.shape[-1] > side:
        padded = np.pad(scaled, ((0, 0), (0, 0), (side, side)), mode="reflect")
        scaled = np.sort(np.lib.stride_tricks.sliding_window_view(padded, _FILTER, -1), -1)[..., side]
    return _path(-scaled.mean(0).astype(np.float64))


def _path(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """The column at which the path of least cost from the first element of [n, m] to the last one comes to each row."""
    n, m = costs.shape
    total = np.full((n + 1, m + 1), np.inf, np.float32)
    step = np.zeros((n + 1, m + 1), np.int8)
    total[0, 0] = 0
    for d in range(2, n + m + 1):  # elements of a diagonal do not need each other
        i = np.arange(max(1, d - m), min(n, d - 1) + 1)
        j = d - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        kind = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        total[i, j] = costs[i - 1, j - 1] + np.choose(kind, (both, down, right))
        step[i, j] = kind
    step[0, :], step[:, 0] = 2, 1
    found = np.zeros(n, np.int64)
    i, j = n, m
    while i > 0:
        found[i - 1] = j - 1  # the last one that is written is the first of the row
        kind = step[i, j]
        i, j = i - (kind != 2), j - (kind != 1)
    return found


def words_of(
    tokens: Sequence[int],
    spans: Sequence[tuple[float, float]],
    decode: Callable[[Sequence[int]], str],
    language: str | None,
) -> list[Word]:
    """Words of tokens, of which each begins and ends as its span says."""
    units = list[tuple[str, int, int]]()  # whole characters, and which tokens they are
    first = 0
    for k in range(len(tokens)):
        text = decode(tokens[first : k + 1])
        if "\ufffd" not in text or k + 1 == len(tokens):
            units.append((text, first, k + 1))
            first = k + 1
    if language not in _WITHOUT_SPACES:
        units = _attached(_joined(units))
    return [Word(spans[a][0], spans[b - 1][1], text.strip()) for text, a, b in units if text.strip()]


def _joined(units: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Those that begin without a space belong to what is before them."""
    found = list[tuple[str, int, int]]()
    for text, a, b in units:
        if not found or text.startswith(" ") or set(text.strip()) <= set(_PUNCTUATION):
            found.append((text, a, b))
        else:
            found[-1] = (found[-1][0] + text, found[-1][1], b)
    return found


def _attached(words: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Opening punctuation goes to the word after it, other punctuation to that before."""
    found = list[tuple[str, int, int]]()
    for text, a, b in words:
        before = found[-1][0] if found else ""
        opens = before.startswith(" ") and before.strip() and before.strip() in _BEFORE
        closes = bool(found) and not before.endswith(" ") and text and set(text) <= set(_AFTER)
        if opens or closes:
            found[-1] = (before + text, found[-1][1], b)
        else:
            found.append((text, a, b))
    return found
