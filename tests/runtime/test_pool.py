"""A program on several devices at once: lavapipe and SwiftShader, in processes of their own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import several_devices
import tiny

import lapilli
from lapilli import InvalidInputError, NoDeviceError

TWO = pytest.mark.skipif(len(several_devices.drivers()) < 2, reason="tools/setup.sh test fetches SwiftShader")
FAULTS = pytest.mark.skipif(
    len(several_devices.drivers()) < 2 or not several_devices.LOADER.exists(),
    reason="make native builds the loader that lets calls fail",
)

HEAD = """
import gc, os, sys, threading, time, warnings, weakref
import numpy as np
import several_devices
import lapilli

path = sys.argv[1]
weights = np.array([1, 2, 3], np.float32)
rng = np.random.default_rng(0)

def items(n):
    return [rng.random((1 + k % 16, 3), dtype=np.float32) for k in range(n)]

def right(x, y):
    np.testing.assert_array_equal(y, x * weights * weights)
"""


@TWO
def test_two_devices(scaled: Path) -> None:
    script = (
        HEAD
        + """
known = lapilli.devices()
assert len({d.uuid for d in known}) == 2
for wanted in ("all", [0, 1], [1, 0], [d.uuid for d in known], ("llvmpipe", "SwiftShader")):
    with lapilli.load(path, device=wanted) as pool:
        assert {d.uuid for d in pool.devices} == {d.uuid for d in known} and not pool.lost
        x = items(1)[0]
        right(x, pool(x))
        right(x, pool.run_flat([x])[0])
        right(x, pool.methods["forward"](x))
for device in known:
    with lapilli.load(path, device.uuid) as program, lapilli.load(path, [device.index]) as pool:
        assert program.device.uuid == device.uuid == pool.devices[0].uuid

    for text in (device.uuid, device.uuid.upper()):
        os.environ["LAPILLI_DEVICE"] = text
        with lapilli.load(path) as program:
            assert program.device.uuid == device.uuid
del os.environ["LAPILLI_DEVICE"]

with lapilli.load(path, device="all") as pool:
    given = items(300)
    results = list(pool.map(given))  # in order
    assert len(results) == 300
    for x, y in zip(given, results): right(x, y)

    # the inputs may change after submit
    x = np.ones((4, 3), np.float32)
    futures = []
    for k in range(50):
        x[:] = k
        futures.append((k, pool.submit(x)))
    for k, future in futures: right(np.full((4, 3), k, np.float32), future.result())

    # threads
    failed = []
    def work():
        try:
            for x in items(40): right(x, pool(x))
        except BaseException as error: failed.append(error)
    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not failed, failed

    # one that fails, among others: by its form at once, at its place in a map
    bad = items(9)
    bad[4] = bad[4].astype(np.float64)
    bad[7] = np.ones((17, 3), np.float32)
    results = list(pool.map(bad, on_error="return"))
    assert [k for k, r in enumerate(results) if isinstance(r, lapilli.InvalidInputError)] == [4, 7]
    for k in (0, 1, 2, 3, 5, 6, 8): right(bad[k], results[k])

    # torch tensors
    import torch
    x = torch.rand(4, 3)
    assert isinstance(pool(x), torch.Tensor)
    right(x.numpy(), pool.submit(x).result().numpy())

# closing while runs are in flight: they end, and keep their results
pool = lapilli.load(path, device="all")
given = items(60)
futures = [pool.submit(x) for x in given]
pool.close(); pool.close()
for x, future in zip(given, futures): right(x, future.result(0))
for use in (lambda: pool(given[0]), lambda: pool.submit(given[0]), lambda: next(pool.map(given))):
    try: use()
    except lapilli.InvalidInputError as error: assert "closed" in str(error)
    else: raise AssertionError

# closing under a map
pool = lapilli.load(path, device="all")
results = pool.map(iter(given), in_flight=4)
seen = [next(results)]
pool.close()
try:
    for y in results: seen.append(y)
except lapilli.InvalidInputError: pass
assert len(seen) == 4
for x, y in zip(given, seen): right(x, y)

# a pool that is dropped ends, after the runs that somebody still waits for
before = threading.active_count()
pool = lapilli.load(path, device="all")
future = pool.submit(given[0])
gone = weakref.ref(pool.programs[0])
del pool
right(given[0], future.result())
del future
for _ in range(200):
    gc.collect()
    if gone() is None and threading.active_count() <= before: break
    time.sleep(0.02)
