"""Streams: runs on device memory, in order; see native/tests/test_stream.cpp for what the library does below."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray

from lapilli import errors
from lapilli.compiler import compile_to_bytes
from lapilli.player import NativeProgram
from lapilli.stream import Buffer, Stream

Floats = NDArray[np.float32]
N = 128


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture(scope="module")
def scaled() -> NativeProgram:
    """y = x * [1, 2] ** 2; x float32 (N, 2), N from 1 to 4096."""
    return NativeProgram.load(tiny.scales(np.array([1, 2], np.float32), high=4096), cache_dir="")


def compiled(module: torch.nn.Module, *args: torch.Tensor, dynamic: bool = False) -> NativeProgram:
    shapes = [{0: torch.export.Dim("n", min=1, max=1 << 20)} for _ in args] if dynamic else None
    return NativeProgram.load(compile_to_bytes(module, args, dynamic_shapes=shapes), cache_dir="")


def put(stream: Stream, array: NDArray[np.generic]) -> Buffer:
    buffer = stream.allocate(array.nbytes)
    buffer.write(0, array)
    return buffer


def get(buffer: Buffer, dtype: Any = np.float32, offset: int = 0, size: int | None = None) -> NDArray[Any]:
    return np.frombuffer(buffer.read(offset, buffer.bytes - offset if size is None else size), dtype)


def floats(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def in_threads(work: Callable[[int], None]) -> None:
    """Four threads at once, each with its number."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_runs(stream: Stream, scaled: NativeProgram) -> None:
    for rows in (1, 7, 4096, 7):
        x = floats(2 * rows)
        source, target = put(stream, x), stream.allocate(x.nbytes)
        stream.enqueue(scaled, 0, [rows], [(source, 0)], [(target, 0)])
        assert np.array_equal(get(target), (x.reshape(-1, 2) * [1, 4]).astype(np.float32).ravel())


