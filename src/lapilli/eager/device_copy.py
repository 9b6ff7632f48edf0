"""Copies between tensors on one device, with any strides and types. Sizes, strides and offsets are symbols of the kernels.

Elements that keep their type are moved as bits, 64-bit words as pairs of 32-bit words: kernels can move even what they
cannot compute with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from lapilli.compiler import assemble_graph, assemble_tasks
from lapilli.eager import device_state, int64_checks, programs, storage
from lapilli.eager.call_signature import CannotRun, describe_operand
from lapilli.errors import NoDeviceError
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, cast_to, load, select, unary
from lapilli.ir.integer import Int, as_int, symbol, total
from lapilli.ir.node import Graph, Input, Map, Node
from lapilli.lower.registry import FROM_TORCH, convert
from lapilli.schedule.task import Task
from lapilli.stream import Slice
from lapilli.target import Target, for_values

ALIGNMENT = 256
"""An alignment, in bytes, that is sufficient for buffer offsets on every device."""

_FLOATS = {torch.float32, torch.bfloat16}  # types of kernels with numbers beyond 32 bits
_BITS = {1: DType.uint8, 2: DType.int16, 4: DType.int32}


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies every element of `source`, of the same shape and on the same device, into `target`, converted to its type.

    Raises CannotRun if the device cannot convert the types.
    """
    if not target.numel() or _again(target, source):
        return
    if source.is_conj() != target.is_conj():
        return _copy_conjugate(target, source)
    if source.is_neg() != target.is_neg():
        return (
            copy(torch._neg_view(target), source)
            if target.is_neg()
            else copy(target, torch.neg(torch._neg_view(source)))
        )
    if target.dtype != source.dtype and (target.is_complex() or source.is_complex()):
        return _copy_parts(target, source)
    if target.dtype is torch.float64 and source.dtype is torch.float32:
        source = _widened(source)
    if source.dtype is torch.int64 and storage.exceeds_int32(source):
        if target.dtype is not torch.int64:
            raise CannotRun(
                "an int64 tensor has values that do not fit into the 32 bits in which the GPU computes them"
            )
        target.untyped_storage()._lapilli_wide = True  # type: ignore[attr-defined]
    if source.dtype is torch.int64 and storage.nearly_exceeds_int32(source) and target.dtype is torch.int64:
        target.untyped_storage()._lapilli_nearly_wide = True  # type: ignore[attr-defined]
    if target.dtype is torch.int64 and source.dtype in _FLOATS and int64_checks.largest(source) > int64_checks.MOST:
        raise CannotRun("it has numbers that do not fit into the 32 bits in which the GPU computes integers")
    if _shares(target, source):
        if target.dtype == source.dtype and _same_place(target, source):
            return
        source = gather(source)
    seen = describe_operand(tuple(target.shape), target.stride(), target.dtype)
    if seen.strided or seen.expanded:
        ready = source.dtype == target.dtype and source.is_contiguous() and is_aligned(source)
        return _scatter(target, source if ready else gather(source, target.dtype))
    if target.dtype == source.dtype and target.stride() == source.stride():
        return _copy_bytes(target, source)
    queued = _gather_into(target, source, seen.order)
    if queued is not None and source.dtype in _SIMPLE and target.dtype in _SIMPLE:
        if len(_queued) >= _MOST:
            _queued.clear()
        _queued[_key(target, source)] = queued


_SIMPLE = {torch.float16, torch.bfloat16, torch.float32}  # nothing has to be checked of their numbers
_MOST = 4096
_Queued = tuple[list[int], Callable[..., None]]
_queued: dict[Any, _Queued] = {}
"""Copies that were queued before: the symbols, and what queues them."""


def _key(target: torch.Tensor, source: torch.Tensor) -> Any:
    return source.dtype, target.dtype, source.shape, source.stride(), target.stride(), source.get_device()


