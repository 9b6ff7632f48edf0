"""What metadata say of an encoder: damaged ones are refused with a sentence."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

import lapilli
from lapilli.llm.about_encoder import KEY, AboutEncoder

GOOD = AboutEncoder(40, 1, 8, {"en": 3, "de": 4}, {"transcribe": 5}, 6)


def test_metadata_hold_all_of_it() -> None:
    assert AboutEncoder.of_metadata(GOOD.metadata(), 7) == GOOD
    plain = AboutEncoder(40, 1)
    assert AboutEncoder.of_metadata(plain.metadata(), 2) == plain
    with pytest.raises(lapilli.InvalidFileError, match=r"without an encoder: lapilli\.LLM loads it"):
        AboutEncoder.of_metadata({}, 7)


@pytest.mark.parametrize(
    "change",
    [{"start": 7}, {"start": -1}, {"start": None}, {"start": True}, {"places": 2**40}, {"places": 1}, {"places": "a"},
     {"bins": -1}, {"bins": 5000},
     {"languages": []}, {"languages": {"en": 7}}, {"languages": {"en": None}}, {"tasks": 3}, {"tasks": {"a": "b"}}, {"untimed": 9}],
    ids=str,
)  # fmt: skip
def test_damaged_metadata_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(lapilli.InvalidFileError, match="metadata of the encoder are damaged"):
        AboutEncoder.of_metadata({KEY: json.dumps(asdict(GOOD) | change)}, 7)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "[" * 10_000])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(lapilli.InvalidFileError, match="metadata of the encoder are damaged"):
        AboutEncoder.of_metadata({KEY: text}, 7)