assert gone() is None and threading.active_count() <= before

# a child of a process that has a pool
pool = lapilli.load(path, device="all")
child = os.fork()
if child == 0:
    try: pool(given[0])
    except lapilli.DeviceLostError: os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
right(given[0], pool(given[0]))
print("good")  # and the process ends with an open pool
"""
    )
    assert several_devices.run(script, str(scaled)) == "good\n"


@FAULTS
def test_a_lost_device_is_taken_out(scaled: Path) -> None:
    script = (
        HEAD
        + """
pool = lapilli.load(path, device="all")
given = items(200)
for x, y in zip(given, pool.map(given)): right(x, y)
results = pool.map(given)
seen = [next(results) for _ in range(20)]
name = pool.programs[1].device.name
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    several_devices.lose(pool.programs[1], given[0])  # from here on: items are in flight
    seen += list(results)
    futures = [pool.submit(x) for x in given]
    for x, future in zip(given, futures): right(x, future.result())
for x, y in zip(given, seen): right(x, y)
assert len(seen) == 200
told = [str(w.message) for w in told if issubclass(w.category, RuntimeWarning)]
assert len(told) == 1 and name in told[0] and "1 of 2 left" in told[0], told
assert [d.name for d in pool.lost] == [name] and len(pool.devices) == 1, pool
right(given[0], pool(given[0]))

several_devices.lose(pool.programs[0], given[0])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for use in (lambda: pool(given[0]), lambda: pool.submit(given[0]), lambda: list(pool.map(given))):
        try: use()
        except lapilli.DeviceLostError as error: assert "load it again" in str(error) or "lost" in str(error)
        else: raise AssertionError
pool.close()
with lapilli.load(path, device="all") as pool:  # on the devices anew
    assert len(pool.devices) == 2
    for x, y in zip(given, pool.map(given)): right(x, y)
print("good")
"""
    )
    assert several_devices.run(script, str(scaled), faults=True) == "good\n"


@TWO
def test_an_endless_generator_takes_little_memory(tmp_path: Path) -> None:
    """Half a gigabyte of items of 4 MB through two devices; what they take is that of some tens."""
    path = tmp_path / "wide.lap"
    path.write_bytes(tiny.scales(np.ones(1 << 20, np.float32), rows=1))
    script = """
import itertools, resource, sys
import numpy as np, lapilli

def endless():
    while True:
        yield np.ones((1, 1 << 20), np.float32)

with lapilli.load(sys.argv[1], device="all") as pool:
    results = pool.map(endless())
    for y in itertools.islice(results, 20): pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for y in itertools.islice(results, 108): assert y[0, -1] == 1
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 32 << 10, (before, after)
    results.close()
print("good")
"""
    assert several_devices.run(script, str(path)) == "good\n"


def test_one_device_maps_too(scaled: Path, weights: np.ndarray) -> None:
    items = [np.full((1 + k % 16, 3), k, np.float32) for k in range(40)]
    with lapilli.load(scaled) as program:
        for in_flight in (1, 2, 7, 100):
            results = list(program.map(iter(items), in_flight))
            for x, y in zip(items, results, strict=True):
                np.testing.assert_array_equal(y, x * weights * weights)
        assert list(program.map([])) == []


def test_wrong_devices(scaled: Path) -> None:
    cases: list[tuple[list[str | int], type[Exception], str]] = [
        ([], InvalidInputError, 'give "all", or a list'),
        ([0, 0], InvalidInputError, "names a device twice"),
        ([0, "voodoo"], NoDeviceError, "voodoo"),
    ]
    for wanted, error, message in cases:
        with pytest.raises(error, match=message):
            lapilli.load(scaled, device=wanted)


def test_a_program_with_states_is_for_one_device(tmp_path: Path) -> None:
    import torch

    class Counts(torch.nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    path = tmp_path / "counts.lap"
    lapilli.compile(Counts(), (torch.ones(2),)).save(path)
    before = threading.active_count()
    with pytest.raises(InvalidInputError, match=r"keeps count on its device.*without states"):
        lapilli.load(path, device=[0])
    assert threading.active_count() <= before and os.path.exists(path)
