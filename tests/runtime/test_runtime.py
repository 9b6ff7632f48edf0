"""Programs on a device: calls, futures, threads, files, memory. On hand-written programs, without the compiler."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray

import lapilli
from lapilli import InvalidInputError, Program
from lapilli.runtime.interface import METADATA_KEY, Interface, dumps
from lapilli.runtime.structure import LEAF, Record, Spec, Structure

pytestmark = pytest.mark.poor_device
Weights = NDArray[np.float32]


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_numpy_in_numpy_out(scaled: Path, weights: Weights, n: int) -> None:
    x = np.random.default_rng(n).random((n, 3), dtype=np.float32)
    with lapilli.load(scaled) as program:
        y = program(x)
        assert isinstance(y, np.ndarray) and y.dtype == np.float32
        np.testing.assert_array_equal(y, x * weights * weights)


def test_a_program_in_memory_that_others_share(scaled: Path, weights: Weights, tmp_path: Path) -> None:
    """A view that cannot be written, as Ray's object store gives it: loaded, described and saved without a copy of it."""
    data = np.memmap(scaled, np.uint8, "r").data
    with Program(data) as program:
        x = np.ones((2, 3), np.float32)
        np.testing.assert_array_equal(program(x), x * weights * weights)
        np.testing.assert_array_equal(program.description.constant(0), weights)
        program.save(tmp_path / "saved.lap")
    assert (tmp_path / "saved.lap").read_bytes() == scaled.read_bytes()


def test_dynamic_sizes_change_from_run_to_run(scaled: Path, weights: Weights) -> None:
    with lapilli.load(scaled) as program:
        for n in (3, 16, 1, 3, 2, 16):
            x = np.full((n, 3), n, np.float32)
            np.testing.assert_array_equal(program(x), x * weights * weights)


def test_torch_in_torch_out(scaled: Path, weights: Weights) -> None:
    torch = pytest.importorskip("torch")
    x = torch.rand(4, 3, requires_grad=True)
    with lapilli.load(scaled) as program:
        y = program(x)
        assert isinstance(y, torch.Tensor) and y.dtype == torch.float32 and not y.requires_grad
        assert torch.equal(y, x.detach() * torch.from_numpy(weights) * torch.from_numpy(weights))


def test_strided_inputs(scaled: Path, weights: Weights) -> None:
    torch = pytest.importorskip("torch")
    wide = np.random.default_rng(0).random((3, 8), dtype=np.float32)
    with lapilli.load(scaled) as program:
        for x in (wide.T, wide.T[::2], wide.T[::-1]):
            np.testing.assert_array_equal(program(x), x * weights * weights)
        np.testing.assert_array_equal(program(torch.from_numpy(wide).T).numpy(), wide.T * weights * weights)
        expanded = torch.ones(1, 3).expand(5, 3)
        np.testing.assert_array_equal(program(expanded).numpy(), np.ones((5, 3)) * weights * weights)


def test_every_dtype_passes_straight_through() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    dtypes = [dtype for dtype in tiny.DTYPES if dtype != "bfloat16"]
    arrays = [rng.integers(0, 2 if dtype == "bool" else 100, 4).astype(dtype) for dtype in dtypes]
    with Program(tiny.copies(*dtypes)) as program:
        for given, out in zip(arrays, program(*arrays), strict=True):
            assert out.dtype == given.dtype
            np.testing.assert_array_equal(out, given)
        for given, out in zip(arrays, program(*map(torch.from_numpy, arrays)), strict=True):
            np.testing.assert_array_equal(out.numpy(), given)
        for large, fits in ((2**31 - 1, True), (-(2**31), True), (2**31, False), (-(2**62) - 1, False)):
            arrays[dtypes.index("int64")] = np.array([-1, 0, large, 1])
            if fits:
                assert program(*arrays)[dtypes.index("int64")].tolist() == [-1, 0, large, 1]
            else:
                with pytest.raises(InvalidInputError, match=f"element 2 is {large}"):
                    program(*arrays)


def test_bfloat16_goes_through_torch_and_not_through_numpy() -> None:
    torch = pytest.importorskip("torch")
    with Program(tiny.copies("bfloat16", "float32")) as program:
        x, f = torch.tensor([1.5, -2, 3, 1e30]).bfloat16(), torch.rand(4)
        out, _ = program(x, f)
        assert out.dtype == torch.bfloat16 and out.tolist() == x.tolist()
        with pytest.raises(
            InvalidInputError, match=r"'x0': bfloat16\[4\] cannot be given as uint16: NumPy has no bfloat16"
        ):
            program(np.zeros(4, np.uint16), f.numpy())
        with pytest.raises(InvalidInputError, match=r"convert it with \.to\(torch\.bfloat16\)"):
            program(torch.rand(4), f)
        with pytest.raises(InvalidInputError, match=r"convert it with \.to\(torch\.float32\)"):
            program(x, x)


