"""Written kernels, the compiler, and its cache."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import Function
from plans import plan
from torch import nn

from lapilli.codegen import build as building
from lapilli.codegen import slang
from lapilli.codegen.emit import Emitter, KernelBuilder, literal, stored_as
from lapilli.codegen.kernel import MAX_GROUPS, KernelSource, linear_groups
from lapilli.codegen.select import schedule_of, write_all
from lapilli.codegen.spirv import strip
from lapilli.errors import CompileError
from lapilli.ir import expr
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import const, load, unary
from lapilli.ir.integer import as_int, symbol
from lapilli.ir.narrow import OPERATIONS
from lapilli.ir.node import Graph, Input, Map, Node
from lapilli.ir.scalar import OPS
from lapilli.schedule.layout import Layout
from lapilli.target import ANY, CPU, CPU_HALF, GPU, Target

KERNEL = """[[vk::binding(0, 0)]] RWStructuredBuffer<float> b;
[shader("compute")]
[numthreads(64, 1, 1)]
void main(uint3 id : SV_DispatchThreadID) {{ b[id.x] = {}; }}
"""


def written(
    f: nn.Module | Callable[..., Any], *args: torch.Tensor, target: Target = ANY, dynamic: Any = None
) -> list[KernelSource]:
    s = plan(f, *args, target=target, dynamic=dynamic)
    kernels = write_all(s)
    return [kernels[t.out.id] for t in s.order.run]


# -- generated kernels


def test_four_elements_an_invocation_where_that_is_possible() -> None:
    (wide,) = written(lambda x: x + 1, torch.randn(4, 8))
    assert "float4" in wide.source and wide.groups[0] == 1
    (narrow,) = written(lambda x: x + 1, torch.randn(5, 7))
    assert "float4" not in narrow.source


def test_vectors_over_the_channels_of_a_broadcast() -> None:
    (kernel,) = written(lambda x, y: x * y, torch.randn(3, 8), torch.randn(8))
    assert kernel.source.count("StructuredBuffer<float4>") == 3


def test_a_transposed_read_is_no_vector_but_right() -> None:
    (kernel,) = written(lambda x: x.t() + 1, torch.randn(8, 12))
    assert "StructuredBuffer<float>" in kernel.source


def test_sizes_of_dynamic_dimensions_are_parameters() -> None:
    fixed = written(lambda x: x * 2, torch.randn(3, 8))[0]
    moving = written(lambda x: x * 2, torch.randn(3, 8), dynamic=(({0: torch.export.Dim("n", min=1, max=9)},),))[0]
    assert not fixed.params and moving.params
    assert "uniform Params" in moving.source


def test_a_device_without_16_bit_types_packs_halves_into_words() -> None:
    (poor,) = written(lambda x: x + 1, torch.randn(8).half(), target=ANY)
    assert "uint" in poor.source and "half" not in poor.source.replace("half_", "")
    (rich,) = written(lambda x: x + 1, torch.randn(8).half(), target=CPU_HALF)
    assert "half" in rich.source


@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16])
def test_what_lies_in_16_bits_is_not_rounded_to_them(dtype: DType) -> None:
    x, sums = Node((as_int(8),), dtype, "x"), Node((as_int(8),), dtype, "sums")
    (axis,), (i,) = fresh_axes(x.shape)
    layouts = {n.id: Layout.of(n.shape, range(1)) for n in (x, sums)}
    e = Emitter(KernelBuilder(layouts, half=True), {axis: "i"}, None, {sums.id: "sum"})
    narrowing = OPERATIONS[dtype]
    for loaded, is_rounded in ((load(x, (i,)), False), (load(sums, (i,)), True), (load(x, (i,)) + const(1.0), True)):
        before = len(e.lines)
        e.value(unary(narrowing, loaded))
        assert any(narrowing in line for line in e.lines[before:]) == is_rounded, loaded


def test_what_follows_a_product_of_a_few_rows_is_read_before_it() -> None:
    w, angles = torch.randn(16, 64), torch.randn(7, 16)

    def f(x: torch.Tensor, residual: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, w) * angles[position] + residual

    (kernel,) = written(f, torch.randn(1, 64), torch.randn(1, 16), torch.tensor([3]), target=GPU)
    assert kernel.name == "few_rows"
    end = kernel.source.split("struct E : IEnds")[1].split("};")
    read, store = (
        "".join(end).split("static uint words")[0],
        "".join(end).split("static void store")[1].split("struct ")[0],
    )
    buffers = {f"b{k}" for k, b in enumerate(kernel.bindings) if isinstance(b.node, Input) and b.node.index > 0}
    assert len(buffers) == 2 and all(f"{b}[" in read and f"{b}[" not in store for b in buffers)
    assert store.count("known.v") == 2  # an angle and the residual: the position is no longer needed


def test_texel_buffers_are_for_reading_on_drivers_of_type_cpu() -> None:
    (cpu,) = written(lambda x: x + 1, torch.randn(8), target=CPU)
    assert [b.texel for b in cpu.bindings if not b.written] == [True]
    (gpu,) = written(lambda x: x + 1, torch.randn(8), target=GPU)
    assert not any(b.texel for b in gpu.bindings)


def test_no_barriers_and_no_shared_memory_on_drivers_of_type_cpu() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 5), nn.Softmax(-1)
    )
    for target in (CPU, ANY):
        for kernel in written(model, torch.randn(1, 8, 8, 8), target=target):
            assert "groupshared" not in kernel.source and not kernel.shared


def test_parameters_fit_the_smallest_block() -> None:
    """128 bytes, on every device."""
    model = nn.Sequential(nn.Conv2d(6, 9, (3, 2), stride=2, padding=1, dilation=2, groups=3), nn.ReLU(), nn.Flatten())
    shapes = ({0: torch.export.Dim("n", min=1, max=9)},)
    for target in (ANY, CPU, GPU):
        for kernel in written(model, torch.randn(2, 6, 12, 12), target=target, dynamic=shapes):
            assert len(kernel.params) <= 32


@pytest.mark.parametrize("count", [1, 255, 256, 257, MAX_GROUPS * 256, MAX_GROUPS * 256 + 1, 10**8])
def test_groups_cover_all_elements_within_limits(count: int) -> None:
    groups, _ = linear_groups(as_int(count), 256)
    x, y, z = (g.value or 0 for g in groups)
    assert max(x, y, z) <= MAX_GROUPS
    assert x * y * z * 256 >= count


def test_groups_of_dynamic_sizes() -> None:
    n = symbol("n", 1, 10**6)
    (x, y, _), text = linear_groups(n * 100, 256)
    assert "gid.y" in text
    (atom,) = n.atoms()
    for size in (1, 10**6):
        assert x.evaluate({atom: size}) * y.evaluate({atom: size}) * 256 >= size * 100


def test_literals() -> None:
    assert literal(float("inf"), DType.float32) == "asfloat(0x7f800000)"
    assert literal(float("-inf"), DType.float32) == "asfloat(0xff800000)"
    assert literal(float("nan"), DType.float32) == "asfloat(0x7fc00000)"
    assert literal(-(2**31), DType.int32) == "(-2147483647 - 1)"
    assert literal(True, DType.bool) == "true"
    assert float(literal(0.1, DType.float32).rstrip("f")) == 0.1
    assert stored_as(DType.int64, True) == "int2" and stored_as(DType.float16, False) == "uint"


# -- the compiler and its cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def test_errors_of_the_compiler_carry_its_message() -> None:
    with pytest.raises(CompileError, match="nonsense"):
        slang.compile(KERNEL.format("nonsense"))


def test_code_is_stripped_of_names() -> None:
    code = slang.compile(KERNEL.format("1.0f"))
    words = struct.unpack(f"<{len(code) // 4}I", code)
    assert words[0] == 0x07230203
    assert strip(code) == code  # nothing is left to strip
    assert b"DispatchThreadID" not in code


COPIES = """
struct Inner { float4 a; int n[3]; }
struct Outer { Inner inner; float b; }
[[vk::push_constant]] ConstantBuffer<Outer> push;
[[vk::binding(0, 0)]] RWStructuredBuffer<float> b;
groupshared float shared[64];
[shader("compute")] [numthreads(64, 1, 1)]
void main(uint3 id : SV_DispatchThreadID)
{
    Outer all = push;
    all.inner.n[id.x % 3] += 1;
    shared[id.x % 64] = all.b + all.inner.a[id.x % 4];
    GroupMemoryBarrierWithGroupSync();
    b[id.x] = shared[63 - id.x % 64] + all.inner.n[id.x % 3];
}
"""


def instructions(code: bytes) -> list[list[int]]:
    words, found, at = struct.unpack(f"<{len(code) // 4}I", code), [], 5
    while at < len(words):
        length = words[at] >> 16
        found.append([words[at] & 0xFFFF, *words[at + 1 : at + length]])
        at += length
    return found


def test_kernels_are_spirv_1_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Vulkan 1.1, that is. Slang's own are 1.5, with variables at the entry point and copies that 1.3 does not know."""
    with monkeypatch.context() as patch:
        patch.setattr(slang, "strip", lambda code: code)
        before = slang.compile(COPIES)
    code = slang.compile(COPIES)
    assert (before[4:8], code[4:8]) == (b"\0\5\1\0", b"\0\3\1\0")
    copy, entry, variable = 400, 15, 59
    assert any(i[0] == copy for i in instructions(before))
    after = instructions(code)
    assert not any(i[0] == copy for i in after)
    classes = {i[2]: i[3] for i in after if i[0] == variable}
    listed = next(i for i in after if i[0] == entry)[5:]  # "main" has two words
    assert set(listed) == {v for v, where in classes.items() if where in (1, 3)}
    assert {4, 9, 12} <= set(classes.values())  # shared memory, push constants, a buffer
    results = [i[2] for i in after if i[0] in (61, 80, 81)]
    assert len(results) == len(set(results))
    assert max(results) < struct.unpack("<5I", code[:20])[3]


