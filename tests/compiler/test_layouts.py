"""The choice of layouts: nothing is read or written in large steps where another order of a value avoids it."""

from __future__ import annotations

from typing import Any

import pytest
from layout_cases import MODELS, T, heads, heads_by_hand, transposed_products
from plans import labels, plan

from lapilli.ir.integer import Var, as_int, of
from lapilli.schedule.layout import Layout, in_memory
from lapilli.target import ANY, GPU


@pytest.mark.parametrize("target", [ANY, GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_strided(name: str, target: Any) -> None:
    f, x, allowed = MODELS[name]
    s = plan(f, x, target=target)
    assert {t.reason.partition("strided in memory: ")[2] for t in s.tasks} - {""} == allowed


def test_a_transition_is_paid_where_it_is_cheapest() -> None:
    """A product can store transposed at less cost than the next one could read so."""
    first, last = (t for t in plan(transposed_products, T).order.run if t.reduction is not None)
    assert "strided" in first.reason
    assert "strided" not in last.reason
    assert last.template is not None


def test_attention_is_projected_by_a_template() -> None:
    """The projection reads rows of consecutive elements: it needs no copy, and no generic kernel."""
    last = plan(heads, T).order.run[-1]
    assert last.label == "linear + add"
    assert last.template is not None


def test_the_choice_is_the_same_every_time() -> None:
    one, other = (plan(heads_by_hand, T) for _ in range(2))
    assert labels(one) == labels(other)
    assert [one.layouts[t.out.id].order for t in one.tasks] == [other.layouts[t.out.id].order for t in other.tasks]


def test_axes_of_one_stride_are_in_the_order_in_which_they_were_made() -> None:
    """Not in that of a set, which depends on addresses: the same model is the same file."""
    for _ in range(20):
        axes = [Var(f"a{k}", as_int(3)) for k in range(6)]
        paces = (2, 2, 2, 7, 2, 7)
        index = sum((of(a) * pace for a, pace in zip(axes, paces, strict=True)), as_int(0))
        assert in_memory([index], Layout((0,), (as_int(100),))) == [axes[k] for k in (3, 5, 0, 1, 2, 4)]