def _again(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Queues a copy like one before, without its checks: autocast converts each weight in each step. False: it is another."""
    found = _queued.get(_key(target, source))
    if found is None or source.is_neg() or target.is_neg():
        return False
    (read, start), (written, place) = slice_of(source), slice_of(target)
    if read is written or start % ALIGNMENT or place % ALIGNMENT:
        return False
    symbols, launch = found
    launch(*symbols, read.address, start, written.address, place)
    return True


def _copy_conjugate(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies if one of both is a lazy conjugate."""
    to, of = (torch.view_as_real(x.conj() if x.is_conj() else x) for x in (target, source))
    copy(to[..., 0], of[..., 0])
    copy(to[..., 1], torch.neg(of[..., 1]))


def _copy_parts(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies between complex and real numbers: a real one is a complex one with an imaginary part of 0, and takes the real
    part of one.
    """
    if not target.is_complex():
        return copy(target, torch.view_as_real(source)[..., 0])
    pairs = torch.view_as_real(target)
    if source.is_complex():
        return copy(pairs, torch.view_as_real(source))
    copy(pairs[..., 0], source)
    copy(pairs[..., 1], torch.zeros((), dtype=pairs.dtype, device=target.device).expand(target.shape))


def _widened(source: torch.Tensor) -> torch.Tensor:
    """float32 as float64, dense, by its bits: sign and mantissa are kept, and the exponent gets another bias."""
    bits = source.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    subnormal = magnitude < 0x00800000
    # A subnormal number is an integer times 2^-149; exponent and mantissa are those of that integer as a float.
    normal = torch.where(subnormal, magnitude.float().view(torch.int32), magnitude)
    exponent = normal >> 23
    exponent = torch.where(exponent == 255, 2047, exponent + torch.where(subnormal, 896 - 149, 896))
    high = torch.where(magnitude == 0, 0, exponent << 20 | (normal & 0x7FFFFF) >> 3).int()
    return torch.stack([normal << 29, high | bits & -(2**31)], -1).view(torch.float64).squeeze(-1)


def gather(source: torch.Tensor, dtype: torch.dtype | None = None, order: Sequence[int] | None = None) -> torch.Tensor:
    """A dense copy with its dimensions in the given order (default: row-major)."""
    shape = tuple(source.shape)
    order = tuple(range(len(shape))) if order is None else tuple(order)
    made = storage.empty(shape, dtype or source.dtype, source.get_device(), dense_strides(shape, order))
    if made.numel():
        _gather_into(made, source, order)
    return made


def aligned(source: torch.Tensor) -> torch.Tensor:
    """A copy with the same sizes and strides at the beginning of a buffer, as a program reads it. A dimension with stride 0
    is stored once.
    """
    made = storage.empty(source.shape, source.dtype, source.get_device(), source.stride())
    if made.numel():
        size = storage.bytes_of(source.shape, source.dtype, source.stride())
        storage.stream_of(source.get_device()).copy(slice_of(source), slice_of(made), size)
    return made


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether kernels can bind the memory from where a tensor begins."""
    return tensor.storage_offset() * tensor.itemsize % storage.stream_of(tensor.get_device()).alignment == 0


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    step = 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage.buffer_of(a) is storage.buffer_of(b)


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.storage_offset() == b.storage_offset() and a.stride() == b.stride()


def slice_of(tensor: torch.Tensor) -> Slice:
    """The position of a tensor: its buffer, and the offset in bytes."""
    return storage.buffer_of(tensor), int(tensor.storage_offset()) * tensor.itemsize


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies between dense tensors of the same layout."""
    stream = storage.stream_of(target.get_device())
    stream.copy(slice_of(source), slice_of(target), target.numel() * target.itemsize)


def _gather_into(target: torch.Tensor, source: torch.Tensor, order: Sequence[int]) -> _Queued | None:
    """Copies to a target that is dense in this order. Returns what queues a copy like this one of tensors that begin at
    multiples of `ALIGNMENT`, if this is one.
    """
    if not is_aligned(target):
        _copy_bytes(target, gather(source, target.dtype, order))
        return None
    kinds = _kinds(source.dtype, target.dtype)
    sizes, strides = _merged(
        [source.shape[d] for d in order], [source.stride(d) for d in order], source.itemsize, kinds[0]
    )
    at, first, span = _place(source, sizes, strides, kinds[0])
    given = (storage.buffer_of(source), at)
    symbols = [*sizes, *strides, first, span]
    launch = _run(target, "gather", kinds, symbols, [given], slice_of(target))
    return (symbols, launch) if first == 0 else None


def _scatter(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies from a row-major source of the same type."""
    kinds = _kinds(source.dtype, target.dtype)
    sizes, strides = _merged(list(target.shape), list(target.stride()), target.itemsize, kinds[1])
    if 0 in strides:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    at, first, span = _place(target, sizes, strides, kinds[1])
    whole = (storage.buffer_of(target), at)
    given = slice_of(source)
    if kinds[1].size >= 4:
        _run(target, "scatter", kinds, [*sizes, *strides, first, span], [given], whole)
        return
    # Devices only store whole words: every word that the target touches is written, with its old bytes where they are kept.
    rows = dense_strides(sizes, range(len(sizes)))
    inwards = sorted(range(len(sizes)), key=lambda d: -strides[d])
    described = [values[d] for values in (sizes, strides, rows) for d in inwards]
    _run(target, "merge", kinds, [*described, first, span, math.prod(sizes)], [given, whole], whole)


def _kinds(source: torch.dtype, target: torch.dtype) -> tuple[DType, DType]:
    """The types in which elements are read and written: bits if they are unchanged."""
    if source == target:
        bits = _BITS[min(source.itemsize, 4)]
        return bits, bits
    for dtype in (source, target):
        if dtype not in FROM_TORCH or dtype is torch.float64:
            raise CannotRun(f"{str(dtype).removeprefix('torch.')} is not supported on the GPU")
    return FROM_TORCH[source], FROM_TORCH[target]


def _merged(sizes: list[int], strides: list[int], itemsize: int, kind: DType) -> tuple[list[int], list[int]]:
    """Sizes and strides with as few dimensions as possible, in elements of `kind`."""
    words = itemsize // kind.size
    if words > 1:
        sizes, strides = [*sizes, words], [*(s * words for s in strides), 1]
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return [size for size, _ in merged], [stride for _, stride in merged]


def _place(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], kind: DType) -> tuple[int, int, int]:
    """The offset in bytes at which the buffer is bound, the index of the first element from there, and the number of
    elements from there to the last.
    """
    offset = int(tensor.storage_offset()) * tensor.itemsize
    at = offset // ALIGNMENT * ALIGNMENT
    first = (offset - at) // kind.size
    return at, first, first + 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))


