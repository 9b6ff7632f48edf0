"""Saves and loads TorchScript and exported programs: weights on the device are saved as CPU tensors.

PyTorch's C++ writes the bytes of a tensor's storage. Ours has none, so that it would silently write empty weights.
Everything is therefore moved to the CPU while it is written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lapilli.eager import device_state
from lapilli.torch_compat import replace

_jit: Any = torch.jit  # its functions have no types


def patch() -> None:
    """Wraps the functions that save and load scripted modules and exported programs."""
    for name in ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter"):
        for kind in (_jit.RecursiveScriptModule, _jit.ScriptModule):  # each has methods of its own
            _wrap(kind, name, _on_host)
        if hasattr(torch.jit.ScriptFunction, name):
            _wrap(torch.jit.ScriptFunction, name, _function_on_host)
    load = _jit.load

    @functools.wraps(load)
    def jit_load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is not None and torch.device(map_location).type == "vulkan":
            index = device_state.index_of(map_location)
            return _moved(load(f, "cpu", *args, **kwargs), torch.device("vulkan", index))
        return load(f, map_location, *args, **kwargs)

    replace(_jit, "load", jit_load)
    trace: Any = torch.jit._trace
    replace(trace, "_trace_impl", _without_stored_inputs(trace._trace_impl))  # of torch.jit.trace, under all its names
    replace(_jit, "trace_module", _without_stored_inputs(_jit.trace_module))


def _without_stored_inputs(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Tracing that does not store example inputs on the device with the module: they could not be taken out to be saved."""

    bind = inspect.signature(trace).bind

    @functools.wraps(trace)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = bind(*args, **kwargs)
        if _holds_tensor(given.arguments, _is_ours):
            given.arguments["_store_inputs"] = False
        return trace(*given.args, **given.kwargs)

    return wrapped


def _wrap(owner: Any, name: str, on_host: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with on_host(self):
            return theirs(self, *args, **kwargs)

    replace(owner, name, method)


@contextlib.contextmanager
def _on_host(module: Any) -> Iterator[None]:
    """A context in which all tensors of a scripted module are on the CPU."""
    before: list[tuple[Any, str, Any]] = []
    with contextlib.ExitStack() as stack:
        for graph in _graphs(module):
            stack.enter_context(_graph_on_host(graph))
        try:
            for script, name, value in _attributes(module):
                if _holds_tensor(value, _is_ours):
                    before.append((script, name, value))
            copies = _Copies(torch.device("cpu"))
            for script, name, value in before:
                script.setattr(name, copies.of(value))
            yield
        finally:
            for script, name, value in before:
                script.setattr(name, value)


def _moved(module: Any, device: torch.device) -> Any:
    """A scripted module that was just loaded, with all its tensors on a device."""
    copies = _Copies(device)
    for graph in _graphs(module):
        for node, value in _constants(graph):
            node.t_("value", copies.of(value))
    for script, name, value in _attributes(module):
        script.setattr(name, copies.of(value))
    return module


class _Copies:
    """Copies on a device; the same tensor gives the same copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """The copy of a tensor, or of a container of them."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(element) for element in value)
        if isinstance(value, dict):
            return {key: self.of(element) for key, element in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value.detach().to(self._device).requires_grad_(value.requires_grad)
        return self._made[id(value)]


def _attributes(module: Any) -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of everything that scripted modules hold: parameters, buffers, and attributes that their code
    reads.
    """
    read = {node.s("name") for graph in _graphs(module) for node in graph.findAllNodes("prim::GetAttr")}
    kinds: tuple[Any, ...] = (torch._C.ParameterDict, torch._C.BufferDict)
    found = []
    for part in module.modules():
        script = part._c
        names = {name for kind in kinds for name, _ in kind(script).items()}
        for name in sorted(names | read):
            if script.hasattr(name) and _holds_tensor(value := script.getattr(name)):
                found.append((script, name, value))
    return found


def _holds_tensor(value: Any, such: Callable[[torch.Tensor], bool] = lambda tensor: True) -> bool:
    """Whether a value is a tensor, or a container with one, for which `such` holds."""
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(element, such) for element in value)
    if isinstance(value, dict):
        return any(_holds_tensor(element, such) for element in value.values())
    return isinstance(value, torch.Tensor) and such(value)


def _is_ours(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "vulkan"


@contextlib.contextmanager
def _graph_on_host(graph: Any) -> Iterator[None]:
    """A context in which the constants of a traced graph are on the CPU."""
    before = [(node, value) for node, value in _constants(graph) if _is_ours(value)]
    try:
        for node, value in before:
            node.t_("value", value.cpu())
        yield
    finally:
        for node, value in before:
            node.t_("value", value)


def _constants(graph: Any) -> list[tuple[Any, torch.Tensor]]:
    nodes = [node for node in graph.findAllNodes("prim::Constant") if node.hasAttribute("value")]
    return [(node, node.t("value")) for node in nodes if node.kindOf("value") == "t"]


def _graphs(module: Any) -> list[Any]:
    return [part._c._get_method(name).graph for part in module.modules() for name in part._c._method_names()]


def _function_on_host(function: Any) -> contextlib.AbstractContextManager[None]:
    return _graph_on_host(function.graph)
