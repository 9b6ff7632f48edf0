"""Which candidates each task has on a device, and that a record decides among them. `candidates.txt` holds what there were when
it was last accepted: LAPILLI_ACCEPT=1 pytest tests/compiler/test_candidates.py, and check its diff. No device is needed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from agreement import Function
from candidates import asked, naming, with_candidate
from decision_cases import CASES, prepared

from lapilli.capture import capture
from lapilli.codegen.select import schedule_of, write_all
from lapilli.ir.node import Graph
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import KNOWN, Target, of_device
from lapilli.target.records import Records

ACCEPTED = Path(__file__).with_name("candidates.txt")
DEVICES = [("h100", True), ("adreno-6xx", False), ("lavapipe", False)]


def target_of(device: str, half: bool) -> Target:
    return replace(of_device(KNOWN[device], half=half, matrix=True), records=Records())


def graph_of(name: str, half: bool) -> Graph:
    return lower(prepared(name, half), "fp16" if half else "fp32", half)


def lines() -> Iterator[str]:
    for device, half in DEVICES:
        target = target_of(device, half)
        yield f"{device}: {target.name}"
        for name in CASES:
            for a in asked(graph_of(name, target.half), target):
                yield f"    {name}: {a.question.title}: {a.question.form}"
                yield f"        {'; '.join(a.names)}"


def test_candidates_are_those_that_were_accepted() -> None:
    found = "\n".join(lines()) + "\n"
    if os.environ.get("LAPILLI_ACCEPT"):
        ACCEPTED.write_text(found)
    accepted = ACCEPTED.read_text()
    changed = [f"{a}\n  now:{b}" for a, b in zip(accepted.splitlines(), found.splitlines(), strict=False) if a != b]
    assert found == accepted, "\n".join(changed[:20])


@pytest.mark.part(2)
@pytest.mark.parametrize("device, half", DEVICES)
def test_any_candidate_can_be_decided_for_and_fits_the_device(device: str, half: bool) -> None:
    """Every kernel that a record may name is within what the device has, and another kernel than the one without."""
    target = target_of(device, half)
    for case in CASES:
        graph = graph_of(case, target.half)
        most = max((len(a.names) for a in asked(graph, target)), default=0)
        seen = set()
        for number in range(most):
            s = with_candidate(graph, target, number)
            kernels = write_all(s)
            for w in kernels.values():
                assert w.requirements(target.half).are_met_by(KNOWN[device]), (case, number, w.name)
            seen.add("".join(kernels[t.out.id].source + str(kernels[t.out.id].groups) for t in s.order.run))
            if number == 0:
                plain = write_all(schedule_of(graph, target))
                assert [w.source for w in kernels.values()] == [w.source for w in plain.values()], case
        assert len(seen) > min(most - 1, 1), case


def test_a_record_of_no_candidate_does_not_count() -> None:
    target = target_of("h100", True)
    graph = graph_of("linear, 128 rows", True)
    (a,) = asked(graph, target)
    plain = [w.source for w in write_all(schedule_of(graph, target)).values()]
    for names in (["__import__('os')"], ["tiles on matrix units: 1024x1024x1024"], [""]):
        with_record = replace(target, records=Records([naming(a.question, *names)]))
        assert [w.source for w in write_all(schedule_of(graph, with_record)).values()] == plain


@pytest.mark.part(2)
@pytest.mark.parametrize("half", [False, True])
def test_nothing_to_compute_has_candidates_too(half: bool) -> None:
    """Sizes of 0, 1 and more, in every place, on all devices that are known."""
    dtype = torch.float16 if half else torch.float32

    def every(x: torch.Tensor, y: torch.Tensor, image: torch.Tensor, filter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = F.scaled_dot_product_attention(x[None], x[None], x[None])
        return x @ y, F.conv2d(image, filter), F.conv2d(image, filter[:, :, :1, :1]), rows, x.softmax(1)

    for m, k, n in itertools.product((0, 1, 40), (0, 16, 256), (0, 3, 64)):
        given = (torch.zeros(m, k), torch.zeros(k, n), torch.zeros(m, k, 5, 7), torch.zeros(max(n, 1), k, 3, 3))
        module = prepare(capture(Function(every), tuple(x.to(dtype) for x in given)))
        for device in KNOWN.values():
            target = of_device(device, half=half, matrix=True)
            assert asked(lower(module, "fp32", target.half), target) is not None


def test_questions_have_no_names() -> None:
    """Equal layers of different models, and of different names, have one question."""
    target = target_of("h100", True)
    for name in CASES:
        first, again = (asked(graph_of(name, True), target) for _ in range(2))
        assert [a.question.key for a in first] == [a.question.key for a in again]
        assert all(a.question.form.isascii() and len(a.question.form) < 300 for a in first)


def test_what_ships_names_candidates() -> None:
    """Records that ship are of this version: the winners of the tasks of a model are among its candidates, and decide."""
    target = of_device(KNOWN["h100"], half=True, matrix=True)
    assert target.records
    layer, image = torch.nn.Linear(576, 1536, bias=False).half().eval(), torch.zeros(512, 576).half()
    graph = lower(prepare(capture(layer, (image,))), "fp16", True)
    (a,) = asked(graph, replace(target, records=Records()))
    best = [
        r.best
        for r in target.records
        if r.op == "product" and dict(r.sizes) == {"batch": 1, "m": 512, "n": 1536, "k": 576}
    ]
    assert best and all(name in a.names for name in best)
