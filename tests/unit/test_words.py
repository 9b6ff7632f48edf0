"""Where the path of least cost goes, and which tokens are a word."""

from __future__ import annotations

import numpy as np

from lapilli.llm.words import Word, _path, ends_of_tokens, words_of


def least(costs: np.ndarray) -> np.ndarray:
    """By the recursion itself, an element at a time; where two ways cost the same, the one along the row is taken."""
    n, m = costs.shape
    total = np.full((n + 1, m + 1), np.inf, np.float32)
    total[0, 0] = 0
    came = {}
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
            kind = 0 if both < down and both < right else 1 if down < both and down < right else 2
            total[i, j] = costs[i - 1, j - 1] + (both, down, right)[kind]
            came[i, j] = (i - (kind != 2), j - (kind != 1))
    at, first = (n, m), np.zeros(n, np.int64)
    while at[0] > 0:
        first[at[0] - 1] = at[1] - 1
        at = came[at]
    return first


def test_the_path_is_that_of_least_cost() -> None:
    rng = np.random.default_rng(0)
    for n, m in ((1, 1), (1, 7), (5, 1), (4, 9), (12, 40), (30, 11)):
        for scale in (1.0, 0.0):
            costs = np.round(rng.standard_normal((n, m)) * scale, 1)  # with equal ones
            assert np.array_equal(_path(costs), least(costs)), (n, m)


def test_tokens_end_where_attention_moves_on() -> None:
    attention = np.full((2, 4, 40), 0.01, np.float32)
    for k in range(4):
        attention[:, k, 10 * k : 10 * k + 10] = 1
    assert np.allclose(ends_of_tokens(attention), [0, 10, 20, 30], atol=1)
    assert ends_of_tokens(np.zeros((1, 3, 2), np.float32)).shape == (3,)


def test_words_have_their_punctuation() -> None:
    texts = [" It", "'s", " 5", " o", "'clock", ",", ' "', "yes", '!"', " caf", "\u00c3", "\u00a9"]
    table = dict(enumerate(texts))

    def decode(tokens: object) -> str:
        joined = "".join(table[t] for t in tokens)  # type: ignore[attr-defined]
        if joined.endswith("\u00c3"):  # half a character
            return joined[:-1] + "\ufffd"
        return joined.replace("\u00c3\u00a9", "\u00e9")

    spans = [(float(k), float(k + 1)) for k in range(len(texts))]
    found = words_of(range(len(texts)), spans, decode, "en")
    assert found == [
        Word(0.0, 2.0, "It's"), Word(2.0, 3.0, "5"), Word(3.0, 6.0, "o'clock,"), Word(6.0, 9.0, '"yes!"'),
        Word(9.0, 12.0, "caf\u00e9"),
    ]  # fmt: skip
    apart = words_of(range(3), spans, decode, "ja")
    assert [w.text for w in apart] == ["It", "'s", "5"]
