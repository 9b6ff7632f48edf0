"""Graphs with several segments: an interpreter of scripts that leaves values on the device between segments on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lapilli.eager import storage
from lapilli.eager.device_state import is_ours
from lapilli.eager.method_call import MethodCall
from lapilli.eager.transfer import on_device
from lapilli.player import NativeProgram
from lapilli.runtime.description import Description
from lapilli.runtime.host_script import HostCall
from lapilli.runtime.interpreter import HostInterpreter


class StreamInterpreter(HostInterpreter):
    """Runs a script on tensors on the CPU and a device; operators on the CPU get their operands copied there."""

    def __init__(
        self, native: NativeProgram, description: Description, operators: Mapping[str, Any], index: int
    ) -> None:
        super().__init__(native, description, operators, constant=lambda k: _tensor(description.constant(k)))
        self._index = index
        self._launches: dict[int, MethodCall] = {}

    def _guarded(self, call: HostCall, env: Any) -> list[Any]:
        """Exceptions stay PyTorch's: whoever calls a compiled function expects those of the operators in it."""
        try:
            return self._call(call, env)
        except Exception as error:
            if "." in call.op:
                error.add_note(f"{call.op} ran in torch on the CPU.")
            raise

    def _call(self, call: HostCall, env: Any) -> list[Any]:
        if call.op != "gpu":
            for name in _values(call.args) | _values(list(call.kwargs.values())):
                if name in env.values:
                    env.values[name] = _on_host(env.values[name])
            return super()._call(call, env)
        method = self.description.methods[call.method]
        given = env.argument(call.args[: len(method.inputs)])
        launch = self._launches.get(call.method)
        if launch is None:
            launch = self._launches[call.method] = MethodCall(self.native, call.method, self.description, self._index)
        sizes = [env.size(name) for name in launch.sizes]
        made: list[Any] = list(launch(sizes, [on_device(_tensor(v), None, self._index) for v in given]))
        return made


def _values(node: Any) -> set[str]:
    """Names of the values that an argument form reads."""
    if isinstance(node, list):
        return set().union(*map(_values, node))
    return {node["v"]} if isinstance(node, dict) and "v" in node else set()


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _on_host(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_on_host(v) for v in value]
    return storage.to_cpu(value) if isinstance(value, torch.Tensor) and is_ours(value) else value
