"""Launches of operators: a program bound to one exact form of a call (sizes, strides, types), with the call's values
converted.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lapilli.eager import device_copy, heavy_calls, int64_checks, storage, transfer
from lapilli.eager.call_signature import CallSignature, CannotRun, NumberOperand, TensorOperand, operand
from lapilli.eager.launch import Key, Launch, Place, Run, Symbol, bits
from lapilli.eager.operator_schema import Schema
from lapilli.eager.programs import TOO_LARGE, load, programs_of, with_numbers
from lapilli.errors import NoDeviceError
from lapilli.ir.node import MOST_ELEMENTS

REFUSED = {torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64}
"""Types that kernels do not support."""

aten = torch.ops.aten


def _checked(dtype: torch.dtype, number: Any) -> int:
    """`bits` of a Scalar for a kernel on floats. Raises CannotRun for a number that the dtype cannot represent; mostly,
    torch rejects it with an exception.
    """
    if math.isfinite(number) and abs(number) > torch.finfo(dtype).max:
        raise CannotRun(f"the number {number} does not fit into {str(dtype).removeprefix('torch.')}")
    return bits(number)


def _check(leaves: Sequence[Any], operands: Sequence[TensorOperand]) -> Callable[[Any], int]:
    """The conversion of a call's Scalars to 32 bits."""
    named = [leaf for leaf in leaves if isinstance(leaf, torch.dtype)]
    types = named or [x.dtype for x in operands if x.dtype.is_floating_point]
    return functools.partial(_checked, types[0]) if types and types[0].is_floating_point else bits