class Affine(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 0.5 + b


def test_random_orders(stream: Stream) -> None:
    """Runs, copies, fills and writes on slices of a few buffers, also in place, against the same in NumPy."""
    program = compiled(Affine(), torch.zeros(N), torch.zeros(N), dynamic=True)
    launch = stream.launch(program, 0, 1, 2, 1)
    draw = random.Random(5)
    step = max(stream.alignment, 4 * N)
    host = [floats(3 * step // 4, seed) for seed in range(4)]
    device = [put(stream, x) for x in host]
    for _ in range(600):
        (a, i), (b, j), (c, k) = ((draw.randrange(4), draw.randrange(3)) for _ in range(3))
        x, y, z = (host[m][p * step // 4 :][:N] for m, p in ((a, i), (b, j), (c, k)))
        match draw.randrange(8):
            case 0 if (a, i) != (c, k):
                stream.copy((device[a], i * step), (device[c], k * step), 4 * N)
                z[:] = x
            case 1:
                stream.fill((device[c], k * step), 4 * N, 0x40000000)
                z[:] = 2
            case 2:
                new = floats(N, draw.randrange(1000))
                device[c].write(k * step, new)
                z[:] = new
            case 3 if draw.randrange(10) == 0:
                assert np.array_equal(get(device[c]), host[c])
            case _:
                launch(N, device[a].address, i * step, device[b].address, j * step, device[c].address, k * step)
                z[:] = x * np.float32(0.5) + y
    for buffer, expected in zip(device, host, strict=True):
        np.testing.assert_allclose(get(buffer), expected, rtol=1e-5, atol=1e-6)


class Compare(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x > 0, torch.softmax(x.view(1, -1), 1)


def test_a_last_word_leaves_what_follows_it(stream: Stream) -> None:
    """Kernels write bytes by words: five booleans in the midst of a buffer must not touch the sixth byte."""
    x = np.array([1, -1, 2, -2, 3], np.float32)
    program = compiled(Compare(), torch.zeros(5))
    source, soft = put(stream, x), stream.allocate(20)
    target = put(stream, np.full(stream.alignment + 8, 7, np.uint8))
    stream.enqueue(program, 0, [], [(source, 0)], [(target, stream.alignment), (soft, 0)])
    expected = np.full(stream.alignment + 8, 7, np.uint8)
    expected[stream.alignment : stream.alignment + 5] = x > 0
    assert np.array_equal(get(target, np.uint8), expected)
    np.testing.assert_allclose(get(soft), torch.softmax(torch.from_numpy(x), 0).numpy(), rtol=1e-5)


class Reused(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2 + y, torch.cumsum(x, 0)  # several kernels; x is read after the first output may be written


def test_outputs_in_the_memory_of_inputs(stream: Stream) -> None:
    """Whatever overlaps: the results are as if all inputs had been read first."""
    count, step = 3 * stream.alignment // 4, stream.alignment
    programs = {
        static: compiled(Reused(), torch.zeros(count), torch.zeros(1 if static else count)) for static in (0, 1)
    }
    draw = random.Random(1)
    for _ in range(60):
        broadcast = draw.randrange(2)
        whole = floats(6 * step // 4, draw.randrange(1000))
        buffer, other = put(stream, whole), stream.allocate(4 * count)
        places = [draw.randrange(4) * step for _ in range(3)]
        x, y = (whole[place // 4 :][:n] for place, n in zip(places, (count, 1 if broadcast else count), strict=False))
        outputs = [(buffer, places[2]), (other, 0)]
        stream.enqueue(programs[broadcast], 0, [], [(buffer, places[0]), (buffer, places[1])], outputs)
        first, second = x * 2 + y, np.cumsum(x)
        whole[places[2] // 4 :][:count] = first
        np.testing.assert_allclose(get(buffer), whole, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(get(other), second, rtol=1e-4, atol=1e-4)


class Several(torch.nn.Module):
    """Kernels that share an arena, and one that reads through what others wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.softmax(self.first(x), 1)) + x


def test_constants_arenas_and_garbage(stream: Stream) -> None:
    """What was in the memory before, NaN here, does not matter; nor does it whether an output is an input."""
    torch.manual_seed(1)
    model = Several()
    program = compiled(model, torch.zeros(4, 16), dynamic=True)
    stream.fill((stream.allocate(1 << 20), 0), 1 << 20, 0x7FC00000)
    for rows in (1, 3, 64, 200):
        x = torch.randn(rows, 16)
        expected = model(x).detach().numpy().ravel()
        place = put(stream, x.numpy())
        other = stream.allocate(x.nbytes)
        stream.enqueue(program, 0, [rows], [(place, 0)], [(other, 0)])
        np.testing.assert_allclose(get(other), expected, rtol=1e-4, atol=1e-5)


class Total(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return self.total * 2


def test_states_follow_the_stream(stream: Stream) -> None:
    program = compiled(Total(), torch.zeros(4))
    x, y = put(stream, np.ones(4, np.float32)), stream.allocate(16)
    for _ in range(3):
        stream.enqueue(program, 0, [], [(x, 0)], [(y, 0)])
    assert np.array_equal(program.read_state(0), np.full(4, 3, np.float32))
    assert np.array_equal(program.run([np.ones(4, np.float32)])[0], np.full(4, 8, np.float32))
    stream.enqueue(program, 0, [], [(x, 0)], [(y, 0)])
    assert np.array_equal(get(y), np.full(4, 10, np.float32))


def test_programs_and_buffers_may_go_at_once(stream: Stream) -> None:
    result = put(stream, np.zeros(2, np.float32))
    for _ in range(20):
        program = NativeProgram.load(tiny.scales(np.array([1, 2], np.float32)), cache_dir="")
        stream.enqueue(program, 0, [1], [(put(stream, np.ones(2, np.float32)), 0)], [(result, 0)])
        program.close()
    assert np.array_equal(get(result), [1, 4])


def test_memory_is_cached_and_given_back(stream: Stream) -> None:
    assert stream.memory().reserved == 0
    for _ in range(10):
        stream.allocate(5 << 20)
    memory = stream.memory()
    assert memory.allocated == 0
    assert 5 << 20 <= memory.peak_allocated < 6 << 20 <= memory.reserved
    assert memory.allocations == 1
    stream.reset_peak_memory()
    stream.empty_cache()
    assert stream.memory() == type(memory)(0, 0, 0, 0, 0)


def test_a_memory_limit(stream: Stream) -> None:
    stream.set_memory_limit(16 << 20)
    kept = stream.allocate(10 << 20)
    with pytest.raises(errors.OutOfMemoryError, match=r"for 8.0 MiB: 10.0 MiB are in use.* the limit .* is 16.0 MiB"):
        stream.allocate(8 << 20)
    del kept
    gc.collect()
    assert stream.allocate(8 << 20).bytes == 8 << 20
    stream.set_memory_limit(None)
    assert stream.memory().limit == 0
    with pytest.raises(errors.OutOfMemoryError, match="allows"):
        stream.allocate(1 << 50)


def test_large_copies(stream: Stream) -> None:
    x = floats(10_000_019)
    source, target = stream.allocate(x.nbytes), stream.allocate(x.nbytes)
    source.write(0, x)
    stream.copy((source, 0), (target, 0), x.nbytes)
    source.write(0, np.zeros_like(x))  # what was copied stays
    y = np.empty_like(x)
    assert target.read(0, y) is y
    assert np.array_equal(x, y)
    assert np.array_equal(get(target, offset=400, size=40), x[100:110])


def test_threads(stream: Stream, scaled: NativeProgram) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        x = floats(2 * 50, number)
        launch = stream.launch(scaled, 0, 1, 1, 1)
        for _ in range(100):
            source, target = put(stream, x), stream.allocate(x.nbytes)
            launch(50, source.address, 0, target.address, 0)
            if not np.array_equal(get(target), (x.reshape(-1, 2) * [1, 4]).astype(np.float32).ravel()):
                wrong.append(number)

    in_threads(work)
    assert not wrong
    stream.synchronize()


def test_a_launch_with_new_memory(stream: Stream, scaled: NativeProgram) -> None:
    x = floats(2 * 50)
    source = put(stream, x)
    words, launch = stream.launch_new(scaled, 0, [50], 1, x.nbytes)
    expected = (x.reshape(-1, 2) * [1, 4]).astype(np.float32).ravel()
    kept = launch([*words, source.address, 0])
    result = launch([*words, source.address, 0])
    assert result.bytes == x.nbytes
    before = stream.memory().allocated
    for _ in range(300):  # the memory of each result but the last is free for the next but one
        result = launch([*words, source.address, 0])
    assert stream.memory().allocated == before
    assert np.array_equal(get(kept), expected)
    assert np.array_equal(get(result), expected)
    with pytest.raises(errors.InvalidInputError, match="begins at byte 8"):
        launch([*words, source.address, 8])
    assert stream.memory().allocated == before  # of a refused run nothing stays
    stream.empty_cache()
    stream.set_memory_limit(stream.memory().reserved)
    held = []
    with pytest.raises(errors.OutOfMemoryError, match="the limit that was set"):
        for _ in range(1 << 16):
            held.append(launch([*words, source.address, 0]))
    held.clear()
    assert np.array_equal(get(launch([*words, source.address, 0])), expected)


def test_freed_memory_is_counted_and_used_first(stream: Stream) -> None:
    stream.set_memory_limit(64 << 20)
    for _ in range(3):
        held = [stream.allocate(15 << 20) for _ in range(4)]
        assert stream.memory().allocated >= 60 << 20
        held.clear()
        assert stream.memory().allocated == 0


def test_threads_with_new_memory(stream: Stream, scaled: NativeProgram) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        x = floats(2 * 50, number)
        source = put(stream, x)
        words, launch = stream.launch_new(scaled, 0, [50], 1, x.nbytes)
        for i in range(300):
            result = launch([*words, source.address, 0])
            expected = (x.reshape(-1, 2) * [1, 4]).astype(np.float32).ravel()
            if i % 10 == 0 and not np.array_equal(get(result), expected):
                wrong.append(number)

    in_threads(work)
    assert not wrong
    gc.collect()
    assert stream.memory().allocated == 0


def test_refused(stream: Stream, scaled: NativeProgram) -> None:
    x, y = stream.allocate(1024), stream.allocate(1024)
    run = stream.enqueue
    with pytest.raises(errors.InvalidInputError, match=rf"begins at byte 8 .* multiples of {stream.alignment}"):
        run(scaled, 0, [2], [(x, 8)], [(y, 0)])
    with pytest.raises(errors.InvalidInputError, match="takes 1032 bytes, and the buffer has 1024"):
        run(scaled, 0, [129], [(x, 0)], [(y, 0)])
    with pytest.raises(errors.InvalidInputError, match="has 1 inputs and 1 outputs, and 2 and 1 were given"):
        run(scaled, 0, [2], [(x, 0), (x, 0)], [(y, 0)])
    with pytest.raises(errors.InvalidInputError, match=r"Symbol N .* is 5000, and the method takes 1\.\.4096"):
        run(scaled, 0, [5000], [(x, 0)], [(y, 0)])
    with pytest.raises(errors.InvalidInputError, match="no method 3"):
        run(scaled, 3, [2], [(x, 0)], [(y, 0)])
    with pytest.raises(errors.InvalidInputError, match="not a buffer of this stream"):
        run(scaled, 0, [2], [(x, 0)], [(Stream().allocate(1024), 0)])
    with pytest.raises(errors.InvalidInputError, match="Bytes 1020 to 1028 were asked for of a buffer of 1024"):
        x.write(1020, b"12345678")
    with pytest.raises(errors.InvalidInputError, match="overlap"):
        stream.copy((x, 0), (x, 4), 8)
    with pytest.raises(errors.InvalidInputError, match="words of 4 bytes"):
        stream.fill((x, 0), 3, 0)
    with pytest.raises(errors.NoDeviceError, match="no such device"):
        Stream("no such device")
