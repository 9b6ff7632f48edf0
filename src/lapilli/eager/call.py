"""The kernel of all ATen operators on the device: an exact key leads to a prepared launch, which is queued.

A key that is new leads over its signature to a program (`programs.py`), or to the CPU (`fallback.py`)."""

from __future__ import annotations

import functools
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lapilli.eager import movement, storage
from lapilli.eager.fallback import fallbacks, on_cpu, reset_fallbacks
from lapilli.eager.form import Form, form
from lapilli.eager.generators import default_generator
from lapilli.eager.movement import gather
from lapilli.eager.programs import load, programs_of, target_of
from lapilli.eager.signature import CannotRun, Number, Signature, operand, see
from lapilli.lower import lowerings

__all__ = ["boxed", "call", "copy", "fallbacks", "gather", "register", "reset_fallbacks"]

aten = torch.ops.aten

_MOST = 1 << 14  # launches that are kept
_launches: dict[Any, Any] = {}
_lock = threading.RLock()


def call(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator on tensors of the device.

    Raises what torch raises for wrong arguments; NotImplementedError in strict mode for what the device cannot run."""
    own = _OWN.get(op)
    if own is not None:
        return own(*args, **kwargs)
    described = form(op)
    leaves = _leaves(described, args, kwargs)
    tensors: list[torch.Tensor] = []
    numbers: list[Any] = []
    key = (op, *[_key(leaf, k in described.numeric, tensors, numbers) for k, leaf in enumerate(leaves)])
    launch = _launches.get(key)
    if type(launch) is dict:  # numbers are compiled in
        launch = launch.get(tuple(numbers))
    if launch is None:
        launch = _prepare(described, key, leaves, tensors, numbers)
    if isinstance(launch, Launch):
        try:
            return launch(leaves, tensors, numbers)
        except CannotRun as error:
            launch = str(error)
    return on_cpu(described, leaves, _index(leaves, tensors), launch)


def _prepare(
    described: Form, key: Any, leaves: list[Any], tensors: list[torch.Tensor], numbers: list[Any]
) -> Launch | str:
    """A launch for a new key, or why there is none."""
    with _lock:
        made: Launch | str
        constant = bool(numbers)
        try:
            index = _index(leaves, tensors)
            _check_devices(tensors, index)
            made = Launch(described, leaves, tensors, numbers, index)
            constant = constant and made.constant
        except CannotRun as error:
            made = str(error)
        if len(_launches) >= _MOST:
            _launches.clear()
        if constant:
            _launches.setdefault(key, {})[tuple(numbers)] = made
        else:
            _launches[key] = made
        return made


def boxed(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`call` in the form that PyTorch wants of a fallback."""
    return call(op, args, kwargs)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`movement.copy`; types that the device cannot convert are converted on the CPU, with a warning."""
    try:
        movement.copy(target, source)
    except CannotRun as error:
        on_cpu(form(aten.copy_.default), [target, source, False], target.get_device(), str(error))


def _leaves(described: Form, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the schema's order, with the defaults of those that were not given."""
    leaves = list(args)
    for argument in described.op._schema.arguments[len(leaves) :]:
        name = argument.name
        leaves.append(kwargs[name] if name in kwargs else argument.default_value)
    return leaves


def _key(leaf: Any, numeric: bool, tensors: list[torch.Tensor], numbers: list[Any]) -> Any:
    kind = type(leaf)
    if kind is torch.Tensor or isinstance(leaf, torch.Tensor):
        if leaf.device.type == "cpu" and not leaf.dim():
            numbers.append(leaf.item())
            return leaf.dtype
        tensors.append(leaf)
        return leaf.dtype, leaf.shape, leaf.stride(), leaf.get_device()
    if numeric and (kind is float or kind is int):
        if leaf == 0 or leaf == 1:
            return kind, leaf
        numbers.append(leaf)
        return kind
    if kind is list or kind is tuple:
        return tuple([_key(x, False, tensors, numbers) for x in leaf])
    return kind, leaf


def _index(leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> int:
    """The device of a call."""
    for tensor in tensors:
        if tensor.device.type == "vulkan":
            return tensor.get_device()
    from lapilli.eager.devices import index_of

    return index_of(next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None))


def _check_devices(tensors: Sequence[torch.Tensor], index: int) -> None:
    for tensor in tensors:
        if tensor.device.type != "vulkan" or tensor.get_device() != index:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, vulkan:{index} and {tensor.device}!"
            )


_FLOAT = struct.Struct("<f")
_UINT = struct.Struct("<I")


def _bits(number: Any) -> int:
    """32 bits of a number, as a kernel gets it."""
    if type(number) is float:
        try:
            return _UINT.unpack(_FLOAT.pack(number))[0]  # type: ignore[no-any-return]
        except OverflowError:
            return 0x7F800000 if number > 0 else 0xFF800000
    if not -(2**31) <= number < 2**31:
        raise CannotRun(f"the number {number} does not fit into the 32 bits in which the GPU computes integers")
    return int(number) & 0xFFFFFFFF