def _run(
    on: torch.Tensor, what: str, kinds: tuple[DType, DType], symbols: list[int], inputs: list[Slice], output: Slice
) -> Callable[..., None]:
    """Queues a copy. Returns what did."""
    lists = 3 if what == "merge" else 2
    rank = (len(symbols) - 2) // lists
    # The bound memory: the dense side, and the strided one from its first element to its last.
    most = max(math.prod(symbols[:rank]), symbols[lists * rank + 1])
    if max(most, *symbols) >= 2**31:
        raise CannotRun("it has more elements than kernels can count")
    index = on.get_device()
    target = for_values(programs.target_of(index), most * max(kind.size for kind in kinds))
    launch = _launch(index, what, kinds, rank, len(inputs), target)
    try:
        launch(*symbols, *(word for buffer, offset in (*inputs, output) for word in (buffer.address, offset)))
    except NoDeviceError as error:
        raise CannotRun(programs.TOO_LARGE) from error
    return launch


@cache
def _launch(
    index: int, what: str, kinds: tuple[DType, DType], rank: int, inputs: int, target: Target
) -> Callable[..., None]:
    """A function that queues the copy."""
    symbols = rank * (3 if what == "merge" else 2) + (3 if what == "merge" else 2)
    program = programs.load(index, _program(what, kinds, rank, target))
    return storage.stream_of(index).launch(program, 0, symbols, inputs, 1)