def _interface(structure: Structure) -> dict[str, str]:
    return {METADATA_KEY: dumps([Interface("forward", structure, player=0)])}


def test_nested_inputs_and_outputs() -> None:
    args = Spec("tuple", (Spec("dict", (LEAF, LEAF), ("image", "mask")), Spec("none")))
    inputs = Spec("tuple", (args, Spec("dict", (LEAF,), ("scale",))))
    outputs = Spec("tuple", (Spec("record", (LEAF,), ("logits",)), Spec("list", (LEAF, LEAF))))
    metadata = _interface(Structure(inputs, outputs, ("batch", "extra")))
    a, b, c = (np.full(4, i, np.float32) for i in range(3))
    with Program(tiny.copies("float32", "float32", "float32", metadata=metadata)) as program:
        record, (second, third) = program({"mask": b, "image": a}, scale=c)
        assert isinstance(record, Record) and record.logits[0] == 0 and second[0] == 1 and third[0] == 2
        with pytest.raises(InvalidInputError, match="batch has no 'mask'"):
            program({"image": a}, scale=c)
        with pytest.raises(InvalidInputError, match=r"the program takes \(batch, extra, scale=\)"):
            program(a, None, b, scale=c)


def test_wrong_structure_in_the_file_is_refused() -> None:
    with pytest.raises(lapilli.InvalidFileError, match="does not fit"):
        Program(tiny.copies("float32", metadata=_interface(Structure.flat(2, 1))))
    for damage, message in (("[", "is no JSON"), ("[" * 9999, "is no JSON"), ("[]", "no method"), ("[{}]", "damaged")):
        with pytest.raises(lapilli.InvalidFileError, match=message):
            Program(tiny.copies("float32", metadata={METADATA_KEY: damage}))
    gc.collect()


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((17, 3), np.float32), ["16", "17"]),
        (np.zeros((0, 3), np.float32), ["0"]),
        (np.zeros((2, 4), np.float32), ["3", "4"]),
        (np.zeros(3, np.float32), ["2", "1"]),
        (np.zeros((2, 3), np.float64), ["float32", "float64"]),
        (np.zeros((2, 3), np.int64), ["float32", "int64"]),
        (np.zeros((2, 3), ">f4"), [">f4", "another order", "astype('float32')"]),
        (np.zeros((2, 3), np.complex64), ["complex64"]),
        (np.zeros((1,) * 12, np.float32), ["12"]),
        ([[1.0, 2.0, 3.0]], ["list", "NumPy array or a torch tensor"]),
        (None, ["NoneType"]),
    ],
)
def test_wrong_inputs_say_what_is_accepted(scaled: Path, x: object, words: list[str]) -> None:
    with lapilli.load(scaled) as program:
        for call in (program, program.submit):
            with pytest.raises(InvalidInputError) as error:
                call(x)
            for word in words:
                assert word in str(error.value)
        assert program(np.ones((1, 3), np.float32)).shape == (1, 3)  # still usable


def test_a_method_that_there_is_not(scaled: Path) -> None:
    with lapilli.load(scaled) as program:
        with pytest.raises(KeyError, match=r"no method 'backward'; it has 'forward'\."):
            program.methods["backward"]
        assert "backward" not in program.methods and program.methods.get("backward") is None


def test_programs_are_not_pickled(scaled: Path) -> None:
    with lapilli.load(scaled) as program:
        for take in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied. Save it"):
                take(program)


