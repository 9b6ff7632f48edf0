"""Records of what was measured: for a contraction of some sizes, which of its candidates a device runs fastest.

A record is text that names candidates, and nothing else: whoever reads it compares these names with those that the compiler
enumerates itself, so that no record can make it do anything that it would not do otherwise. A file of records is JSON lines. The
first one says which device, with which driver, was measured; the others are records:

    {"lapilli records": 1, "device": "NVIDIA H100 80GB HBM3", "driver": "NVIDIA 580.159.04"}
    {"plan": "gpu-fp16-matrix", "op": "product", "form": "…", "sizes": {"batch": 1, "m": 128, "n": 384, "k": 384},
     "best": "tiles on matrix units: 32x32x128", "times": {"tiles on matrix units: 32x32x128": 0.91, …}, "wrong": [], "us": 5.2}

`times` are in that of the cost model's choice, which took `us` microseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lapilli.errors import InvalidFileError

VERSION = 1
_HEAD = "lapilli records"
_MOST_BYTES, _MOST_TEXT, _MOST_NAMES, _MOST_SIZE = 1 << 24, 400, 256, 1 << 40
"""Of a file; of a name; of candidates, or sizes; a size."""
_NEAR = 2.0
"""By which factor a measured size may differ from the one that the cost model assumes of an open size, for its record to count."""
PAYS = 0.97
"""A candidate wins with less than this part of the time of the cost model's choice: less of a difference may be chance."""


@dataclass(frozen=True)
class Size:
    """One size of a contraction: from `least` to `most` (None: no bound), and what the cost model takes it for."""

    least: int
    most: int | None
    usual: int

    @property
    def text(self) -> int | str:
        """As in a record: a number, or of an open size its bounds."""
        if self.least == self.most:
            return self.least
        return f"{self.least}..{'' if self.most is None else self.most}"


def size_class(n: int) -> int:
    """Sizes of a class have one record: up to 16 each its own, beyond in steps of an eighth to a sixteenth."""
    step = 1 << max(n.bit_length() - 4, 0)
    return n if n <= 16 else -(-n // step) * step


@dataclass(frozen=True)
class Question:
    """What a choice depends on, and nothing else: two contractions with equal questions have the same kernels.

    plan: the name of the target. op: product, convolution, attention or one of its gradients, rows. form: types, layouts and what
    follows, as text.
    """

    plan: str
    op: str
    form: str
    sizes: Mapping[str, Size]

    @property
    def key(self) -> Key:
        return self.plan, self.op, self.form, tuple((n, _class_of(s.text)) for n, s in self.sizes.items())

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.op} {'x'.join(str(s.text) for s in self.sizes.values() if s.text != 1) or 1}"


Key = tuple[str, str, str, tuple[tuple[str, int | str], ...]]


def _class_of(size: int | str) -> int | str:
    return size_class(size) if isinstance(size, int) else size


@dataclass(frozen=True)
class KernelRecord:
    """What was measured for a question.

    times: of candidates, in that of the cost model's choice at the time, `default`, which took `us` microseconds. wrong: candidates
    whose results were wrong, or that cannot be compiled. best: what won.
    """

    plan: str
    op: str
    form: str
    sizes: Mapping[str, int | str]
    default: str
    us: float
    times: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return self.plan, self.op, self.form, tuple((n, _class_of(s)) for n, s in self.sizes.items())

    @property
    def measured(self) -> set[str]:
        """All candidates that it says something of."""
        return {self.default, *self.times, *self.wrong}

    @property
    def best(self) -> str:
        """The fastest; of equal times the one that was tried first, which is the one that the cost model prefers."""
        right = {name: time for name, time in self.times.items() if name not in self.wrong}
        name = min(right, key=lambda n: right[n], default=self.default)
        return name if right.get(name, 1.0) < PAYS else self.default

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan, "op": self.op, "form": self.form, "sizes": dict(self.sizes), "best": self.best,
            "default": self.default, "us": round(self.us, 2), "times": {n: round(t, 3) for n, t in self.times.items()},
            "wrong": list(self.wrong),
        }  # fmt: skip

    @staticmethod
    def of(
        question: Question, default: str, us: float, times: Mapping[str, float], wrong: Iterable[str] = ()
    ) -> KernelRecord:
        sizes = {n: s.text for n, s in question.sizes.items()}
        return KernelRecord(question.plan, question.op, question.form, sizes, default, us, dict(times), tuple(wrong))


class Records:
    """The records of a device that decisions are made by. Equal if they decide the same."""

    def __init__(self, records: Iterable[KernelRecord] = ()) -> None:
        self._exact: dict[Key, KernelRecord] = {r.key: r for r in records}
        self._near: dict[tuple[str, str, str], list[KernelRecord]] = {}
        for r in self._exact.values():
            if all(isinstance(s, int) for s in r.sizes.values()):
                self._near.setdefault((r.plan, r.op, r.form), []).append(r)
        decided = sorted((str(key), r.best, sorted(r.measured)) for key, r in self._exact.items())
        self.digest = hashlib.sha256(repr(decided).encode()).hexdigest()[:16] if decided else ""

    def best(self, q: Question, preferred: str = "") -> str | None:
        """The name of the candidate that won; None if nothing is known, as of one that the cost model prefers and that was not
        measured: an earlier version did not have it.

        Of a question with open sizes, a record of fixed sizes counts, too, if they are in its ranges and about what the cost model
        takes them for: of several the nearest."""
        found = self._exact.get(q.key)
        if found is None and any(s.least != s.most for s in q.sizes.values()):
            near = [
                (d, str(r.key), r)
                for r in self._near.get((q.plan, q.op, q.form), ())
                if (d := _distance(q, r)) is not None
            ]
            found = min(near, key=lambda item: item[:2])[2] if near else None
        if found is None or (preferred and preferred not in found.measured):
            return None
        return found.best

    def get(self, q: Question) -> KernelRecord | None:
        """The record of just this question."""
        return self._exact.get(q.key)

    def joined(self, others: Iterable[KernelRecord]) -> Records:
        """These and others, which count where both have one."""
        return Records([*self, *others])

    def __iter__(self) -> Any:
        return iter(self._exact.values())

    def __len__(self) -> int:
        return len(self._exact)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Records({self.digest})"