def _random_key(index: int, generator: torch.Generator | None) -> tuple[int, int]:
    """The words of 32 bits from which a call draws its random numbers."""
    generator = default_generator(index) if generator is None else generator
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())
    return drawn & 0xFFFFFFFF, drawn >> 32


class Launch:
    """A program with what is known of a call whose sizes, strides and types are known."""

    def __init__(
        self, described: Form, leaves: list[Any], tensors: list[torch.Tensor], numbers: list[Any], index: int
    ) -> None:
        signature = _signature(described, leaves, numbers)
        for number in numbers:
            if isinstance(number, complex):
                raise CannotRun("complex numbers are not supported on the GPU")
            _bits(number)
        operands = signature.operands()
        for given in operands:
            if given.dtype in _REFUSED:
                raise CannotRun(f"{str(given.dtype).removeprefix('torch.')} is not supported on the GPU")
        program, found = programs_of(target_of(index)).find(signature, numbers)
        self.constant = found is not signature
        compiled = program.compiled
        self.form, self.index, self.tree = described, index, compiled.tree
        self.results = program.results(operands)
        self.stream = storage.stream_of(index)
        self.alignment = self.stream.alignment
        self.program = program.loaded(index, functools.partial(load, index))
        kept = [k for k, _ in enumerate(leaves) if k not in described.outs]
        given_ = [x for k in kept for x in (leaves[k] if isinstance(leaves[k], list | tuple) else [leaves[k]])]
        order = [x for x in given_ if isinstance(x, torch.Tensor) and x.device.type == "vulkan"]
        self.inputs = [next(k for k, t in enumerate(tensors) if t is x) for x in order]
        self.gathered = {k: o.order for k, o in zip(self.inputs, operands, strict=True) if o.strided}
        self.carriers = compiled.carriers
        self.symbols = [0] * len(compiled.symbols)
        self.slots: list[tuple[int, int]] = []  # symbol, number
        self.keys: list[tuple[int, int]] = []  # symbol, word of the random key
        for place, (kind, k, d) in enumerate(compiled.symbols):
            if kind == "size":
                self.symbols[place] = operands[k].shape[d]
            else:
                (self.slots if kind == "number" else self.keys).append((place, k))
        self.generator = described.names.index("generator") if "generator" in described.names else None
        self.work = any(0 not in shape for shape, _, _ in self.results)
        self.aligned = [{self.inputs[k] for k in aligned if k < len(self.inputs)} for aligned in compiled.aligned]
        self.stored = dict(described.stored)
        self.direct = {k for k, position in described.stored if self._has_layout(k, leaves[position])}

    def _has_layout(self, k: int, target: Any) -> bool:
        """Whether an argument lies in memory as the program writes a result."""
        shape, strides, dtype = self.results[k]
        if not isinstance(target, torch.Tensor) or tuple(target.shape) != shape or target.dtype != dtype:
            return False
        seen = operand(target)
        return not (seen.strided or seen.spread) and movement.dense_strides(shape, seen.order) == strides

    def __call__(self, leaves: list[Any], tensors: list[torch.Tensor], numbers: list[Any]) -> Any:
        symbols = list(self.symbols)
        for place, k in self.slots:
            symbols[place] = _bits(numbers[k])
        if self.keys:
            key = _random_key(self.index, None if self.generator is None else leaves[self.generator])
            for place, k in self.keys:
                symbols[place] = key[k]
        made: list[torch.Tensor] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, (shape, strides, dtype) in enumerate(self.results):
            position = self.stored.get(k)
            target = None if position is None else leaves[position]
            if target is not None:
                if position in self.form.outs and tuple(target.shape) != shape:
                    _resize(target, shape)
                if k in self.direct and self._in_place(k, target, tensors):
                    made.append(target)
                    continue
            result = storage.empty(shape, dtype, self.index, strides)
            made.append(result)
            if target is not None:
                later.append((target, result))
        if self.work:
            slices, held = [], []
            for k in self.inputs:
                tensor = tensors[k]
                offset = tensor.storage_offset() * tensor.itemsize
                if k in self.gathered:
                    tensor, offset = movement.gather(tensor, None, self.gathered[k]), 0
                elif offset % self.alignment:
                    tensor, offset = movement.aligned(tensor), 0
                held.append(tensor)
                slices.append((storage.buffer_of(tensor), offset))
            outputs = [(storage.buffer_of(t), t.storage_offset() * t.itemsize) for t in made]
            slices += [outputs[0]] * self.carriers
            self.stream.enqueue(self.program, 0, symbols, slices, outputs)
        for target, result in later:
            copy(target, result)
        return self._tree(made, leaves)

    def _in_place(self, k: int, target: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        """Whether the program may write into the memory of an argument itself: what it reads of this memory is read where it
        is written."""
        if target.storage_offset() * target.itemsize % self.alignment:
            return False
        buffer = storage.buffer_of(target)
        for place in self.inputs:
            tensor = tensors[place]
            if storage.buffer_of(tensor) is buffer and not (
                place in self.aligned[k]
                and tensor.storage_offset() == target.storage_offset()
                and (tensor is target or tensor.stride() == target.stride())
            ):
                return False
        return True

    def _tree(self, made: list[torch.Tensor], leaves: list[Any]) -> Any:
        returned = self.form.returned
        if not returned:
            return None
        if isinstance(self.tree, int):
            return made[0] if returned[0] is None else leaves[returned[0]]
        found: list[Any] = [
            None if part == -1 else [made[k] for k in part] if isinstance(part, list) else made[part]
            for part in self.tree
        ]
        if len(returned) == 1:
            return found if returned[0] is None else leaves[returned[0]]
        return tuple(found[k] if place is None else leaves[place] for k, place in enumerate(returned))


_REFUSED = {torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64}


def _resize(target: torch.Tensor, shape: Sequence[int]) -> None:
    if target.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(target.shape)}, which does not match the "
            f"required output shape {list(shape)}.",
            UserWarning,
            stacklevel=2,
        )
    target.resize_(shape)


