"""The implementation of the operator `lapilli::run`: a Lapilli program as a single call in a torch graph.

    lapilli::run(Tensor program, Tensor[] inputs, SymInt[] sizes, str interface) -> Tensor[]

`program` holds the bytes of the program file (uint8), which makes them part of the exported program. `interface` is JSON
with the shapes of the results, for tracing. `registration` registers the operator.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lapilli.errors import InvalidFileError
from lapilli.runtime import arithmetic, host
from lapilli.runtime.limits import load_json
from lapilli.runtime.program import Program
from lapilli.runtime.seeding import draw_key
from lapilli.runtime.sizes import OPERATIONS, Operations, evaluate

_programs: Any = WeakIdKeyDictionary()
_by_content: weakref.WeakValueDictionary[bytes, Program] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class CallInterface:
    """Inputs and outputs of a call.

    inputs: for every input of the program, the index of a tensor and the order of its axes in memory (null: row-major).
    outputs: dtype, shape (of TREEs: numbers, names of sizes, [operation, TREE, TREE]) and the order of the axes in memory.
    symbols: where a size is read: [tensor, axis, factor, offset], or an index into `sizes`.
    """

    def __init__(self, text: str) -> None:
        node = load_json(text, "The interface of a call of lapilli::run")
        try:
            good = isinstance(node, dict) and node.keys() == {"inputs", "outputs", "symbols"} and _is_interface(node)
        except RecursionError:
            good = False
        if not good:
            raise InvalidFileError(
                "The interface of a call of lapilli::run is damaged; make the exported program again."
            )
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
def interface_of(text: str) -> CallInterface:
    """The interface given by its JSON."""
    return CallInterface(text)


def dumps(inputs: Sequence[Any], outputs: Sequence[Any], symbols: dict[str, Any]) -> str:
    """The JSON of an interface."""
    return json.dumps({"inputs": inputs, "outputs": outputs, "symbols": symbols}, separators=(",", ":"))


_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in host.DTYPES}


def _is_interface(node: dict[str, Any]) -> bool:
    """Whether JSON, which comes from an exported program, has the form described by `CallInterface`."""
    inputs, outputs, symbols = node["inputs"], node["outputs"], node["symbols"]
    if not (isinstance(inputs, list) and isinstance(outputs, list) and isinstance(symbols, dict)):
        return False
    sources = all(_is_number(s) or (_is_list(s, 4) and all(map(_is_number, s)) and s[2] > 0) for s in symbols.values())
    given = all(_is_list(i, 2) and _is_number(i[0]) and _is_order(i[1]) for i in inputs)
    return sources and given and all(
        _is_list(o, 3) and o[0] in host.DTYPES and isinstance(o[1], list) and all(_is_tree(t, symbols) for t in o[1])
        and _is_order(o[2], len(o[1]))
        for o in outputs
    )  # fmt: skip


def _is_list(node: Any, length: int) -> bool:
    return isinstance(node, list) and len(node) == length


def _is_number(node: Any) -> bool:
    return type(node) is int and abs(node) <= arithmetic.INT_MAX


def _is_order(node: Any, rank: int | None = None) -> bool:
    return node is None or (
        isinstance(node, list)
        and all(map(_is_number, node))
        and sorted(node) == list(range(len(node)))
        and rank in (None, len(node))
    )


def _is_tree(node: Any, symbols: dict[str, Any], depth: int = 0) -> bool:
    if isinstance(node, list) and len(node) == 3 and depth < 200:
        return node[0] in tuple(OPERATIONS) and all(_is_tree(part, symbols, depth + 1) for part in node[1:])
    return node in symbols if isinstance(node, str) else _is_number(node)


_SYMBOLIC: Operations = {**OPERATIONS, "min": torch.sym_min, "max": torch.sym_max}
"""Operations that do not compare two sizes."""


def fake(
    program: torch.Tensor, inputs: Sequence[torch.Tensor], sizes: Sequence[Any], interface: str
) -> list[torch.Tensor]:
    """Tensors with the shapes of the results."""
    made = interface_of(interface)
    known = made.sizes(inputs, sizes)
    device = inputs[0].device if inputs else torch.device("cpu")
    results = []
    for dtype, shape, order in made.outputs:
        lengths = [evaluate(tree, known.__getitem__, lambda f, a, b: _SYMBOLIC[f](a, b)) for tree in shape]
        if order is not None:
            lengths = [lengths[d] for d in order]
        result = torch.empty(lengths, dtype=_DTYPES[dtype], device=device)
        results.append(_in_order(result, order))
    return results


def run(
    program: torch.Tensor, inputs: Sequence[torch.Tensor], sizes: Sequence[int], interface: str
) -> list[torch.Tensor]:
    """The results, on the device of the first input."""
    made = interface_of(interface)
    known = made.sizes(inputs, sizes)
    loaded = _loaded(program)
    method = loaded.methods["forward"]
    device = inputs[0].device if inputs else torch.device("cpu")
    stays = method.takes(device.type, device.index) and all(t.device == device for t in inputs)
    place = device if stays else torch.device("cpu")
    values = []
    for number, order in made.inputs:
        tensor = inputs[number].detach().to(place)
        values.append(tensor if order is None else tensor.permute(order))
    draw_key(loaded)
    outputs = method.run_tensors(values, known)
    return [
        _in_order(value, order).to(device) for value, (_, _, order) in zip(outputs, made.outputs, strict=True)
    ]  # fmt: skip


def _in_order(value: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    return value if order is None else value.permute([order.index(d) for d in range(len(order))])


def _loaded(tensor: torch.Tensor) -> Program:
    """The program in a tensor. It is loaded once for equal bytes, and for as long as a tensor with them exists."""
    with _lock:
        program = _programs.get(tensor)
        if program is None:
            data = tensor.detach().cpu().numpy().tobytes()
            digest = hashlib.sha256(data).digest()
            program = _by_content.get(digest)
            if program is None:
                program = _by_content[digest] = Program(data, permission=host.Permission(none=True))
            _programs[tensor] = program
    found: Program = program
    return found
