"""The metadata of a program's functions, in addition to the player's description of its methods: how inputs and outputs
nest, the script of a run that is more than one method of the player, and where operators run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lapilli.errors import InvalidFileError
from lapilli.runtime import host, limits, report
from lapilli.runtime.description import Description, SymbolSpec, TensorSpec
from lapilli.runtime.host_script import HostScript, segments
from lapilli.runtime.report import OperatorReport, Report
from lapilli.runtime.structure import Structure

METADATA_KEY = "lapilli.methods"
"""The metadata key of a program's interfaces, as JSON."""


@dataclass(frozen=True)
class Interface:
    """The metadata of a function. player: the player's method that computes all of it. Otherwise `script` combines several,
    and `inputs` and `outputs` are its arguments and results (the dtype "int" is a number).
    """

    name: str
    structure: Structure
    operators: tuple[OperatorReport, ...] = ()
    player: int | None = None
    script: HostScript | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def to_json(self) -> dict[str, Any]:
        node: dict[str, Any] = {"name": self.name, "structure": self.structure.to_json()}
        node["operators"] = report.to_json(self.operators)
        if self.script is None:
            return node | {"player": self.player}
        specs = {k: [asdict(s) for s in getattr(self, k)] for k in ("inputs", "outputs")}
        return node | {"script": self.script.to_json(), **specs}

    def report(self) -> Report:
        """Where its operators run."""
        return Report(("gpu",) if self.script is None else tuple(segments(self.script)), self.operators)

    @staticmethod
    def from_json(node: Any, description: Description) -> Interface:
        """Converts JSON. Raises InvalidFileError if it is not an interface of this file."""
        try:
            name, player = node["name"], node.get("player")
            structure = Structure.from_json(node["structure"])
            operators = report.from_json(node.get("operators", []))
            if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
                raise TypeError(f"{str(name)[:80]!r} is not the name of a method")
            if "script" in node:
                script = HostScript.from_json(node["script"])
                inputs, outputs = (_specs(node[k]) for k in ("inputs", "outputs"))
            else:
                script = None
                if type(player) is not int or not 0 <= player < len(description.methods):
                    raise TypeError(f"there is no method {player!r}")
                inputs, outputs = description.methods[player].inputs, description.methods[player].outputs
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidFileError(
                f"The description of methods in the program's metadata is damaged: {error}."
            ) from error
        structure.check(len(inputs), len(outputs))
        images = [inputs[k] for k in structure.inputs_last] + [outputs[k] for k in structure.outputs_last]
        if any(len(spec.shape) != 4 for spec in images):
            raise InvalidFileError(
                "The description of methods in the program's metadata is damaged: an image has four axes."
            )
        return Interface(name, structure, operators, None if script else player, script, inputs, outputs)


def dumps(interfaces: Sequence[Interface]) -> str:
    """The metadata string."""
    return json.dumps([i.to_json() for i in interfaces], separators=(",", ":"))


def interfaces(description: Description) -> list[Interface]:
    """The functions of a file; without the metadata, the player's methods. Raises InvalidFileError."""
    text = description.metadata.get(METADATA_KEY)
    if text is None:
        return [
            Interface(m.name, Structure.flat(len(m.inputs), len(m.outputs)), (), k, None, m.inputs, m.outputs)
            for k, m in enumerate(description.methods)
        ]
    nodes = limits.load_json(text, "The description of methods in the program's metadata")
    if not isinstance(nodes, list) or not 0 < len(nodes) <= _MOST_METHODS:
        raise InvalidFileError("The program's metadata describes no method, or too many.")
    found = [Interface.from_json(node, description) for node in nodes]
    if len({i.name for i in found}) != len(found):
        raise InvalidFileError("The program's metadata describes two methods of one name.")
    return found


_LONGEST_NAME = 4096
_MOST_METHODS = 4096
_SIZE_FIELDS = {"name": (str,), "min": (int,), "max": (int, type(None)), "input": (int,), "axis": (int,), "factor": (int,),
                "offset": (int,), "given": (bool,)}  # fmt: skip
_DTYPES = (*host.DTYPES, "int", "float")


def _specs(nodes: Any) -> tuple[TensorSpec, ...]:
    """Raises TypeError or KeyError if the JSON is not a list of tensors."""
    if not isinstance(nodes, list):
        raise TypeError(f"{str(nodes)[:80]!r} is not a list of tensors")
    return tuple(map(_spec, nodes))


def _spec(node: Any) -> TensorSpec:
    name, dtype, shape = node["name"], node["dtype"], node["shape"]
    sizes = isinstance(shape, list) and len(shape) <= 64 and all(type(size) in (int, str) for size in shape)
    if (
        not isinstance(name, str)
        or dtype not in _DTYPES
        or not sizes
        or node.keys() - {"name", "dtype", "shape", "symbols"}
    ):
        raise TypeError(f"{str(node)[:80]!r} is not a tensor")
    symbols = []
    for given in node["symbols"]:
        if given.keys() - _SIZE_FIELDS.keys() or any(type(given[k]) not in _SIZE_FIELDS[k] for k in given):
            raise TypeError(f"{str(given)[:80]!r} is no size")
        symbols.append(SymbolSpec(**given))
    return TensorSpec(name, dtype, tuple(shape), tuple(symbols))