def _signature(described: Form, leaves: list[Any], numbers: list[Any]) -> Signature:
    runtime = described.runtime_numbers

    def one(leaf: Any, numeric: bool) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type == "cpu" and not leaf.dim():
                value = leaf.item()
                return Number("float" if isinstance(value, float) else "int", leaf.dtype)
            return operand(leaf)
        if isinstance(leaf, list | tuple):
            return tuple(one(x, False) for x in leaf)
        if runtime and numeric and type(leaf) in (float, int) and leaf not in (0, 1):
            return Number(type(leaf).__name__)
        return leaf

    return Signature(
        described,
        tuple(leaf.dtype if k in described.outs else one(leaf, k in described.numeric) for k, leaf in enumerate(leaves)),
    )


def _clone(x: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    return _dense_copy(x, x.dtype, memory_format)


def _dense_copy(x: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None) -> torch.Tensor:
    if memory_format is None or memory_format is torch.preserve_format:
        seen = see(tuple(x.shape), x.stride(), x.dtype)
        order = tuple(range(x.dim())) if seen.spread else seen.order
    else:
        order = _orders[memory_format](x.dim())
    made = storage.empty(x.shape, dtype, x.get_device(), movement.dense_strides(x.shape, order))
    copy(made, x)
    return made


_orders: dict[torch.memory_format, Callable[[int], tuple[int, ...]]] = {
    torch.contiguous_format: lambda rank: tuple(range(rank)),
    torch.channels_last: lambda rank: (0, 2, 3, 1),
    torch.channels_last_3d: lambda rank: (0, 2, 3, 4, 1),
}


def _zero(x: torch.Tensor) -> torch.Tensor:
    return _fill(x, 0)


def _fill(x: torch.Tensor, value: Any) -> torch.Tensor:
    """A dense tensor is filled by words; 0 is 0 in every type."""
    if not x.numel():
        return x
    seen = operand(x)
    if seen.strided or seen.spread or value != 0 and x.dtype not in _WORDS:
        return _write(x, value)
    pattern = 0 if value == 0 else _WORDS[x.dtype](value)
    offset, size = x.storage_offset() * x.itemsize, x.numel() * x.itemsize
    if offset % 4 or size % 4:
        return _write(x, value)
    storage.stream_of(x.get_device()).fill((storage.buffer_of(x), offset), size, pattern)
    return x


def _write(x: torch.Tensor, value: Any) -> torch.Tensor:
    host = torch.full((), value, dtype=x.dtype, device="cpu")
    copy(x, storage.from_cpu(host, x.get_device()).expand(x.shape))
    return x


_WORDS: dict[torch.dtype, Callable[[Any], int]] = {
    torch.float32: lambda value: _bits(float(value)), torch.int32: lambda value: _bits(int(value)),
}  # fmt: skip


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all().item())


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    return call(aten.convolution_backward.default, (grad, x, weight, [grad.shape[1]], *rest), {})


_OWN: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.clone.default: _clone,
    aten.zero_.default: _zero,
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: lambda x, value: _fill(x, value.item()),
    aten.equal.default: _equal,
    aten.convolution_backward_overrideable.default: _convolution_backward,
}
"""Operators that need no program of their own."""

_OTHERS = {aten._to_copy.default}
"""Operators with a lowering that PyTorch makes of others, because of the devices that they may name."""


def register(library: torch.library.Library) -> None:
    """Registers kernels where PyTorch would make an operator of others: whatever has a lowering."""
    for overload in [*lowerings, *_OWN]:
        if overload.namespace == "aten" and overload not in _OTHERS and not _is_taken(overload):
            library.impl(overload.name().removeprefix("aten::"), functools.partial(boxed, overload), "PrivateUse1")


def _is_taken(overload: torch._ops.OpOverload) -> bool:
    """Whether it is a view, has a kernel already, or is made of operators with gradients of their own."""
    name = overload.name()
    if any(r.alias_info is not None and not r.alias_info.is_write for r in overload._schema.returns):
        return True
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("PrivateUse1", "CompositeImplicitAutograd"))
