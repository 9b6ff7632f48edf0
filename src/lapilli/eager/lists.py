"""Operators on lists of tensors, as optimizers call them (`torch._foreach_add_`): many tensors by one launch.

PyTorch takes them apart into one call for each tensor. For a step of an optimizer those take longer on the host than most of the
step on the device. Lists that a program does not fit are left to PyTorch: of integers, empty or not dense tensors, or tensors that
share memory, where the order of the calls matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from lapilli.eager import device_state, storage
from lapilli.eager.call_signature import CannotRun
from lapilli.eager.dispatch import composite
from lapilli.eager.launch import bits
from lapilli.eager.list_programs import SLOTS, ListForm, list_program
from lapilli.eager.operator_launch import REFUSED
from lapilli.eager.programs import target_of
from lapilli.errors import LapilliError
from lapilli.ir.node import MOST_ELEMENTS

aten = torch.ops.aten
Overload = torch._ops.OpOverload
Tensor = torch.Tensor

_MOST = 256  # prepared lists of an operator
_KINDS = {"List[Tensor]": "list", "Tensor": "tensor", "number": "number", "List[number]": "numbers"}


@dataclass
class _Prepared:
    """Lists of certain shapes and dtypes. sizes: elements of the tensors, in their order."""

    enqueue: Callable[..., None]
    symbols: Sequence[tuple[str, int]]
    slots: int
    sizes: list[int]
    alignment: int
    index: int


_all: list[ListOperator] = []


@device_state.on_loss.append
def _forget(index: int) -> None:
    list_program.cache_clear()
    for operator in _all:
        operator.prepared.clear()


class ListOperator:
    """The kernel of an operator on lists. each: the operator of one tensor, without side effects."""

    def __init__(self, op: Overload, each: Overload) -> None:
        self.op, self.each = op, each
        arguments = op._schema.arguments
        self.names = [a.name for a in arguments]
        self.defaults = [a.default_value if a.has_default_value() else None for a in arguments]
        self.kinds = [_KINDS[str(a.type)] for a in arguments]
        self.in_place = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        scaled = "value" if each in (aten.addcmul.default, aten.addcdiv.default) else None
        names = (a.name if a.kwarg_only else scaled if "number" in _KINDS[str(a.type)] else None for a in arguments)
        self.form = tuple(zip(self.kinds, names, strict=True))
        self.prepared: dict[Any, _Prepared | None] = {}
        _all.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [
            *args,
            *(kwargs.get(n, d) for n, d in zip(self.names[len(args) :], self.defaults[len(args) :], strict=True)),
        ]
        key: list[Any] = []
        for kind, leaf in zip(self.kinds, leaves, strict=True):
            if kind == "list":
                key.append(len(leaf))
                for tensor in leaf:
                    key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device())
            elif kind == "tensor":
                key += (leaf.dtype, leaf.shape, leaf.get_device())
            else:
                key.append(tuple(map(type, leaf)) if kind == "numbers" else type(leaf))
        exact = tuple(key)
        if exact in self.prepared:
            prepared = self.prepared[exact]
        else:
            if len(self.prepared) >= _MOST:
                self.prepared.clear()
            prepared = self.prepared[exact] = self._prepare(leaves)
        made = None if prepared is None else self._queue(prepared, leaves)
        if made is None:
            return self.op.redispatch(storage.on_host, *args, **kwargs)
        return None if self.in_place else made

    def _prepare(self, leaves: Sequence[Any]) -> _Prepared | None:
        """What calls with such arguments need; None: they are left to PyTorch."""
        device_state.check_fork()
        lists, shared = self._of_kind("list", leaves), self._of_kind("tensor", leaves)
        first = lists[0]
        count, index = len(first), first[0].get_device() if first else -1
        tensors = [*(t for of in lists for t in of), *shared]
        if count < 2 or any(len(of) != count for of in lists) or not all(map(device_state.is_ours, tensors)):
            return None
        if any(t.dtype is not of[0].dtype for of in lists for t in of) or any(t.get_device() != index for t in tensors):
            return None
        if any(not t.dtype.is_floating_point or t.dtype in REFUSED for t in tensors):
            return None
        if any(t.dim() for t in shared) or not all(map(_is_flat, zip(*lists, strict=True))):
            return None
        most = min(MOST_ELEMENTS, (target_of(index).storage or 1 << 62) // 4)
        if max(t.numel() for t in first) > most or not self._takes(leaves, count):
            return None
        slots = next((n for n in SLOTS if n >= count), SLOTS[-1])
        given = [leaf[0] if kind == "list" else leaf for kind, leaf in zip(self.kinds, leaves, strict=True)]
        dtypes = tuple(x.dtype for x in given if isinstance(x, Tensor))
        form = ListForm(self.each, self.form, dtypes, slots)
        try:
            native, symbols = list_program(form, index)
        except (CannotRun, LapilliError):
            return None
        stream = device_state.stream_of(index)
        inputs = len(shared) + slots * len(lists)
        enqueue = stream.launch(native, 0, len(symbols), inputs, slots)
        return _Prepared(enqueue, symbols, slots, [t.numel() for t in first], stream.alignment, index)

    def _of_kind(self, wanted: str, leaves: Sequence[Any]) -> list[Any]:
        return [leaf for kind, leaf in zip(self.kinds, leaves, strict=True) if kind == wanted]

    def _takes(self, leaves: Sequence[Any], count: int) -> bool:
        """Whether all numbers are plain, one for each tensor where they are a list."""
        for kind, leaf in zip(self.kinds, leaves, strict=True):
            numbers = leaf if kind == "numbers" else [leaf] if kind == "number" else []
            if any(type(number) not in (float, int) for number in numbers):
                return False
            if kind == "numbers" and len(leaf) != count:
                return False
        return True

    def _queue(self, prepared: _Prepared, leaves: Sequence[Any]) -> list[Tensor] | None:
        """Queues the work. Returns the new tensors (those of the first list if it is in place); None: nothing is queued, for the
        values of this call do not fit.
        """
        lists = self._of_kind("list", leaves)
        numbers: dict[tuple[str, int], int] = {}
        largest = torch.finfo(lists[0][0].dtype).max
        for k, (kind, leaf) in enumerate(zip(self.kinds, leaves, strict=True)):
            for slot, number in enumerate(leaf if kind == "numbers" else [leaf] if kind == "number" else ()):
                if abs(number) > largest and abs(number) != _INFINITY:
                    return None
                numbers[(kind, slot if kind == "numbers" else k)] = bits(float(number))
        places = self._places(prepared.alignment, lists, self._of_kind("tensor", leaves))
        if places is None:
            return None
        shared, taken = places
        if self.in_place:
            results: list[Tensor] = lists[0]
            written = [words[:2] for words in taken]
            increment_version(results)  # as the calls of single tensors do
        else:
            results = [_like(t, prepared.index) for t in lists[0]]
            written = [[storage.buffer_of(t).address, 0] for t in results]
        slots, sizes = prepared.slots, prepared.sizes
        for begin in range(0, len(sizes), slots):
            end = min(begin + slots, len(sizes))
            words = [
                (sizes[begin + k] if begin + k < end else 0) if kind == "size"
                else numbers.get((kind, begin + k if kind == "numbers" else k), 0)
                for kind, k in prepared.symbols
            ]  # fmt: skip
            words += shared
            for place in taken[begin:end]:
                words += place
            left = slots - (end - begin)
            words += taken[begin] * left
            for place in written[begin:end]:
                words += place
            words += written[begin] * left
            prepared.enqueue(*words)
        return results

    def _places(
        self, alignment: int, lists: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]
    ) -> tuple[list[int], list[list[int]]] | None:
        """Address and offset of the tensors for all slots, and of those of each slot; None if some do not begin where kernels can
        read, or share memory that is written.
        """
        shared: list[int] = []
        taken: list[list[int]] = [[] for _ in lists[0]]
        for of, into in [*((given, taken) for given in lists), *(([t], [shared]) for t in tensors)]:
            size = of[0].itemsize
            for words, tensor in zip(into, of, strict=True):
                offset = tensor.storage_offset() * size
                if offset % alignment:
                    return None
                words += (tensor.untyped_storage()._lapilli.address, offset)  # type: ignore[attr-defined, arg-type]
        if self.in_place:
            owners = {words[0]: k for k, words in enumerate(taken)}
            if len(owners) < len(taken) or any(address in owners for address in shared[::2]):
                return None
            for k, words in enumerate(taken):
                for at in range(2, len(words), 2):
                    owner = owners.get(words[at])
                    if owner is not None and (owner != k or words[at + 1] != words[1]):
                        return None
        return shared, taken


_INFINITY = float("inf")


def _is_flat(slot: Sequence[Tensor]) -> bool:
    """Whether the tensors of a slot have their elements in the same order, without gaps."""
    first = slot[0]
    alike = all(t.shape == first.shape and t.stride() == first.stride() for t in slot)
    return alike and first.numel() > 0 and storage.is_dense(first)


def _like(tensor: Tensor, index: int) -> Tensor:
    steps = None if tensor.is_contiguous() else tensor.stride()
    return storage.empty(tensor.shape, tensor.dtype, index, steps)


_EACH: Mapping[str, Mapping[str, Overload]] = {
    **{
        name: {"List": op.Tensor, "Scalar": op.Tensor, "ScalarList": op.Tensor, "Tensor": op.Tensor}
        for name, op in (("add", aten.add), ("sub", aten.sub), ("mul", aten.mul), ("div", aten.div))
    },
    "maximum": {"List": aten.maximum.default},
    "minimum": {"List": aten.minimum.default},
    "clamp_max": {"Scalar": aten.clamp_max.default},
    "clamp_min": {"Scalar": aten.clamp_min.default},
    "lerp": {"List": aten.lerp.Tensor, "Scalar": aten.lerp.Scalar, "ScalarList": aten.lerp.Scalar},
    "addcmul": {"Scalar": aten.addcmul.default, "ScalarList": aten.addcmul.default},
    "addcdiv": {"Scalar": aten.addcdiv.default, "ScalarList": aten.addcdiv.default},
    **{
        name: {"default": getattr(aten, name).default}
        for name in ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "tanh")
    },
}


def _register() -> None:
    for name, overloads in _EACH.items():
        for suffix in ("", "_"):
            packet = getattr(aten, f"_foreach_{name}{suffix}")
            for overload, each in overloads.items():
                if overload in packet.overloads():
                    op = getattr(packet, overload)
                    composite(op)(ListOperator(op, each))


_register()