def _distance(q: Question, r: KernelRecord) -> float | None:
    """How far the sizes of a record are from those of a question, in factors of two; None if too far, or outside its ranges."""
    if r.sizes.keys() != q.sizes.keys():
        return None
    far = 0.0
    for name, size in q.sizes.items():
        n = r.sizes[name]
        assert isinstance(n, int)
        if size.least == size.most:
            if size_class(n) != size_class(size.least):
                return None
            continue
        if n < max(size.least, 1) or (size.most is not None and n > size.most):
            return None
        apart = abs(math.log2(n / max(size.usual, 1)))
        if apart > math.log2(_NEAR):
            return None
        far += apart
    return far


@dataclass(frozen=True)
class Measured:
    """A file of records: the device as its driver names it, the driver with its version, and what was measured."""

    device: str
    driver: str
    records: tuple[KernelRecord, ...]

    def to_text(self) -> str:
        head = {_HEAD: VERSION, "device": self.device, "driver": self.driver}
        lines = [head, *(r.to_json() for r in sorted(self.records, key=lambda r: str(r.key)))]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    @staticmethod
    def of_text(text: str, source: str) -> Measured:
        """Reads a file. source: its name, for messages.

        Raises InvalidFileError if it is not just as `to_text` writes it."""
        if len(text) > _MOST_BYTES:
            raise InvalidFileError(f"{source} has {len(text)} characters; files of records have at most {_MOST_BYTES}.")
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            raise InvalidFileError(f"{source} is empty; records begin with a line that names the device.")
        try:
            head = _object(lines[0])
            if head.pop(_HEAD, None) != VERSION:
                raise _Wrong(f'must begin with {{"{_HEAD}": {VERSION}, "device": …, "driver": …}}')
            device, driver = _text(head, "device"), _text(head, "driver")
            _nothing_else(head)
        except _Wrong as error:
            raise InvalidFileError(f"{source}, line 1: {error}.") from None
        records = []
        for k, line in enumerate(lines[1:], 2):
            try:
                records.append(_record(_object(line)))
            except _Wrong as error:
                raise InvalidFileError(f"{source}, line {k}: {error}.") from None
        return Measured(device, driver, tuple(records))


class _Wrong(Exception):
    pass


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        raise _Wrong("is not JSON") from None
    if not isinstance(found, dict):
        raise _Wrong("is not a JSON object")
    return found


def _record(entry: dict[str, Any]) -> KernelRecord:
    plan, op, form, default = (_text(entry, name) for name in ("plan", "op", "form", "default"))
    us = _number(entry.pop("us", None), "us")
    sizes, times, wrong, best = (entry.pop(name, None) for name in ("sizes", "times", "wrong", "best"))
    _nothing_else(entry)
    if (
        not isinstance(sizes, dict)
        or len(sizes) > _MOST_NAMES
        or not all(_is_size(s) and _is_text(n) for n, s in sizes.items())
    ):
        raise _Wrong('"sizes" must map names to numbers, or to ranges such as "1..512"')
    if not isinstance(times, dict) or len(times) > _MOST_NAMES or not all(_is_text(name) for name in times):
        raise _Wrong('"times" must map candidates to numbers')
    if not isinstance(wrong, list) or len(wrong) > _MOST_NAMES or not all(_is_text(name) for name in wrong):
        raise _Wrong('"wrong" must be a list of candidates')
    made = KernelRecord(
        plan, op, form, sizes, default, us, {n: _number(t, "times") for n, t in times.items()}, tuple(wrong)
    )
    if best != made.best:
        raise _Wrong(f'"best" is {best!r}, and by its times it is {made.best!r}')
    return made


def _text(entry: dict[str, Any], name: str) -> str:
    found = entry.pop(name, None)
    if not _is_text(found):
        raise _Wrong(f'"{name}" must be a text of at most {_MOST_TEXT} characters')
    return str(found)


def _is_text(x: object) -> bool:
    return isinstance(x, str) and len(x) <= _MOST_TEXT and x.isprintable()


def _number(x: object, name: str) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < 1e12:
        raise _Wrong(f'"{name}" must have numbers above 0')
    return float(x)


def _is_size(x: object) -> bool:
    if isinstance(x, str):
        least, dots, most = x.partition("..")
        return bool(dots) and all(t.isascii() and t.isdigit() and len(t) <= 13 for t in (least, most or "0"))
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= _MOST_SIZE


def _nothing_else(entry: dict[str, Any]) -> None:
    if entry:
        raise _Wrong(f"has what no record has: {', '.join(map(repr, list(entry)[:3]))}")
