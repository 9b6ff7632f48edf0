"""The first-run check: whether a device computes by the plan that it takes what it computes by the plainest one.

Drivers of phones miscompile kernels now and then, without a word. The plans of a program compute the same by different
kernels: tiles in shared memory and subgroups, or plain loops. So the last plan that a device takes is the reference; no other
device and no torch is needed. What is wrong in both alike is not found. A verdict holds for a file, a device and its driver,
and is kept on disk."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError, NoDeviceError
from lapilli.player import NativeLimits, NativeProgram
from lapilli.runtime.cache import Cache
from lapilli.runtime.description import Description, MethodSpec
from lapilli.version import __version__

Array = NDArray[Any]

VERDICTS = Cache("verdicts", 1 << 20)
_RUNS = 3
"""Faults that come and go, as missing barriers do, seldom spare three runs."""
_OPEN = 33
"""What dynamic sizes are, if their bounds allow: more than a tile of many kernels, and odd."""
_EXACT, _HALF = 1e-3, 5e-2
"""Relative errors (norm) up to which results are the same. Rounding is a hundred times less in float32, and halves have 11 bits."""


def plan_for(
    source: Path | bytes | memoryview, device: str | int | None, limits: NativeLimits | None, host: bool
) -> str | None:
    """The plan to load: None for the one that the device takes, or the name of one that computes the same as the plainest.

    Warns (RuntimeWarning) if it is not the first. Raises NoDeviceError if the device computes something else in each run, and
    whatever loading raises."""
    with _load(source, device, None, limits, host) as first:
        info = first.info()
        key = _key(source, info["device"])
        kept = VERDICTS.read(key)
        if kept is not None:
            verdict: dict[str, Any] = json.loads(kept)
        else:
            description = Description.from_json(source, first.describe())
            verdict = _verdict(first, info, description, lambda plan: _load(source, device, plan, limits, host))
            VERDICTS.write(key, json.dumps(verdict).encode())
    if verdict["refused"]:
        raise NoDeviceError(verdict["why"])
    if verdict["why"]:
        warnings.warn(verdict["why"], RuntimeWarning, stacklevel=4)
    plan: str | None = verdict["plan"]
    return plan


def _load(source: Any, device: Any, plan: str | None, limits: NativeLimits | None, host: bool) -> NativeProgram:
    return NativeProgram.load(source, device=device, plan=plan, allow_host=host, limits=limits)


def _key(source: Path | bytes | memoryview, device: dict[str, Any]) -> str:
    if isinstance(source, Path):
        with source.open("rb") as file:
            header, size = file.read(64), source.stat().st_size  # the header has a checksum of all
    else:
        header, size = bytes(source[:64]), len(source)
    what = [size, __version__, *(device[k] for k in ("uuid", "name", "vendor_id", "driver", "driver_version"))]
    return hashlib.sha256(header + json.dumps(what).encode()).hexdigest()


def _verdict(first: NativeProgram, info: dict[str, Any], description: Description, load: Any) -> dict[str, Any]:
    plans = [plan.name for plan in description.methods[0].plans]
    taken = plans[info["methods"][0]["plan_index"]]
    name = f"{info['device']['name']} ({info['device']['driver']})"
    advice = "Update the driver. LAPILLI_DEVICE chooses another device."
    inputs = dict(_inputs(description))
    found = _results(first, description, inputs)
    right = {"plan": None, "refused": False, "why": ""}
    for plain in reversed(plans[plans.index(taken) + 1 :]):
        try:
            with load(plain) as program:
                reference = _results(program, description, inputs)
        except NoDeviceError:
            continue  # the device does not take it
        if reference is None:
            break
        error = float("inf") if found is None else _difference(found, reference)
        if error <= _bound(taken):
            return right
        wrong = "something else in each run" if found is None else f"wrong, with a relative error of {error:.1g},"
        why = f"{name} computes {wrong} by the plan {taken} of this program: the slower plan {plain} is used instead. {advice}"
        return {"plan": plain, "refused": False, "why": why}
    else:
        if found is not None:
            return right  # there is nothing to compare with
    why = f"{name} computes something else whenever this program runs, so its results cannot be trusted. {advice}"
    return {"plan": None, "refused": True, "why": why}


def _inputs(description: Description) -> Iterator[tuple[int, list[Array]]]:
    """By method: arrays. Methods whose sizes are not known from their symbols, and those with bfloat16 inputs, are left out."""
    rng = np.random.default_rng(0)
    for index, method in enumerate(description.methods):
        try:
            if not method.given:
                yield index, [_array(rng, spec.numpy_dtype(), _shape(method, spec.shape)) for spec in method.inputs]
        except InvalidInputError:
            continue


def _shape(method: MethodSpec, shape: Sequence[Any]) -> tuple[int, ...]:
    values = {s.name: max(s.min, _OPEN if s.max is None else min(_OPEN, s.max)) for s in method.symbols}
    sizes = [size if isinstance(size, int) else values.get(str(size)) for size in shape]
    known = [size for size in sizes if size is not None]
    if len(known) != len(sizes):
        raise InvalidInputError("a size is computed from others")
    return tuple(known)


def _array(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Floats around zero; integers 0 and 1, which are indices of nearly everything."""
    if dtype.kind == "f":
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _results(
    program: NativeProgram, description: Description, inputs: dict[int, list[Array]]
) -> list[list[Array]] | None:
    """The outputs of each method; None if they change from run to run."""
    first: list[list[Array]] | None = None
    for _ in range(_RUNS):
        if description.states:
            program.reset()
        results = [program.run(arrays, method) for method, arrays in inputs.items()]
        if first is None:
            first = results
        elif any(
            a.tobytes() != b.tobytes() for x, y in zip(first, results, strict=True) for a, b in zip(x, y, strict=True)
        ):
            return None
    return first


def _difference(found: list[list[Array]], wanted: list[list[Array]]) -> float:
    """The largest relative error (norm) of a method's floats, or where it has none, the part of its integers that differ."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        pairs = list(zip(a, b, strict=True))
        floats = [(x, y) for x, y in pairs if y.dtype.kind == "f"]
        for x, y in floats:
            there = np.isfinite(y)
            if not np.array_equal(there, np.isfinite(x)):
                return float("inf")
            x, y = x[there].astype(np.float64), y[there].astype(np.float64)
            worst = max(worst, float(np.linalg.norm(x - y)) / max(float(np.linalg.norm(y)), 1e-30))
        for x, y in pairs if not floats else []:
            worst = max(worst, float(np.mean(x != y)) if y.size else 0.0)
    return worst


def _bound(plan: str) -> float:
    return _HALF if "16" in plan else _EXACT