BRANCHES = (247, 250, 251)  # OpSelectionMerge, OpBranchConditional, OpSwitch


@pytest.mark.parametrize(
    "value",
    ["float(floordiv(int(x), 3))", "float(floormod(int(x), 3))", "float(floordiv_any(vector<int, 2>(x), vector<int, 2>(3))[0])",
     "float(mod_any(vector<int, 2>(x), vector<int, 2>(3))[0])", "erf1(x)", "exp1(x)", "log1(x)", "expm1_1(x)", "log1p_1(x)",
     "tanh_any(vector<float, 4>(x))[0]"],
)  # fmt: skip
def test_indices_and_activations_have_no_branches(value: str) -> None:
    """SwiftShader looks at every path through the branches of a loop: with 30 of them it compiles for hours."""
    source = "import lapilli_math;\n" + KERNEL.format(value).replace("{ b", "{ float x = b[id.x]; b")
    words = np.frombuffer(slang.compile(source), np.uint32)[5:]
    at, opcodes = 0, []
    while at < len(words):
        opcodes.append(int(words[at] & 0xFFFF))
        at += int(words[at] >> 16)
    assert not set(opcodes) & set(BRANCHES)


def test_a_kernel_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = KERNEL.format("2.0f")
    first = building.build([source, source])
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(slang, "compile", lambda s: pytest.fail("compiled again"))
    assert building.build([source]) == first


