"""Which cases of a test a run takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import in_parts


def case(name: str, of: int | None) -> Any:
    mark = None if of is None else SimpleNamespace(args=(of,))
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: mark)


def test_a_part_of_the_cases_and_at_least_one() -> None:
    many, one = [case(f"test_a.py::many[{k}]", 3) for k in range(10)], [case("test_a.py::one[x]", 3)]
    whole = [case(f"test_a.py::whole[{k}]", None) for k in range(5)]
    items = [*many, *whole, *one]
    left = in_parts.left_out(list(items))
    assert len(left) == 6 and all(item in many for item in left)
    assert in_parts.left_out([*reversed(items)]) == left, "the order of collection does not matter"
