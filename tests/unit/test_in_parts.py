"""Which cases of a test a run takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import in_parts
import pytest


def case(name: str, of: int | None, long: bool = False) -> Any:
    marks = {"part": None if of is None else SimpleNamespace(args=(of,)), "long": SimpleNamespace() if long else None}
    return SimpleNamespace(nodeid=name, get_closest_marker=marks.get)


def test_a_part_of_the_cases_and_at_least_one() -> None:
    many, one = [case(f"test_a.py::many[{k}]", 3) for k in range(10)], [case("test_a.py::one[x]", 3)]
    whole = [case(f"test_a.py::whole[{k}]", None) for k in range(5)]
    items = [*many, *whole, *one]
    left = in_parts.left_out(list(items))
    assert len(left) == 6 and all(item in many for item in left)
    assert in_parts.left_out([*reversed(items)]) == left, "the order of collection does not matter"


@pytest.mark.parametrize("of", [1, 2, 5, 16, 17, 40, 41])
def test_one_in_some_of_many_cases_that_compile(of: int) -> None:
    items = [case(f"tests/conformance/test_x.py::test_x[{k}]", None) for k in range(of)]
    taken = of - len(in_parts.left_out(items))
    assert taken == -(-of // in_parts.SHARE)


def test_part_of_one_is_all_and_quick_tests_run_whole() -> None:
    whole = [case(f"tests/conformance/test_x.py::test_x[{k}]", 1) for k in range(40)]
    quick = [case(f"tests/runtime/test_x.py::test_x[{k}]", None) for k in range(40)]
    assert in_parts.left_out(whole + quick) == []


def test_long_ones_are_left_out_and_count_for_no_part() -> None:
    long = case("tests/runtime/test_x.py::test_x[0]", 2, long=True)
    others = [case(f"tests/runtime/test_x.py::test_x[{k}]", 2) for k in range(1, 5)]
    left = in_parts.left_out([long, *others])
    assert left[0] is long and len(left) == 3