def test_a_damaged_cache_entry_is_made_again(cache: Path) -> None:
    source = KERNEL.format("3.0f")
    good = building.build([source])[source]
    (entry,) = cache.iterdir()
    for bad in (b"", good[: len(good) // 2], b"x" * len(good), good[:-4] + b"\0\0\0\0"):
        entry.write_bytes(bad)
        assert building.build([source])[source] == good
        assert building.build([source])[source] == good


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "file"))
    source = KERNEL.format("4.0f")
    assert building.build([source])[source]


def test_progress_counts_every_kernel(cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    building.build([KERNEL.format(f"{n}.5f") for n in range(3)], lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 3) and seen[-1] == (3, 3)


def test_several_compiler_processes_make_the_same_code(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [KERNEL.format(f"{n}.25f") for n in range(6)]
    alone = {s: slang.compile(s) for s in sources}
    monkeypatch.setattr(building, "_PARALLEL", 2)
    monkeypatch.setattr(building.os, "cpu_count", lambda: 2)  # type: ignore[attr-defined]
    assert building.build(sources) == alone


def test_an_error_in_another_process_arrives(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_PARALLEL", 1)
    monkeypatch.setattr(building.os, "cpu_count", lambda: 2)  # type: ignore[attr-defined]
    with pytest.raises(CompileError, match="nonsense"):
        building.build([KERNEL.format("1.75f"), KERNEL.format("nonsense"), KERNEL.format("2.75f")])


def test_kernels_are_compiled_while_others_are_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_PARALLEL", 1)
    monkeypatch.setattr(building, "_processors", lambda: 2)
    sources = [KERNEL.format(f"{n}.125f") for n in range(5)]
    seen: list[tuple[int, int]] = []
    with building.Builder() as builder:
        builder.add(sources[:1])
        assert not builder._workers, "one kernel pays no process"
        builder.add(sources[:3])
        assert len(builder._workers) == 2
        made = builder._made.get(timeout=60)  # before all are known
        builder._made.put(made)
        builder.add(sources[2:])
        found = builder.finish(lambda done, total: seen.append((done, total)))
    assert list(found) == sources, "in the order in which they were given"
    assert found == {s: slang.compile(s) for s in sources}
    assert seen == [(n, 5) for n in range(6)]
    assert all(w.process.poll() is not None and not w.thread.is_alive() for w in builder._workers)


def test_no_process_outlives_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_PARALLEL", 1)
    monkeypatch.setattr(building, "_processors", lambda: 2)
    with pytest.raises(ZeroDivisionError), building.Builder() as builder:
        builder.add(KERNEL.format(f"{n}.375f") for n in range(20))
        raise ZeroDivisionError
    assert all(w.process.poll() is not None and not w.thread.is_alive() for w in builder._workers)


def test_a_process_that_dies_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_PARALLEL", 1)
    monkeypatch.setattr(building, "_processors", lambda: 2)
    with building.Builder() as builder:
        builder.add(KERNEL.format(f"{n}.625f") for n in range(20))
        for worker in builder._workers:
            worker.process.kill()
        with pytest.raises(CompileError, match="ended early"):
            builder.finish()


def extended(code: bytes) -> set[int]:
    """The instructions of GLSL.std.450 that a module uses, by their numbers."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    found, at = set(), 5
    while at < len(words):
        if words[at] & 0xFFFF == 12:  # OpExtInst
            found.add(words[at + 4])
        at += words[at] >> 16
    return found


BITS = {"bitnot", "bitand", "bitor", "bitxor", "shl", "shr", "to_uint8", "to_int8", "to_int16"}
"""Operations on integers alone."""


@pytest.mark.part(2)
@pytest.mark.parametrize("count", [7, 8])
def test_operations_on_constants_compile(count: int) -> None:
    """All of them, one element at a time and four: the negative of -0.5 was written as a decrement."""
    sources = []
    for name, operation in OPS.items():
        for value in (-0.5, -np.inf, -5):
            dtype = DType.int32 if isinstance(value, int) else DType.float32
            if dtype is DType.float32 and name in BITS:
                continue
            constant = const(value, dtype)
            given = (const(True), constant, constant) if name == "where" else (constant,) * operation.arity
            body = expr._op(name, operation.result or dtype, *given)
            axes, _ = fresh_axes((as_int(count),))
            graph = Graph([], [Map((as_int(count),), body.dtype, "y", "y", axes=axes, body=body)], {})
            sources += [w.source for w in write_all(schedule_of(graph, ANY)).values()]
    assert len(sources) > 200
    building.build(sources)


@pytest.mark.parametrize("target", [GPU, ANY])
def test_extrema_of_integers_are_selections(target: Target) -> None:
    """Of three integers, NVIDIA's compiler computes SMin and SMax wrongly where one is negated."""
    smin, smax = 39, 42

    def model(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        rows = [(-x).amin(0), (-x).amax(1), (-x[:, :5]).amin(1), (-x.long()).amin(0), (-n).amax(0)]
        three = torch.minimum(torch.minimum(-x, y), -y)
        return [
            *rows,
            three,
            (-x).clamp(-5, 7),
            torch.clamp(-x, y, -y),
            torch.relu(-x[0]),
            nn.functional.pad(-y, (3, 1)).cummax(1)[0],
        ]

    x = torch.arange(96, dtype=torch.int32).reshape(8, 12)
    kernels = written(Function(model), x, x + 1, x.to(torch.int8), target=target)
    code = building.build(k.source for k in kernels)
    for k in kernels:
        assert not extended(code[k.source]) & {smin, smax}, k.source
    again = KERNEL.format("float(min(int(b[1]), -int(b[2])))")
    assert extended(slang.compile(again)) & {smin, smax}, "such instructions are found"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_of_many_kernels() -> None:
    """A session of the compiler keeps what it compiles, a megabyte a kernel: there are new ones."""
    script = """
        from lapilli.codegen import slang
        def megabytes(): return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
        def kernel(n): return f'''import lapilli_math;
            RWStructuredBuffer<float> a;
            [shader("compute")] [numthreads({n}, 1, 1)] void main(uint3 t : SV_DispatchThreadID) {{ a[t.x] *= {n}.5f; }}'''
        for n in range(1, 101): slang.compile(kernel(n))
        before = megabytes()
        for n in range(101, 301): slang.compile(kernel(n))
        assert megabytes() - before < 60, megabytes() - before
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
