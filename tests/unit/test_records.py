"""Records of measurements: what they say, what is no record, which device they are for."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lapilli.errors import InvalidFileError
from lapilli.target import KNOWN, Target, of_device, tuned
from lapilli.target.records import KernelRecord, Measured, Question, Records, Size, size_class

HERE = replace(KNOWN["lavapipe"], name="llvmpipe (LLVM 99)", driver="llvmpipe Mesa 99.1")


def fixed(**sizes: int) -> dict[str, Size]:
    return {name: Size(n, n, n) for name, n in sizes.items()}


def question(**sizes: int) -> Question:
    return Question("cpu-fp32", "product", "float32 * float32", fixed(**(sizes or {"m": 64, "n": 384})))


def record(times: dict[str, float], q: Question | None = None, wrong: tuple[str, ...] = ()) -> KernelRecord:
    return KernelRecord.of(q or question(), "usual", 12.5, times, wrong)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "cache"))
    tuned._warn.cache_clear()
    return tmp_path / "cache" / "tuned"


# -- what wins


def test_the_fastest_wins_if_it_is_faster_than_chance() -> None:
    assert record({"a": 0.9, "b": 0.8}).best == "b"
    assert record({"a": 0.98, "b": 1.3}).best == "usual"
    assert record({}).best == "usual"


def test_of_equal_times_the_first_wins() -> None:
    assert record({"a": 0.8, "b": 0.8}).best == "a"
    assert record({"b": 0.8, "a": 0.8}).best == "b"


def test_wrong_candidates_never_win() -> None:
    assert record({"a": 0.9, "b": 0.2}, wrong=("b",)).best == "a"


# -- which questions a record answers


def test_sizes_of_a_class_are_one() -> None:
    assert [size_class(n) for n in (0, 1, 7, 16, 17, 64, 65, 197, 208, 1000)] == [
        0,
        1,
        7,
        16,
        18,
        64,
        72,
        208,
        208,
        1024,
    ]
    known = Records([record({"a": 0.5}, question(m=197, n=768))])
    assert known.best(question(m=200, n=768)) == "a"
    assert known.best(question(m=224, n=768)) is None
    assert known.best(replace(question(m=197, n=768), plan="gpu-fp32")) is None
    assert known.best(replace(question(m=197, n=768), form="float16")) is None


def test_a_candidate_that_was_not_measured_is_not_ruled_out() -> None:
    """A record of an earlier version says nothing of a kernel that this one prefers."""
    q = question(m=197, n=768)
    known = Records([KernelRecord.of(q, "first", 5.0, {"a": 0.5, "b": 1.2}, wrong=["c"])])
    assert [known.best(q, name) for name in ("first", "a", "b", "c", "")] == ["a"] * 5
    assert known.best(q, "new") is None
    assert known != Records([KernelRecord.of(q, "first", 5.0, {"a": 0.5, "new": 1.2}, wrong=["c"])])


def test_classes_are_in_order_and_fine() -> None:
    """Sizes in one class differ by less than an eighth, so a record is never far from what was measured."""
    for n in range(1, 5000):
        assert n <= size_class(n) < n * 1.125 + 1
        assert size_class(size_class(n)) == size_class(n) <= size_class(n + 1)


def test_open_sizes_take_their_own_record_or_one_of_near_sizes() -> None:
    open_rows = replace(question(), sizes={"m": Size(1, None, 256), **fixed(n=384)})
    near, nearer, far = (
        record({name: 0.5}, question(m=m, n=384)) for name, m in (("near", 130), ("nearer", 240), ("far", 1024))
    )
    assert Records([near, nearer, far]).best(open_rows) == "nearer"
    assert Records([far]).best(open_rows) is None
    assert Records([near]).best(replace(open_rows, sizes={"m": Size(300, 512, 400), **fixed(n=384)})) is None
    assert Records([near, record({"own": 0.5}, open_rows)]).best(open_rows) == "own"
    assert Records([record({"own": 0.5}, open_rows)]).best(question(m=240, n=384)) is None


def test_records_are_equal_if_they_decide_the_same() -> None:
    a, b = Records([record({"a": 0.5, "b": 0.9})]), Records([record({"a": 0.6, "b": 0.7})])
    assert a == b and hash(a) == hash(b) and repr(a) == repr(b)
    assert a != Records([record({"b": 0.5})]) and Records() == Records([])
    assert repr(Target("t", "gpu", records=a)) != repr(Target("t", "gpu"))  # caches are keyed by this


# -- files


def text(**changed: Any) -> str:
    entry = {**record({"a": 0.5}).to_json(), **changed}
    head = {"lapilli records": 1, "device": "d", "driver": "v"}
    return "\n".join(json.dumps(line) for line in (head, {k: v for k, v in entry.items() if v is not ...}))


def test_files_are_read_as_they_are_written() -> None:
    made = Measured("ä device", "driver 1", (record({"a": 0.5, "b": 1.25}, wrong=("c",)),))
    assert Measured.of_text(made.to_text(), "f") == made
    assert Measured.of_text(text(), "f").records[0].best == "a"


BROKEN = {
    "": "empty",
    "hello": "line 1: is not JSON",
    "[]": "line 1: is not a JSON object",
    '{"lapilli records": 2, "device": "d", "driver": "v"}': "line 1: must begin with",
    '{"lapilli records": 1, "device": "d"}': 'line 1: "driver" must be a text',
    '{"lapilli records": 1, "device": "d", "driver": "v", "run": "rm"}': "line 1: has what no record has: 'run'",
    text(exec="print()"): "line 2: has what no record has: 'exec'",
    text(plan=...): 'line 2: "plan" must be a text',
    text(plan="x" * 500): 'line 2: "plan" must be a text',
    text(form="\x1b[2J"): 'line 2: "form" must be a text',
    text(us=-1): 'line 2: "us" must have numbers above 0',
    text(us=True): 'line 2: "us" must have numbers above 0',
    text(times={"a": "fast"}): 'line 2: "times" must have numbers above 0',
    text(times=[1]): 'line 2: "times" must map',
    text(times={str(k): 1.5 for k in range(300)}): 'line 2: "times" must map',
    text(sizes={"m": -1}): 'line 2: "sizes" must map',
    text(sizes={"m": "many"}): 'line 2: "sizes" must map',
    text(sizes={"m": 1.5}): 'line 2: "sizes" must map',
    text(wrong="a"): 'line 2: "wrong" must be a list',
    text(best="b"): "line 2: \"best\" is 'b', and by its times it is 'a'",
    text() + "\n" + "[" * 100_000: "line 3: is not JSON",
    text().replace("0.5", "NaN"): 'line 2: "times" must have numbers above 0',
}


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_broken_files_are_refused(broken: str) -> None:
    with pytest.raises(InvalidFileError) as error:
        Measured.of_text(broken, "some.jsonl")
    assert str(error.value).startswith("some.jsonl") and BROKEN[broken] in str(error.value)


# -- devices


def test_a_record_is_for_its_device_and_driver_alone(cache: Path) -> None:
    tuned.save(HERE, [record({"a": 0.5})])
    assert tuned.records_of(HERE).best(question()) == "a"
    for other in (replace(HERE, driver="llvmpipe Mesa 99.2"), replace(HERE, name="llvmpipe (LLVM 98)")):
        assert tuned.records_of(other).best(question()) is None
    assert of_device(HERE, half=False, matrix=False).records.best(question()) == "a"


def test_new_records_are_added_and_take_the_place_of_old_ones(cache: Path) -> None:
    tuned.save(HERE, [record({"a": 0.5})])
    tuned.save(HERE, [record({"b": 0.5}, question(m=8, n=8))])
    assert tuned.records_of(HERE).best(question()) == "a"
    tuned.save(HERE, [record({"b": 0.5})])
    assert tuned.records_of(HERE).best(question()) == "b"
    assert tuned.records_of(HERE).best(question(m=8, n=8)) == "b"
    assert [p.suffix for p in cache.iterdir()] == [".jsonl"]


def test_a_damaged_file_is_left_out_with_one_warning(cache: Path) -> None:
    tuned.save(HERE, [record({"a": 0.5})])
    (file,) = cache.iterdir()
    file.write_text(file.read_text().replace('"best": "a"', '"best": "os.system"'))
    with pytest.warns(RuntimeWarning, match=r"not used: .*line 2: .*Remove the file"):
        assert tuned.records_of(HERE).best(question()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.own(HERE).best(question()) is None
    tuned.save(HERE, [record({"b": 0.5})])
    assert tuned.records_of(HERE).best(question()) == "b"


def test_a_file_that_others_may_write_is_not_read(cache: Path) -> None:
    tuned.save(HERE, [record({"a": 0.5})])
    (file,) = cache.iterdir()
    file.chmod(0o666)
    assert tuned.records_of(HERE).best(question()) is None


def test_files_of_other_machines_can_be_brought(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "h100.jsonl"
    other.write_text(Measured("NVIDIA H100", "580", (record({"a": 0.5}),)).to_text())
    assert tuned.bring(other).device == "NVIDIA H100"
    there = replace(KNOWN["h100"], driver="580")
    assert tuned.records_of(there).best(question()) == "a"
    assert tuned.records_of(HERE).best(question()) is None
    other.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidFileError, match="is not text"):
        tuned.bring(other)


def test_what_ships_is_for_known_devices_whatever_their_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(Measured("NVIDIA H100 80GB HBM3", "580", (record({"a": 0.5}),)).to_text())
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    tuned._known.cache_clear()
    tuned._of_driver.cache_clear()
    assert tuned.records_of(KNOWN["h100"]).best(question()) == "a"
    assert tuned.records_of(KNOWN["a100"]).best(question()) is None
    there = replace(KNOWN["h100"], name="NVIDIA H100 80GB HBM3", driver="580")
    assert tuned.records_of(there).best(question()) == "a"
    tuned.save(there, [record({"b": 0.5})])  # the user's own come first
    assert tuned.records_of(there).best(question()) == "b"
    tuned._known.cache_clear()
    tuned._of_driver.cache_clear()


def test_what_ships_can_be_read() -> None:
    for file in tuned.SHIPPED.glob("*.jsonl"):
        assert tuned.read(file).records
