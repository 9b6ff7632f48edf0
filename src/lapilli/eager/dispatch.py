"""The kernel of all ATen operators on the device: looks up the prepared launch of a call by its exact key, and queues it.

For a new key, the signature leads to a program (`programs.py`), or the call goes to the CPU (`host_call.py`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lapilli.attention_operators import ATTENTION, ATTENTION_BACKWARD
from lapilli.eager import device_state, storage
from lapilli.eager.call_signature import CannotRun
from lapilli.eager.device_state import index_of, is_ours
from lapilli.eager.fallback import fallbacks, reset_fallbacks
from lapilli.eager.host_call import on_cpu
from lapilli.eager.jit_trace import is_recorded, untraced
from lapilli.eager.operator_launch import OperatorLaunch, is_runtime, places
from lapilli.eager.operator_schema import schema_of
from lapilli.eager.refused_types import refused_types
from lapilli.graph.coded_layers import LAYERS
from lapilli.lower import lowerings

__all__ = ["boxed", "call", "composite", "fallbacks", "register", "reset_fallbacks", "run"]

aten = torch.ops.aten
Overload = torch._ops.OpOverload
_Function = TypeVar("_Function", bound=Callable[..., Any])

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_ONLY_INTEGERS = {int}
_default_dtype = torch.get_default_dtype  # the dtype of floating-point results of integers

_MOST = 1 << 12  # launches cached per operator
_lock = threading.RLock()


_all: weakref.WeakSet[Operator] = weakref.WeakSet()


@device_state.on_loss.append
def _forget(index: int) -> None:
    for kernel in list(_all):
        kernel.launches.clear()


class Operator:
    """An operator on tensors of the device.

    Raises torch's own exceptions for wrong arguments, and in strict mode NotImplementedError for calls that the device
    cannot run.
    """

    def __init__(self, op: Overload) -> None:
        self.schema = schema_of(op)
        self.numeric = self.schema.numeric | {self.schema.names[k] for k in self.schema.numeric}
        self.scales = 1 in self.schema.numeric  # whether the second argument may be a number
        self.launches: dict[Any, Any] = {}
        _all.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        exact: tuple[Any, ...]
        tensors: list[torch.Tensor]
        numbers: list[Any] = []
        # The most common calls, with one expression each; the key is the same as that of `_exact`.
        if len(args) == 1 and type(x := args[0]) is _Tensor and not kwargs:
            tensors = [x]
            exact = (_default_dtype(), x.dtype, x.shape, x.stride(), x.get_device())
        elif len(args) == 2 and type(y := args[1]) is type(x := args[0]) is _Tensor and not kwargs:
            tensors = [x, y]
            exact = (
                _default_dtype(), x.dtype, x.shape, x.stride(), x.get_device(), y.dtype, y.shape, y.stride(), y.get_device(),
            )  # fmt: skip
        elif (
            len(args) == 2
            and type(x) is _Tensor
            and type(y) is float
            and not kwargs
            and self.scales
            and y != 0
            and y != 1
        ):
            tensors, numbers = [x], [y]
            exact = (_default_dtype(), x.dtype, x.shape, x.stride(), x.get_device(), float)
        else:
            tensors = []
            exact = self._exact(args, kwargs, tensors, numbers)
        launch = self.launches.get(exact)
        if type(launch) is dict:  # launches by their compiled-in numbers
            launch = launch.get(tuple(map(_told_apart, numbers)))
        if launch is None:
            launch = self._prepare(exact, args, kwargs, tensors, numbers)
        if not isinstance(launch, str):
            try:
                return launch(args, kwargs, tensors, numbers)
            except CannotRun as error:
                launch = str(error)
        return self.on_cpu(args, kwargs, launch)

    def on_cpu(self, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> Any:
        """The call on the CPU; as `lapilli.eager.host_call.on_cpu`."""
        leaves = self._leaves(args, kwargs)
        tensors = [leaf for leaf in tree_leaves(leaves) if isinstance(leaf, torch.Tensor)]
        return on_cpu(self.schema, leaves, _index(leaves, tensors), reason)

    def _exact(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor], numbers: list[Any]
    ) -> tuple[Any, ...]:
        """The exact key of a call. Its tensors, and the numbers that may vary between calls, are appended to the lists."""
        key: list[Any] = [_default_dtype()]
        for k, leaf in enumerate(args):
            if (kind := type(leaf)) is _Tensor or kind is _Parameter:
                tensors.append(leaf)
                key += (leaf.dtype, leaf.shape, leaf.stride(), leaf.get_device())
            elif leaf is None or kind is bool:
                key.append(leaf is None or (kind, leaf))
            elif kind is list and {*map(type, leaf)} == _ONLY_INTEGERS:  # sizes: many calls have some
                key.append((int, *leaf))
            elif kind is float and k in self.numeric and leaf != 0 and leaf != 1:  # as `is_runtime`
                numbers.append(leaf)
                key.append(float)
            else:
                self._add(k, leaf, key, tensors, numbers)
        if kwargs:
            for name, leaf in kwargs.items():
                key.append(name)
                self._add(name, leaf, key, tensors, numbers)
        return tuple(key)

    def _add(self, place: Any, leaf: Any, key: list[Any], tensors: list[torch.Tensor], numbers: list[Any]) -> None:
        """Appends one argument to the exact key."""
        kind = type(leaf)
        if kind is float or kind is int:
            if place in self.numeric and is_runtime(leaf):
                numbers.append(leaf)
                key.append(kind)
            else:
                key += (kind, _told_apart(leaf))
        elif isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            key += (leaf.dtype, leaf.shape, leaf.stride(), leaf.get_device())
        elif kind is list or kind is tuple:
            key.append(len(leaf))
            for x in leaf:
                self._add(None, x, key, tensors, numbers)
        else:
            key += (kind, repr(leaf) if kind is complex else leaf)

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments in the schema's order, with defaults for those not given."""
        rest = self.schema.op._schema.arguments[len(args) :]
        return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]

    def _prepare(
        self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor], numbers: list[Any]
    ) -> Callable[..., Any] | str:
        """A launch for a new key, or the reason why there is none."""
        device_state.check_fork()
        leaves = self._leaves(args, kwargs)
        index = _index(leaves, tensors)
        if self.schema.op in _INDEXING and leaves[0].is_vulkan and any(t.is_cpu for t in tensors):
            return lambda args, kwargs, tensors, numbers: self(*tree_map(lambda x: _uploaded(x, index), args), **kwargs)
        self._check_devices(tensors, index)
        made: Callable[..., Any] | str
        constant = bool(numbers)
        with _lock:
            try:
                reason = refused_types(self.schema.op, leaves)
                if reason is not None:
                    raise CannotRun(reason)
                launch = OperatorLaunch(self.schema, leaves, places(self.schema, args, kwargs), tensors, numbers, index)
                constant = constant and launch.constant
                made = launch.fast(tensors)
                if launch.passing:
                    return made
            except CannotRun as error:
                made = str(error)
            if len(self.launches) >= _MOST:
                self.launches.clear()
            if constant:
                self.launches.setdefault(key, {})[tuple(map(_told_apart, numbers))] = made
            else:
                self.launches[key] = made
        return made

    def _check_devices(self, tensors: Sequence[torch.Tensor], index: int) -> None:
        for tensor in tensors:
            if tensor.get_device() != index and (tensor.device.type != "cpu" or tensor.dim()):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"vulkan:{index} and {tensor.device}!"
                )