@device_state.on_loss.append
def _forget(index: int) -> None:
    _launch.cache_clear()
    _queued.clear()


@cache
def _program(what: str, kinds: tuple[DType, DType], rank: int, target: Target) -> bytes:
    """The program file. Its symbols are in the order of `_run`."""
    write = {"gather": _gather_kernel, "scatter": _scatter_kernel, "merge": _merge_kernel}[what]
    return write(kinds, rank, target)


def _symbols(*names: str) -> dict[str, Int]:
    return {name: symbol(name, 0 if name[0] in "tf" else 1) for name in names}


def _names(rank: int, letters: str) -> list[str]:
    return [f"{letter}{d}" for letter in letters for d in range(rank)]


def _gather_kernel(kinds: tuple[DType, DType], rank: int, target: Target) -> bytes:
    """out[i] = in[first + sum of i * stride]"""
    known = _symbols(*_names(rank, "nt"), "first", "span")
    sizes, strides = [known[f"n{d}"] for d in range(rank)], [known[f"t{d}"] for d in range(rank)]
    source = Input((known["span"],), kinds[0], "source", "input", index=0)
    axes, at = fresh_axes(tuple(sizes))
    place = total([known["first"], *(i * s for i, s in zip(at, strides, strict=True))])
    made = Map(tuple(sizes), kinds[1], "copy", "copy", axes=axes, body=_converted(load(source, [place]), kinds))
    return assemble_graph(Graph([source], [made], known), target)[0]


def _scatter_kernel(kinds: tuple[DType, DType], rank: int, target: Target) -> bytes:
    """out[first + sum of i * stride] = in[i]"""
    known = _symbols(*_names(rank, "nt"), "first", "span")
    sizes, strides = [known[f"n{d}"] for d in range(rank)], [known[f"t{d}"] for d in range(rank)]
    source = Input(tuple(sizes), kinds[0], "source", "input", index=0)
    axes, at = fresh_axes(tuple(sizes))
    place = total([known["first"], *(i * s for i, s in zip(at, strides, strict=True))])
    whole = Node((known["span"],), kinds[1], "target", "copy")
    task = Task(whole, axes, (place,), load(source, at), origins=["copy"], reason="strided in memory")
    return assemble_tasks(Graph([source], [whole], known), [task], target)


def _merge_kernel(kinds: tuple[DType, DType], rank: int, target: Target) -> bytes:
    """The inverse, computed for every element of the target's memory: the element of `in` that belongs there, or the old
    one. Strides descend, and no two elements of the target share memory.
    """
    known = _symbols(*_names(rank, "ntr"), "first", "span", "count")
    source = Input((known["count"],), kinds[0], "source", "input", index=0)
    old = Input((known["span"],), kinds[1], "old", "input", index=1)
    axes, (e,) = fresh_axes((known["span"],))
    rest = e - known["first"]
    place, guards = as_int(0), [rest]
    for d in range(rank):
        i = rest // known[f"t{d}"]
        rest = rest - i * known[f"t{d}"]
        guards.append(known[f"n{d}"] - 1 - i)
        place = place + i * known[f"r{d}"]
    body = select([*guards, -rest], load(source, [place]), load(old, [e]))
    made = Map((known["span"],), kinds[1], "target", "copy", axes=axes, body=body)
    return assemble_graph(Graph([source, old], [made], known), target)[0]


def _converted(e: Expr, kinds: tuple[DType, DType]) -> Expr:
    source, target = kinds
    if source is target:
        return e
    if source.is_float and target.compute is DType.int32:
        e = cast_to(unary("trunc", e), DType.int32)
    return convert(e, target)
