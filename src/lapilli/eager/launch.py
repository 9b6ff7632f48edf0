"""Queues a method of a loaded program on tensors of the device. Only `device_copy.py` queues copies of tensors itself.

`Launch` does what all front ends need: it checks the numbers and integers that kernels can compute with, draws random keys,
checks where tensors begin and whether results may overwrite operands, and handles empty results and lack of memory. Its
callers convert values: `operator_launch.py` those of an operator, `method_call.py` those of a method of any program.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lapilli.eager import device_copy, device_state, storage
from lapilli.eager.call_signature import CannotRun
from lapilli.eager.generators import random_key
from lapilli.player import NativeProgram

Run = Callable[[Sequence[Any], Mapping[str, Any], Sequence[torch.Tensor], Sequence[Any]], Any]
"""Runs a call of an operator, given its arguments, and the tensors and numbers among them."""

_FLOAT = struct.Struct("<f")
_UINT = struct.Struct("<I")


def bits(number: Any) -> int:
    """The 32 bits of a number, as passed to kernels. Raises CannotRun for an integer with more."""
    if type(number) is float:
        try:
            return _UINT.unpack(_FLOAT.pack(number))[0]  # type: ignore[no-any-return]
        except OverflowError:
            return 0x7F800000 if number > 0 else 0xFF800000
    return fitting(number) & 0xFFFFFFFF


def fitting(number: Any) -> int:
    """The integer itself. Raises CannotRun if it does not fit into 32 bits."""
    if not -(2**31) <= number < 2**31:
        raise CannotRun(f"the number {number} does not fit into the 32 bits in which the GPU computes integers")
    return int(number)


class Launch:
    """A method of a program on one device.

    symbols: its symbols in order: a known value, a conversion of a number that the call provides (`bits` or `fitting`,
    which raise CannotRun), or a `Key`. inputs: dtypes. outputs: the number of tensors that it computes. sums: whether it
    computes unchecked int64 results, so that operands must be well within 32 bits. checks: operators whose int64 results
    the program checks itself; the number of the first that failed is an additional output. effects: whether a run has
    effects even if all its results are empty (it changes states of the program).
    """

    def __init__(
        self, native: NativeProgram, method: int, index: int, symbols: Sequence[Symbol], inputs: Sequence[torch.dtype],
        outputs: int, *, sums: bool = False, checks: Sequence[str] = (), effects: bool = False,
    ) -> None:  # fmt: skip
        """index: of the device."""
        self.index = index
        self.random = any(isinstance(s, Key) for s in symbols)
        """Whether it draws random numbers."""
        self.looks = torch.int64 in inputs
        """Whether operands are checked for integers that do not fit."""
        self._symbols = [s if isinstance(s, int) else 0 for s in symbols]
        self._numbers = [(place, s) for place, s in enumerate(symbols) if callable(s)]
        self._keys = [(place, s.word) for place, s in enumerate(symbols) if isinstance(s, Key)]
        self._integers = [k for k, dtype in enumerate(inputs) if dtype is torch.int64]
        self._sizes = [dtype.itemsize for dtype in inputs]
        self._exceeds_int32 = storage.nearly_exceeds_int32 if sums else storage.exceeds_int32
        self._checks, self._effects = checks, effects
        self._stream = device_state.stream_of(index)
        self._alignment = self._stream.alignment
        self._native, self._method = native, method
        self._enqueue = self._stream.launch(native, method, len(symbols), len(inputs), outputs + bool(checks))

    def bind(self, numbers: Sequence[Any], generator: torch.Generator | None = None) -> list[int]:
        """The values of the symbols. numbers: those that the call provides, in the symbols' order. generator: of random
        numbers (None: the device's, which torch.manual_seed seeds). Raises CannotRun for numbers that kernels cannot
        represent.
        """
        words = self._symbols[:]
        if self._numbers:
            for (place, convert), number in zip(self._numbers, numbers, strict=True):
                words[place] = convert(number)
        if self._keys:
            key = random_key(self.index, generator)
            for place, word in self._keys:
                words[place] = key[word]
        return words

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises CannotRun if an operand has integers that kernels cannot compute with."""
        for k in self._integers:
            if self._exceeds_int32(inputs[k]):
                raise CannotRun(
                    "an int64 tensor has values that do not fit into the 32 bits in which the GPU computes them"
                )

    def may_write(
        self, target: torch.Tensor, inputs: Sequence[torch.Tensor], read_where_written: Sequence[int]
    ) -> bool:
        """Whether a result may be written to the memory of a tensor with its layout. The program must read that memory only
        element by element, where it writes. read_where_written: inputs that are read like that.
        """
        if target.storage_offset() * target.itemsize % self._alignment:
            return False
        buffer = storage.buffer_of(target)
        return all(
            storage.buffer_of(tensor) is not buffer
            or (
                k in read_where_written
                and tensor.storage_offset() == target.storage_offset()
                and (tensor is target or tensor.stride() == target.stride())
            )
            for k, tensor in enumerate(inputs)
        )

    def queue(self, words: list[int], inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Queues the work. words: those of `bind`, to which this appends. inputs: tensors on the device with the layout
        that the program reads, at any offset. results: tensors with the layout that it writes, from `storage.empty`, or
        such as `may_write` accepts.

        Raises CannotRun if a check of the program fails, and torch.OutOfMemoryError if there is no memory for
        intermediates.
        """
        for result in results:
            if result.numel():
                break
        else:
            if not self._effects:
                return
        alignment, held = self._alignment, []  # keeps copies alive until the work is queued
        for tensor, size in zip(inputs, self._sizes, strict=True):
            offset = tensor.storage_offset() * size
            if offset % alignment:
                tensor, offset = device_copy.aligned(tensor), 0
            buffer: Any = tensor.untyped_storage()._lapilli  # type: ignore[attr-defined]
            held.append(buffer)
            words += (buffer.address, offset)  # type: ignore[arg-type]
        for result in results:
            buffer = result.untyped_storage()._lapilli  # type: ignore[attr-defined]
            words += (buffer.address, result.storage_offset() * result.itemsize)  # type: ignore[arg-type]
        if not self._checks:
            self._enqueue(*words)
            return
        first = storage.empty((), torch.int32, self.index)  # number of the first failed check, from 1, or 0
        self._enqueue(*words, storage.buffer_of(first).address, 0)
        failed = int(storage.to_cpu(first).item())
        if failed:
            raise CannotRun(
                f"the int64 results of {self._checks[failed - 1]} do not fit into the 32 bits in which the GPU computes them"
            )

    # --- Fast paths for repeated calls of operators. Every line of these functions costs time.

    @property
    def is_plain(self) -> bool:
        """Whether the fast paths are possible: nothing is drawn or checked."""
        return not (self.random or self.looks or self._checks)

    def fast_new(
        self, inputs: Sequence[int], numbers: Sequence[int], shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype,
        otherwise: Run,
    ) -> Run:  # fmt: skip
        """The fast path of a plain launch with one new result. inputs, numbers: indices of the call's tensors and numbers
        that it uses. otherwise: called instead if a tensor begins where the program cannot read.
        """
        steps = None if strides == device_copy.dense_strides(shape, range(len(shape))) else strides
        taken = list(zip(inputs, self._sizes, strict=True))
        alignment, index, plain = self._alignment, self.index, self.index == 0 and steps is None
        create, around = storage.create, storage.around
        first, enqueue = self._stream.launch_new(
            self._native, self._method, self._symbols, len(taken), storage.bytes_of(shape, dtype, steps)
        )
        at = len(first) - len(self._symbols)
        slots = [(at + place, k, convert) for (place, convert), k in zip(self._numbers, numbers, strict=True)]

        def run(args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
            words = first[:]
            for place, k, convert in slots:
                words[place] = convert(numbers[k])
            for k, size in taken:
                tensor = tensors[k]
                offset = tensor.storage_offset() * size
                if offset % alignment:
                    return otherwise(args, kwargs, tensors, numbers)
                words += (tensor.untyped_storage()._lapilli.address, offset)
            buffer = enqueue(words)
            if not plain:
                return around(buffer, shape, dtype, index, steps)
            made: Any = create(shape, dtype)
            made.untyped_storage()._lapilli = buffer
            return made

        return run

    def fast_in_place(
        self, inputs: Sequence[int], numbers: Sequence[int], place: Place, itemsize: int, otherwise: Run
    ) -> Run:
        """The fast path of a plain launch with the result in an argument that has the layout the program writes."""
        position, name, safe = place
        symbols, taken = self._symbols, list(zip(inputs, self._sizes, strict=True))
        slots = [(place, k, convert) for (place, convert), k in zip(self._numbers, numbers, strict=True)]
        alignment, enqueue = self._alignment, self._enqueue

        def run(args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
            target = args[position] if position < len(args) else kwargs[name]
            written = target.storage_offset() * itemsize
            if written % alignment:
                return otherwise(args, kwargs, tensors, numbers)
            buffer = target.untyped_storage()._lapilli
            words = symbols[:]
            for place, k, convert in slots:
                words[place] = convert(numbers[k])
            for k, size in taken:
                tensor = tensors[k]
                offset = tensor.storage_offset() * size
                read = tensor.untyped_storage()._lapilli
                if offset % alignment or (read is buffer and (offset != written or k not in safe)):
                    return otherwise(args, kwargs, tensors, numbers)
                words.append(read.address)
                words.append(offset)
            enqueue(*words, buffer.address, written)
            return target

        return run

    def fast_several(
        self, inputs: Sequence[int], numbers: Sequence[int], results: Sequence[tuple[Any, Any, torch.dtype]],
        places: Sequence[Place | None], returned: Sequence[int | None], otherwise: Run,
    ) -> Run:  # fmt: skip
        """The fast path of a plain launch with several results. results: shape, strides and dtype of each. places: the
        argument that each is written to, or None for new memory. returned: what the call returns, by index; None: nothing.
        """
        symbols, taken = self._symbols, list(zip(inputs, self._sizes, strict=True))
        slots = [(place, k, convert) for (place, convert), k in zip(self._numbers, numbers, strict=True)]
        alignment, enqueue, index = self._alignment, self._enqueue, self.index
        allocate, around = self._stream.allocate, storage.around
        described = []
        for (shape, strides, dtype), place in zip(results, places, strict=True):
            steps = None if strides == device_copy.dense_strides(shape, range(len(shape))) else strides
            described.append((shape, dtype, steps, storage.bytes_of(shape, dtype, steps), dtype.itemsize, place))

        def run(args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
            words = symbols[:]
            for place, k, convert in slots:
                words[place] = convert(numbers[k])
            read = []
            for k, size in taken:
                tensor = tensors[k]
                offset = tensor.storage_offset() * size
                if offset % alignment:
                    return otherwise(args, kwargs, tensors, numbers)
                buffer = tensor.untyped_storage()._lapilli
                words += (buffer.address, offset)
                read.append((buffer, offset, k))
            made = []
            for shape, dtype, steps, size, itemsize, given in described:
                if given is None:
                    buffer = allocate(size)
                    made.append(around(buffer, shape, dtype, index, steps))
                    words += (buffer.address, 0)
                    continue
                position, name, safe = given
                target = args[position] if position < len(args) else kwargs[name]
                written = target.storage_offset() * itemsize
                buffer = target.untyped_storage()._lapilli
                if written % alignment:
                    return otherwise(args, kwargs, tensors, numbers)
                for other, offset, k in read:
                    if other is buffer and (offset != written or k not in safe):
                        return otherwise(args, kwargs, tensors, numbers)
                made.append(target)
                words += (buffer.address, written)
            enqueue(*words)
            return tuple([None if k is None else made[k] for k in returned])

        return run


class Place(NamedTuple):
    """An argument that a result is written to: its position and name, and the tensors of the call that are only read where
    this result is written, provided that they begin at the same element.
    """

    position: int
    name: str
    safe: set[int]


class Key:
    """A symbol that is a word (0 or 1) of the random key of a call."""

    def __init__(self, word: int) -> None:
        self.word = word


Symbol = int | Key | Callable[[Any], int]
