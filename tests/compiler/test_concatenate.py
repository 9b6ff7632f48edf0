"""Concatenations are written in place by what computes their parts, where these belong to nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from concatenate_cases import MODELS, X
from plans import labels, plan

from lapilli.target import ANY, GPU


@pytest.mark.parametrize("target", [ANY, GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", MODELS)
def test_copies(name: str, target: Any) -> None:
    model, copies = MODELS[name]
    assert sum(label == "cat" for label in labels(plan(model, X, target=target))) == copies


def test_parts_need_no_barrier_and_live_in_one_buffer() -> None:
    s = plan(MODELS["two parts"][0], X)
    (whole,) = {w.whole for w in s.windows.values()}
    assert labels(s) == ["pack channels_last", "conv2d + relu", "conv2d + relu", "conv2d"]
    assert s.order.run_barriers == [False, True, False, True]
    assert s.order.lifetimes.keys() == {t.out.id for t in s.order.run} - s.windows.keys() | {whole.id}
    assert s.order.lifetimes[whole.id] == (1, 3)