class OperatorLaunch:
    """Called with the arguments, and the tensors and numbers among them; queues the work and returns the results.

    Raises CannotRun if the device cannot compute with the given values.
    """

    def __init__(
        self,
        schema: Schema,
        leaves: list[Any],
        given: ArgumentPlaces,
        tensors: list[torch.Tensor],
        numbers: list[Any],
        index: int,
    ) -> None:
        """leaves: all arguments, in the schema's order. Raises CannotRun."""
        choice = heavy_calls.choose(signature_of(schema, leaves, given), index)
        target, signature, self.passing = choice.target, choice.signature, choice.passing
        operands = signature.operands()
        for x in operands:
            if math.prod(n for d, n in enumerate(x.shape) if d not in x.expanded) > MOST_ELEMENTS:
                raise CannotRun("it has more elements than kernels can count")
            if x.dtype in REFUSED:
                raise CannotRun(f"{str(x.dtype).removeprefix('torch.')} is not supported on the GPU")
        self.schema, self.index = schema, index
        self.numbers = _numbers(schema, given, tensors)
        values = [self._number(source, tensors, numbers) for source in self.numbers]
        for value in (*values, *(leaves[k] for k in schema.numeric if type(leaves[k]) is int)):
            bits(value)
        check = _check(leaves, operands)
        for k in schema.scalars:
            if type(leaves[k]) in (float, int):
                check(leaves[k])
        scalars = {given.numbers[k] for k in schema.scalars}
        conversions = [check if not tensor and place in scalars else bits for place, tensor in self.numbers]
        wanted = with_numbers(signature, values) if _may_overflow(schema, operands, values) else signature
        program, found = programs_of(target).find(wanted, values if wanted is signature else ())
        self.constant = found is not signature or not schema.runtime_numbers
        """Whether numbers are compiled in."""
        compiled = program.compiled
        self.tree = compiled.tree
        self.results = program.results(operands)
        if any(math.prod(shape) > MOST_ELEMENTS for shape, _, _ in self.results):
            raise CannotRun("its result has more elements than kernels can count")
        self.limit = int64_checks.limit(schema.computed, leaves, given.tensors, given.numbers, self.results)
        self.inputs = _inputs(schema, given, tensors)
        try:
            loaded = program.loaded(index, functools.partial(load, index))
        except NoDeviceError as error:  # programs are compiled for the device: only sizes can be too large
            raise CannotRun(TOO_LARGE) from error
        self.given = [k for kind, k, _, _ in compiled.symbols if kind == "number"]
        self.launch = Launch(
            loaded,
            0,
            index,
            [_symbol(source, operands, conversions) for source in compiled.symbols],
            [tensors[k].dtype for k in self.inputs],
            len(self.results),
            sums=any(dtype is torch.int64 for _, _, dtype in self.results),
        )
        self.gathered = {k: o.order for k, o in enumerate(operands) if o.strided}
        self.generator = schema.names.index("generator") if "generator" in schema.names else None
        self.work = any(0 not in shape for shape, _, _ in self.results)
        self.aligned = compiled.aligned
        self.stored = dict(schema.stored)
        self.direct = {k for k, position in schema.stored if self._has_layout(k, leaves[position])}

    def _has_layout(self, k: int, target: Any) -> bool:
        """Whether an argument has the layout in which the program writes a result."""
        shape, strides, dtype = self.results[k]
        if not isinstance(target, torch.Tensor) or tuple(target.shape) != shape or target.dtype != dtype:
            return False
        seen = operand(target)
        return not (seen.strided or seen.expanded) and device_copy.dense_strides(shape, seen.order) == strides

    def _number(self, source: tuple[int, bool], tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Any:
        place, is_tensor = source
        return tensors[place].item() if is_tensor else numbers[place]

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor], numbers: Sequence[Any]
    ) -> Any:
        inputs = [tensors[k] for k in self.inputs]
        self.launch.check(inputs)
        if self.limit is not None:
            self.limit.check(tensors, numbers)
        given = [self._number(self.numbers[k], tensors, numbers) for k in self.given] if self.given else ()
        generator = None if self.generator is None else self._argument(self.generator, args, kwargs)
        words = self.launch.bind(given, generator)
        made: list[torch.Tensor] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, (shape, strides, dtype) in enumerate(self.results):
            target = self._target(k, args, kwargs, shape, strides)
            if target is not None and k in self.direct and self.launch.may_write(target, inputs, self.aligned[k]):
                made.append(target)
                continue
            result = storage.empty(shape, dtype, self.index, strides)
            made.append(result)
            if target is not None:
                later.append((target, result))
        if self.work:
            for k, order in self.gathered.items():
                inputs[k] = device_copy.gather(inputs[k], None, order)
        self.launch.queue(words, inputs, made)
        for target, result in later:
            transfer.copy_(target, result)
        return self._returned(made, args, kwargs)

    def _argument(self, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[position] if position < len(args) else kwargs.get(self.schema.names[position])

    def _target(
        self, k: int, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor | None:
        """The argument to which a result is written; an out argument is resized."""
        position = self.stored.get(k)
        if position is None:
            return None
        target: torch.Tensor | None = self._argument(position, args, kwargs)
        if target is not None and position in self.schema.outs and tuple(target.shape) != shape:
            resize_out(target, shape, strides)
        return target

    def _returned(self, made: list[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        returned = self.schema.returned
        if not returned:
            return None
        if len(returned) == 1 and returned[0] is not None:
            return self._argument(returned[0], args, kwargs)
        if isinstance(self.tree, int):
            return made[0]
        found: list[Any] = [
            None if part == -1 else [made[k] for k in part] if isinstance(part, list) else made[part]
            for part in self.tree
        ]
        if len(returned) == 1:
            return found if self.schema.listed else found[0]
        return tuple(
            found[k] if place is None else self._argument(place, args, kwargs) for k, place in enumerate(returned)
        )

    def fast(self, tensors: Sequence[torch.Tensor]) -> Run:
        """The call as a function with as little overhead as possible, for most operators of a model: those with nothing to
        gather, draw, or check for large integers. Otherwise the launch itself. tensors: those of the call, with the strides
        of all such calls.
        """
        if self.schema.listed or any(0 in shape for shape, _, _ in self.results) or set(self.stored) - self.direct:
            return self
        if not self.launch.is_plain or self.gathered or self.limit or any(is_tensor for _, is_tensor in self.numbers):
            return self
        numbers = [self.numbers[k][0] for k in self.given]
        if len(self.results) != 1 or self.tree not in (0, [0]):
            return self._fast_several(tensors, numbers)
        shape, strides, dtype = self.results[0]
        if not self.stored:
            return self.launch.fast_new(self.inputs, numbers, shape, strides, dtype, self)
        return self.launch.fast_in_place(self.inputs, numbers, self._place(0, tensors), dtype.itemsize, self)

    def _fast_several(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Run:
        """The same for several results, if all that the call returns are new tensors."""
        tree, returned = self.tree, self.schema.returned
        if not isinstance(tree, list) or len(returned) < 2 or any(place is not None for place in returned):
            return self
        if any(isinstance(part, list) for part in tree):
            return self
        places = [self._place(k, tensors) if k in self.stored else None for k in range(len(self.results))]
        parts = [None if part == -1 else part for part in tree[: len(returned)]]
        return self.launch.fast_several(self.inputs, numbers, self.results, places, parts, self)

    def _place(self, result: int, tensors: Sequence[torch.Tensor]) -> Place:
        """The argument that a result is written to."""
        position = self.stored[result]
        safe = {
            k
            for k in self.inputs
            if all(i in self.aligned[result] for i, other in enumerate(self.inputs) if other == k)
            and tensors[k].stride() == self.results[result][1]
        }
        return Place(position, self.schema.names[position], safe)


def _symbol(
    source: tuple[str, int, int, int], operands: Sequence[TensorOperand], conversions: Sequence[Callable[[Any], int]]
) -> Symbol:
    """The value of a symbol of a compiled program, or its source: a number of the call, or of the random key."""
    kind, k, d, unit = source
    if kind == "size":
        return operands[k].shape[d] // unit
    return conversions[k] if kind == "number" else Key(k)


@dataclass
class ArgumentPlaces:
    """Positions of the arguments: for each one, in the schema's order, the indices of its tensors among the call's tensors,
    and the index of its number among the call's numbers.
    """

    tensors: list[list[int]]
    numbers: list[int | None]


def places(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentPlaces:
    """The positions, in the order in which a kernel collects tensors and numbers."""
    found = ArgumentPlaces([[] for _ in schema.names], [None] * len(schema.names))
    tensors = numbers = 0
    for k, leaf in [*enumerate(args), *((schema.names.index(name), leaf) for name, leaf in kwargs.items())]:
        for x in leaf if isinstance(leaf, list | tuple) else (leaf,):
            if isinstance(x, torch.Tensor):
                found.tensors[k].append(tensors)
                tensors += 1
        if k in schema.numeric and is_runtime(leaf):
            found.numbers[k] = numbers
            numbers += 1
    return found


def _inputs(schema: Schema, given: ArgumentPlaces, tensors: Sequence[torch.Tensor]) -> list[int]:
    """The operands of the program, as indices into the call's tensors."""
    kept = [place for k, found in enumerate(given.tensors) if k not in schema.outs for place in found]
    return [place for place in kept if not _is_number(tensors[place])]


def _numbers(schema: Schema, given: ArgumentPlaces, tensors: Sequence[torch.Tensor]) -> list[tuple[int, bool]]:
    """The numbers of the program: an index, and whether it is into the call's tensors (otherwise into its numbers)."""
    found: list[tuple[int, bool]] = []
    for k in range(len(schema.names)):
        if k in schema.outs:
            continue
        found += [(place, True) for place in given.tensors[k] if _is_number(tensors[place])]
        number = given.numbers[k]
        if number is not None and schema.runtime_numbers:
            found.append((number, False))
    return found


def _may_overflow(schema: Schema, operands: Sequence[TensorOperand], values: Sequence[Any]) -> bool:
    """Whether floats are stored as integers: torch rejects those that do not fit, and so do lowerings that know them."""
    filled = schema.computed in _FILLING and bool(operands) and not operands[0].dtype.is_floating_point
    return filled and any(type(v) is float for v in values)


_FILLING = {
    aten.constant_pad_nd.default, aten.pad.default, aten.masked_fill.Scalar, aten.index_fill.int_Scalar, aten.scatter.value,
    aten.fill.Scalar,
}  # fmt: skip


def is_runtime(leaf: Any) -> bool:
    """Whether a number may vary between calls; 0 and 1 often have a special meaning."""
    return type(leaf) in (float, int) and leaf not in (0, 1)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


_TRACED = torch.device("cpu")
"""The device for which operators are traced."""


def signature_of(schema: Schema, leaves: Sequence[Any], given: ArgumentPlaces) -> CallSignature:
    """The signature of a call. Numbers that are defaults are fixed; those that were given may vary between calls."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if _is_number(leaf):
                return NumberOperand("float" if leaf.is_floating_point() else "int", leaf.dtype)
            return operand(leaf)
        if isinstance(leaf, torch.device):
            return _TRACED  # whatever name it was given by
        return tuple(map(one, leaf)) if isinstance(leaf, list | tuple) else leaf

    def argument(k: int, leaf: Any) -> Any:
        if k in schema.outs:
            return leaf.dtype
        if schema.names[k] == "generator":
            return None
        if schema.runtime_numbers and given.numbers[k] is not None:
            return NumberOperand(type(leaf).__name__)
        return one(leaf)

    return CallSignature(schema, tuple(argument(k, leaf) for k, leaf in enumerate(leaves)))


def resize_out(target: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Resizes an out argument, with the strides that the result has without it."""
    if target.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(target.shape)}, which does not match the "
            f"required output shape {list(shape)}.",
            UserWarning,
            stacklevel=2,
        )
    target.resize_(shape)
    if target.stride() != tuple(strides):
        target.as_strided_(shape, strides)
