"""The ONNX standard's tests of single operators: all of them by torch, one an operator captured and on the device.

`make onnx` runs all of them on the device: docs/onnx.md."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import onnx_cases
import pytest

NO_DEVICE_HAS = {
    "ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "ai.onnx.ml.LabelEncoder", "Equal",
}  # fmt: skip
"""Operators on strings and on files of pictures; Equal is refused where it compares strings."""


@cache
def _smallest() -> list[str]:
    """For each operator, the case that is quickest to compile: by its own operators, the fewest nodes and the fewest elements."""
    best: dict[str, tuple[tuple[int, int], str]] = {}
    for name, case in onnx_cases.cases().items():
        if "_expanded" in name:
            continue
        found = onnx_cases.operators(case)
        if found & NO_DEVICE_HAS:
            continue
        rank = (len(case.model.graph.node), -onnx_cases.elements(case))
        for operator in found:
            best[operator] = min(best.get(operator, (rank, name)), (rank, name))
    return sorted({name for _, name in best.values()})


@pytest.mark.parametrize("part", range(8))
def test_every_case_by_torch(part: int) -> None:
    """Lapilli's own rules on real tensors: right, or refused by the operators' names."""
    wrong = []
    for name in list(onnx_cases.cases())[part::8]:
        outcome = onnx_cases.run(onnx_cases.cases()[name], "torch")
        if outcome.what == "wrong":
            wrong.append(f"{name}: {outcome.message}")
        if outcome.what == "refused":
            found = onnx_cases.operators(onnx_cases.cases()[name])
            assert found & NO_DEVICE_HAS, f"{name}: {outcome.message}"
            shown = {f for f in found if f.rpartition(".")[2] in outcome.message} | {f for f in found if f == "Equal"}
            assert shown or "strings" in outcome.message
    assert not wrong


def test_at_most_two_in_a_hundred_are_refused() -> None:
    refused: Counter[bool] = Counter()
    for case in onnx_cases.cases().values():
        refused[bool(onnx_cases.uses_strings(case) or "ImageDecoder" in onnx_cases.operators(case))] += 1
    assert refused[True] <= 0.02 * refused.total()


@pytest.mark.part(10)
@pytest.mark.parametrize("part", range(20))
def test_on_the_device(part: int) -> None:
    """A twentieth of the cases. A test for each would make every process that collects tests make the cases."""
    outcomes: dict[str, Any] = {
        name: onnx_cases.run(onnx_cases.cases()[name], "device") for name in _smallest()[part::20]
    }
    assert {name: found.message for name, found in outcomes.items() if found.what != "right"} == {}