def test_what_is_no_file_is_written_to(tmp_path: Path, scaled: Path) -> None:
    """A device or a pipe takes the bytes, and stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with lapilli.load(scaled) as program:
        program.save(pipe)
        reader.join(timeout=30)
        program.save(os.devnull)
    assert read == [scaled.read_bytes()]
    assert pipe.is_fifo()
    assert Path(os.devnull).is_char_device()


def test_wrong_torch_inputs(scaled: Path) -> None:
    torch = pytest.importorskip("torch")
    with lapilli.load(scaled) as program:
        for tensor, message in (
            (torch.zeros(2, 3).to_sparse(), "sparse"),
            (torch.zeros(2, 3, device="meta"), "on meta; give a tensor on the CPU"),
            (torch.zeros(2, 3, dtype=torch.complex64), "complex64"),
            (torch.zeros(2, 3, dtype=torch.float16), "float16"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                program(tensor)
        with pytest.raises(InvalidInputError, match="2 positional arguments were given"):
            program(torch.zeros(2, 3), torch.zeros(2, 3))


def test_futures(scaled: Path, weights: Weights) -> None:
    with lapilli.load(scaled) as program:
        xs = [np.full((1 + i % 16, 3), i, np.float32) for i in range(40)]
        futures = [program.submit(x) for x in xs]
        for x, future in zip(xs, futures, strict=True):
            np.testing.assert_array_equal(future.result(), x * weights * weights)
            assert future.done() and future.exception() is None
            np.testing.assert_array_equal(future.result(timeout=0), x * weights * weights)


def test_inputs_may_be_changed_after_submit(scaled: Path) -> None:
    with lapilli.load(scaled) as program:
        x = np.ones((2, 3), np.float32)
        future = program.submit(x)
        x[:] = 7
        np.testing.assert_array_equal(future.result(), [[1, 4, 9]] * 2)


def test_a_run_that_takes_time_can_be_waited_for() -> None:
    x = np.arange(tiny.SLOW, dtype=np.int32)
    with Program(tiny.slow(60_000)) as program:
        start = time.perf_counter()
        future = program.submit(x)
        assert time.perf_counter() - start < 0.2
        with pytest.raises(lapilli.RunTimeoutError):
            future.result(timeout=0.01)
        with pytest.raises(TimeoutError):
            future.exception(timeout=0)
        assert not future.done()
        first = future.result()
        assert future.done()
        np.testing.assert_array_equal(program(x), first)


def test_a_program_that_nobody_holds_is_released_at_once(scaled: Path) -> None:
    """Without the search for cyclic garbage, which may come late: a program holds device memory."""
    program = lapilli.load(scaled)
    program.submit(np.ones((1, 3), np.float32)).result()
    loaded = weakref.ref(program._loaded)
    gc.disable()
    try:
        del program
        assert loaded() is None
    finally:
        gc.enable()


def test_results_outlive_the_program(scaled: Path) -> None:
    program = lapilli.load(scaled)
    future = program.submit(np.ones((1, 3), np.float32))
    program.close()
    np.testing.assert_array_equal(future.result(), [[1, 4, 9]])
    program = lapilli.load(scaled)
    future = program.submit(np.ones((1, 3), np.float32))
    del program
    gc.collect()
    np.testing.assert_array_equal(future.result(), [[1, 4, 9]])


def test_closed_program_says_so(scaled: Path) -> None:
    with lapilli.load(scaled) as program:
        pass
    program.close()  # twice is fine
    x = np.ones((1, 3), np.float32)
    for call in (lambda: program(x), lambda: program.submit(x), program.memory, lambda: program.run_flat([x])):
        with pytest.raises(InvalidInputError, match="closed"):
            call()


def test_many_threads_and_programs(scaled: Path, weights: Weights) -> None:
    programs = [lapilli.load(scaled) for _ in range(3)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(30):
                x = rng.random((int(rng.integers(1, 17)), 3), dtype=np.float32)
                program = programs[int(rng.integers(3))]
                y = program(x) if rng.random() < 0.5 else program.submit(x).result()
                if not np.array_equal(y, x * weights * weights):
                    wrong.append((seed, x, y))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for program in programs:
        program.close()
    assert not wrong


def test_closing_while_others_run(scaled: Path) -> None:
    for _ in range(5):
        program = lapilli.load(scaled)
        errors: list[Exception] = []

        def work(program: Program = program, errors: list[Exception] = errors) -> None:
            try:
                for _ in range(200):
                    program(np.ones((2, 3), np.float32))
            except Exception as raised:
                errors.append(raised)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        program.close()
        for thread in threads:
            thread.join()
        assert all(isinstance(error, InvalidInputError) and "closed" in str(error) for error in errors), errors


def test_save_and_load(scaled: Path, tmp_path: Path) -> None:
    x = np.ones((1, 3), np.float32)
    with lapilli.load(scaled) as program:
        program.save(tmp_path / "copy.lap")
        program.save(scaled)  # over itself
    with Program((tmp_path / "copy.lap").read_bytes()) as program:
        program.save(tmp_path / "again.lap")
    assert (tmp_path / "again.lap").read_bytes() == scaled.read_bytes()
    with lapilli.load(str(tmp_path / "again.lap")) as program:
        assert program(x).tolist() == [[1, 4, 9]]


def test_save_leaves_no_part_behind(scaled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target" / "copy.lap"
    with lapilli.load(scaled) as program:
        with pytest.raises(FileNotFoundError):
            program.save(target)
        target.parent.mkdir()
        target.write_bytes(b"older")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                program.save(target)
        assert target.read_bytes() == b"older" and os.listdir(target.parent) == ["copy.lap"]
        scaled.write_bytes(b"something else")
        with pytest.raises(lapilli.ReadError, match="was changed since the program was loaded"):
            program.save(target)
        assert target.read_bytes() == b"older" and os.listdir(target.parent) == ["copy.lap"]


def test_what_a_program_tells(scaled: Path) -> None:
    with lapilli.load(scaled) as program:
        x, y = program.inputs[0], program.outputs[0]
        assert (x.name, x.dtype, x.shape, y.shape) == ("x", "float32", ("N", 3), ("N", 3))
        assert str(x) == "'x': float32[N=1..16, 3]" and x.least_shape() == (1, 3)
        assert program.plan == "tiny" and program.device in lapilli.devices()
        assert program.missing() == {}
        program(np.ones((16, 3), np.float32))
        memory = program.memory()
        assert memory.constants >= 12 and memory.arena >= 16 * 3 * 4 and memory.device_total >= memory.arena
        times = program.load_times()
        assert times.total >= times.pipelines > 0
        profile = program.profile([np.ones((16, 3), np.float32)], repeat=3)
        assert [kernel.label for kernel in profile.kernels] == ["aten.scale", "aten.scale"]
        assert all(
            kernel.seconds > 0 and kernel.flops == 48 and kernel.groups == (1, 1, 1) for kernel in profile.kernels
        )
        assert "float32[N=1..16, 3]" in repr(program)


def test_devices() -> None:
    devices = lapilli.devices()
    assert lapilli.is_available() and devices[0].index == 0
    first = devices[0]
    assert first.type in ("discrete", "integrated", "virtual", "cpu", "other") and first.memory > 0
    assert isinstance(first.features["float16"], bool)


def test_device_is_chosen_by_index_or_name(scaled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = lapilli.devices()[0].name
    for choice in (0, "0", name, name[:6].lower()):
        with lapilli.load(scaled, device=choice) as program:
            assert program.device.name == name
    with pytest.raises(lapilli.NoDeviceError, match="Nonesuch"):
        lapilli.load(scaled, device="Nonesuch")
    monkeypatch.setenv("LAPILLI_DEVICE", "99")
    with pytest.raises(lapilli.NoDeviceError, match="99"):
        lapilli.load(scaled)


def test_memory_is_given_back(scaled: Path) -> None:
    """Loads without closing: collected programs must release what they hold, or the process grows."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def load_some(n: int) -> None:
        for _ in range(n):
            lapilli.load(scaled)(np.ones((16, 3), np.float32))
        gc.collect()

    load_some(10)
    before = resident()
    load_some(40)
    assert resident() - before < 20e6


def test_notebooks_show_a_program(scaled: Path) -> None:
    """A table of what it takes and gives; names of the file are text."""
    with lapilli.load(scaled) as program:
        shown = program._repr_html_()
        for word in ("float32[N=1..16, 3]", "2 kernels of a run", program.device.name.split()[0], "tiny"):
            assert word in shown
    made = tiny.Tiny()
    x, y = made.input("<img src=x>", "float32", (4,)), made.output("y", "float32", (4,))
    made.dispatch("copy", (x, y), made.number(4))
    with Program(made.bytes()) as program:
        assert "<img" not in program._repr_html_() and "&lt;img" in program._repr_html_()


def test_import_needs_no_torch(scaled: Path) -> None:
    """In a process where torch cannot be imported, loading and running work and compiling says what is missing."""
    code = f"""
import sys
for name in ("torch", "slangtorch", "flatbuffers"): sys.modules[name] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("torch", "slangtorch") else find(name, *a)
import numpy as np, lapilli
print(lapilli.load({str(scaled)!r})(np.ones((1, 3), np.float32)).tolist())
try:
    lapilli.compile("model.pt2")
except lapilli.LapilliError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[1.0, 4.0, 9.0]]") and "pip install 'lapilli[compile]'" in done.stdout
