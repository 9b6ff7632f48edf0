"""A compiled graph on a device: a single launch, or a script with operators on the CPU between launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from lapilli.backend.size_sources import Sizes, Sources
from lapilli.backend.stream_interpreter import StreamInterpreter
from lapilli.eager import device_state
from lapilli.eager.method_call import MethodCall
from lapilli.lower.registry import RANDOM_KEY
from lapilli.player import NativeProgram
from lapilli.runtime.check import admit
from lapilli.runtime.description import Description
from lapilli.runtime.host import OWN
from lapilli.runtime.interface import interfaces
from lapilli.runtime.report import Report

Run = Callable[..., list[Any]]


_programs: weakref.WeakSet[GraphProgram] = weakref.WeakSet()


@device_state.on_loss.append
def _forget(index: int) -> None:
    for program in list(_programs):
        program._lost = program._lost or program._index == index


class GraphProgram:
    """A compiled graph, loaded on a device.

    inputs: names of the tensors and numbers that a call takes. report: where its operators run.
    """

    def __init__(self, data: bytes, index: int) -> None:
        self._data = data
        self._index = index
        self._open()
        _programs.add(self)

    def _open(self) -> None:
        data, index = self._data, self._index
        native = NativeProgram.load(data, device=index, verify=False, allow_host=True)
        description = Description.from_json(data, native.describe())
        (interface,) = interfaces(description)
        self._bounds = {s.name: s.max for m in description.methods for s in m.symbols if s.max is not None}
        self._lost = False
        self.report: Report = interface.report()
        self.symbols: list[str] = []
        if interface.script is not None:
            script = interface.script
            operators = admit([(script, interface.inputs, len(interface.outputs))], description, OWN, given=True)
            assert operators is not None, "torch is here"
            interpreter = StreamInterpreter(native, description, operators, index)
            self.inputs = [spec.name for spec in interface.inputs]
            given = [name for name, source in script.symbols.items() if source == ["given"]]
            self.symbols = [name for name in given if name not in RANDOM_KEY]  # launches draw these themselves
            self._run: Run = lambda sizes, values: interpreter.run(
                script, values, sizes=dict(zip(self.symbols, sizes, strict=True))
            )
            return
        assert interface.player is not None
        method = description.methods[interface.player]
        self.inputs = [spec.name for spec in method.inputs]
        call = MethodCall(native, interface.player, description, index)
        self.symbols, self._run = call.sizes, call

    @property
    def most(self) -> list[int | None]:
        """The largest values of the symbols."""
        return [self._bounds.get(name) for name in self.symbols]

    def sizes(self, sources: Sources, ranges: Mapping[Any, Any]) -> Sizes | None:
        """A function that computes the sizes of a call from the graph's arguments."""
        known = {s.name: s for s in ranges if isinstance(s, sympy.Symbol)}
        needed = [known[name] for name in self.symbols]
        return sources.function(needed) if needed else None

    def __call__(self, sizes: Sequence[int], values: list[Any], changed: Sequence[Any] = ()) -> list[Any]:
        """Runs on row-major tensors on the device, and numbers. changed: tensors there that are changed in place. Returns tensors
        on the device or, for a script, possibly on the CPU.
        """
        if self._lost:
            self._open()  # the device was lost, and is available again
        return self._run(sizes, values, changed) if changed else self._run(sizes, values)


def load(data: bytes, index: int) -> GraphProgram:
    """Loads a program. Raises NoDeviceError if the device satisfies no plan."""
    return GraphProgram(data, index)