def _told_apart(number: float) -> Any:
    """What a number is in a key: 0 and -0 are equal, and NaN is not equal to itself."""
    return number if number and number == number else repr(number)


_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
"""Operators whose indices may be on the CPU."""


def _uploaded(leaf: Any, index: int) -> Any:
    is_host = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
    return storage.from_cpu(leaf, index) if is_host else leaf


def _index(leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> int:
    """The index of the device of a call."""
    for tensor in tensors:
        if is_ours(tensor):
            return tensor.get_device()
    return index_of(next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None))


_composite: dict[Overload, Callable[..., Any]] = {}
"""Kernels of operators that are composed of others, or need no program."""


def composite(*ops: Overload) -> Callable[[_Function], _Function]:
    """A decorator that registers a kernel of operators without a program of their own."""

    def add(function: _Function) -> _Function:
        _composite.update(dict.fromkeys(ops, function))
        return function

    return add


_kernels: dict[Overload, Callable[..., Any]] = {}


def _kernel(op: Overload) -> Callable[..., Any]:
    """The kernel of an operator."""
    known = _kernels.get(op)
    if known is None:
        kernel = _composite.get(op) or Operator(op)
        known = _kernels[op] = kernel if is_recorded(op) else untraced(kernel)
    return known


def boxed(op: Overload, *args: Any, **kwargs: Any) -> Any:
    """The kernel of operators without one of their own, in the form that PyTorch expects of a fallback."""
    return (_kernels.get(op) or _kernel(op))(*args, **kwargs)


def call(op: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator on tensors of the device."""
    return _kernel(op)(*args, **kwargs)


@functools.cache
def run(op: Overload) -> Operator:
    """An operator that runs by a program, whatever else may be registered for it."""
    return Operator(op)


_MADE_OF_OTHERS = {
    aten._to_copy.default, aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default,
    aten.empty_permuted.default,
}  # fmt: skip
"""Operators with a lowering that are still composed of others by PyTorch: they may name devices, or compute nothing."""


def register(library: torch.library.Library) -> None:
    """Registers kernels for operators that PyTorch would otherwise decompose: all with a lowering, and their in-place
    variants.
    """
    for overload in [*lowerings, *_composite]:
        if overload.namespace == "aten" and overload not in _MADE_OF_OTHERS and not _is_taken(overload):
            library.impl(_name(overload).removeprefix("aten::"), _kernel(overload), "PrivateUse1")  # type: ignore[no-untyped-call]


def register_layers(library: torch.library.Library) -> None:
    """Registers kernels for our own operators, instead of those that compute them in parts. library: ours."""
    for overload in (*LAYERS, ATTENTION, ATTENTION_BACKWARD):
        library.impl(_name(overload).removeprefix("lapilli::"), _kernel(overload), "PrivateUse1")  # type: ignore[no-untyped-call]


def _name(overload: Overload) -> str:
    name: str = overload.name()  # type: ignore[no-untyped-call]
    return name


def _is_taken(overload: Overload) -> bool:
    """Whether it is a view, already has a kernel, or is composed of operators with gradients of their own."""
    name = _name(overload)
    if any(r.alias_info is not None and not r.alias_info.is_write for r in overload._schema.returns):
        return True
    keys = ("PrivateUse1", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)
