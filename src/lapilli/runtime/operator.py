"""The operator `lapilli::run`: a program of Lapilli's as one call in a graph of torch's.

    lapilli::run(Tensor program, Tensor[] inputs, SymInt[] sizes, str interface) -> Tensor[]

`program` holds the bytes of the program file (uint8), so that they travel in the exported program; `interface` is JSON that says
what shapes come out, for those who trace the call. Importing `lapilli` where torch is imported registers the operator."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lapilli.errors import InvalidInputError

if TYPE_CHECKING:
    from lapilli.runtime.program import Program

Tree = int | str | list[Any]

_SCHEMA = "run(Tensor program, Tensor[] inputs, SymInt[] sizes, str interface) -> Tensor[]"
_library: Any = torch.library.Library("lapilli", "DEF")  # type: ignore[no-untyped-call]
_library.define(_SCHEMA)

_programs: Any = WeakIdKeyDictionary()
_by_content: weakref.WeakValueDictionary[bytes, Program] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Interface:
    """What goes in and comes out.

    inputs: for every input of the program the number of a tensor and the order of its axes in memory (null: row-major), or
    the name of a size that the program is told by an input of shape [size, 0]. outputs: dtype, shape (of TREEs: numbers, names
    of sizes, [operation, TREE, TREE]) and the order of the axes in memory. symbols: where a size is read: [tensor, axis,
    factor, offset], or the number in `sizes`."""

    def __init__(self, text: str) -> None:
        node = json.loads(text)
        self.inputs: list[Any] = node["inputs"]
        self.outputs: list[Any] = node["outputs"]
        self.symbols: dict[str, Any] = node["symbols"]

    def sizes(self, inputs: Sequence[torch.Tensor], sizes: Sequence[Any]) -> dict[str, Any]:
        """The sizes of a call, by name."""
        found: dict[str, Any] = {}
        for name, source in self.symbols.items():
            if isinstance(source, int):
                found[name] = sizes[source]
            else:
                tensor, axis, factor, offset = source
                size = inputs[tensor].shape[axis]
                found[name] = size if (factor, offset) == (1, 0) else (size - offset) // factor
        return found


@lru_cache
def interface_of(text: str) -> Interface:
    """The interface that a call names."""
    return Interface(text)


def dumps(inputs: Sequence[Any], outputs: Sequence[Any], symbols: dict[str, Any]) -> str:
    """The JSON of an interface."""
    return json.dumps({"inputs": inputs, "outputs": outputs, "symbols": symbols}, separators=(",", ":"))


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "*": lambda a, b: a * b, "//": lambda a, b: a // b, "%": lambda a, b: a % b,
    "min": torch.sym_min, "max": torch.sym_max,
}  # fmt: skip


def _size(tree: Tree, sizes: dict[str, Any]) -> Any:
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return sizes[tree]
    return _OPERATIONS[tree[0]](_size(tree[1], sizes), _size(tree[2], sizes))


def _fake(
    program: torch.Tensor, inputs: Sequence[torch.Tensor], sizes: Sequence[Any], interface: str
) -> list[torch.Tensor]:
    made = interface_of(interface)
    known = made.sizes(inputs, sizes)
    device = inputs[0].device if inputs else torch.device("cpu")
    results = []
    for dtype, shape, order in made.outputs:
        lengths = [_size(tree, known) for tree in shape]
        if order is not None:
            lengths = [lengths[d] for d in order]
        result = torch.empty(lengths, dtype=getattr(torch, dtype), device=device)
        results.append(_in_order(result, order))
    return results


torch.library.register_fake("lapilli::run", _fake, lib=_library)


def _run(
    program: torch.Tensor, inputs: Sequence[torch.Tensor], sizes: Sequence[int], interface: str
) -> list[torch.Tensor]:
    made = interface_of(interface)
    known = made.sizes(inputs, sizes)
    values = []
    for source in made.inputs:
        if isinstance(source, str):
            values.append(torch.empty((known[source], 0), dtype=torch.uint8))
        else:
            tensor = inputs[source[0]].detach().cpu()
            values.append(tensor if source[1] is None else tensor.permute(source[1]))
    outputs = _loaded(program).methods["forward"].run_tensors(values)
    device = inputs[0].device if inputs else torch.device("cpu")
    return [
        _in_order(value, order).to(device) for value, (_, _, order) in zip(outputs, made.outputs, strict=True)
    ]  # fmt: skip


_library.impl("run", _run, "CompositeExplicitAutograd")


def _backward(ctx: Any, *gradients: Any) -> Any:
    raise InvalidInputError("a lowered module has no gradients: train the module that it was lowered from")


torch.library.register_autograd("lapilli::run", _backward, lib=_library)


def _in_order(value: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    return value if order is None else value.permute([order.index(d) for d in range(len(order))])


def _loaded(tensor: torch.Tensor) -> Program:
    """The program in a tensor, loaded once for equal bytes, and for as long as a tensor with them lives."""
    with _lock:
        program = _programs.get(tensor)
        if program is None:
            data = tensor.detach().cpu().numpy().tobytes()
            program = _by_content.get(data[:_HEADER])
            if program is None:
                from lapilli.runtime.program import Program

                program = _by_content[data[:_HEADER]] = Program._from_bytes(data)
            _programs[tensor] = program
    found: Program = program
    return found


_HEADER = 64  # with the checksum of all that follows
