"""A program on tensors of the device "vulkan": its work is queued behind that of the tensors, and nothing is copied to the host."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

import lapilli
from lapilli.backend.launch import Launch, on_device
from lapilli.runtime.tensors import permuted, transposed

_launches: WeakKeyDictionary[lapilli.Program, Launch] = WeakKeyDictionary()


def run_on_device(program: lapilli.Program, args: Any, index: int) -> Any:
    """The outputs, nested as the model has them, on `vulkan:<index>`, where the program is loaded. Methods with operators on
    the CPU go there and back."""
    method = program.methods["forward"]
    interface = method._interface
    structure = interface.structure
    leaves = structure.flatten_call(args, {})
    if interface.player is None:
        values = method._run(method._values([t.cpu() if isinstance(t, torch.Tensor) else t for t in leaves])[0])
        results = [t.to(f"vulkan:{index}") for t in method._unwrapped(values, torch=True)]
        return structure.unflatten_outputs(results)
    described = program.description.methods[interface.player]
    launch = _launches.get(program)
    if launch is None:
        launch = Launch(program._open(), interface.player, described, len(described.inputs), index)
        _launches[program] = launch
    given = [
        on_device(t.contiguous(), None, index) for t in permuted(leaves, structure.inputs_last, method.inputs)
    ]  # fmt: skip
    results = launch(described.symbol_values(given), given)
    for k in structure.outputs_last:
        results[k] = transposed(results[k], (0, 3, 1, 2))
    return structure.unflatten_outputs(results)
