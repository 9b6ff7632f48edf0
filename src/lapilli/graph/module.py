"""An exported model together with its constants, on which the graph passes work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from lapilli.errors import CompileError


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where in memory a tensor's elements are, and what they are."""
    return tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype


@dataclass
class ModuleState:
    """A buffer of the model that a run changes: its name in the model, its initial value, and its new value in the graph
    (None if only other methods change it). given: a tensor of the caller's, which a run changes in place.
    """

    name: str
    value: torch.Tensor
    new: fx.Node | None
    given: bool = False


@dataclass
class Module:
    """An FX graph of ATen calls, and its surroundings.

    constants: the tensors of placeholders that are not inputs. outputs: values in order. fixed_inputs, fixed_outputs:
    leaves of the call that are not tensors, by position. ranges: bounds of size symbols. states: buffers that a run
    changes, by placeholder. updates: input tensors that a run changes, by number; their new values are the last outputs.
    targets: names of the constants in the model. arrays: what `array` and `holds` have returned.
    """

    graph: fx.Graph
    constants: dict[fx.Node, torch.Tensor]
    outputs: list[fx.Node]
    fixed_inputs: dict[int, Any]
    fixed_outputs: dict[int, Any]
    ranges: Mapping[Any, Any]
    states: dict[fx.Node, ModuleState] = field(default_factory=dict)
    updates: list[int] = field(default_factory=list)
    arrays: dict[Any, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    targets: dict[fx.Node, str] = field(default_factory=dict)
    owner: torch.nn.Module | None = None  # holds the graphs of control flow as attributes

    def short_floats(self) -> set[torch.dtype]:
        """The types of 16-bit floats of which the model has values."""
        values = (n.meta.get("val") for n in self.graph.nodes)
        found = {v.dtype for v in values if isinstance(v, torch.Tensor)}
        return found & {torch.float16, torch.bfloat16}

    @classmethod
    def of_branch(cls, branch: fx.GraphModule, ranges: Mapping[Any, Any]) -> Module:
        """The module of a graph within control flow; all its placeholders are inputs."""
        graph = fx.Graph()
        returned: Any = graph.graph_copy(branch.graph, {})
        graph.output(returned)
        outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
        return cls(graph, {}, outputs, {}, {}, ranges, owner=branch)

    @classmethod
    def from_exported(cls, program: ExportedProgram, copy: bool = False) -> Module:
        """The module of an exported program. copy: whether to leave the program's own graph unchanged."""
        graph = program.graph_module.graph
        if copy:
            graph = fx.Graph()
            result = graph.graph_copy(program.graph_module.graph, {})
            graph.output(result)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        constants: dict[fx.Node, torch.Tensor] = {}
        fixed_inputs: dict[int, Any] = {}
        tensors: list[str] = []
        buffers: dict[str, fx.Node] = {}
        position = 0
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(spec.arg, ConstantArgument):
                    fixed_inputs[position] = spec.arg.value
                else:
                    tensors.append(spec.arg.name)
                position += 1
                continue
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                assert spec.target is not None
                source = program.state_dict if spec.target in program.state_dict else program.constants
                constants[node] = source[spec.target].detach()
                buffers[spec.target] = node
            else:
                raise CompileError(
                    f"the exported program has an input of kind {spec.kind.name}, which is not supported"
                )
        returned = next(n for n in graph.nodes if n.op == "output").args[0]
        outputs: list[fx.Node] = []
        fixed_outputs: dict[int, Any] = {}
        states: dict[fx.Node, ModuleState] = {}
        updates: dict[int, fx.Node] = {}
        place = 0
        for spec, value in zip(program.graph_signature.output_specs, returned, strict=True):
            if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
                node = buffers[str(spec.target)]
                states[node] = ModuleState(str(spec.target), constants.pop(node), value)
                continue
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                updates[tensors.index(str(spec.target))] = value
                continue
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise CompileError(
                    f"the exported program has an output of kind {spec.kind.name}, which is not supported"
                )
            if isinstance(value, fx.Node):
                outputs.append(value)
            else:
                fixed_outputs[place] = value
            place += 1
        outputs += updates.values()
        targets = {node: target for target, node in buffers.items()}
        ranges, owner = program.range_constraints, program.graph_module
        return cls(
            graph, constants, outputs, fixed_inputs, fixed_outputs, ranges, states, list(updates), targets=targets, owner=owner
        )  # fmt: skip

    def add_constant(self, tensor: torch.Tensor, name: str) -> fx.Node:
        """Adds a constant before all calls."""
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.meta["val"] = tensor
        self.constants[node] = tensor
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replaces a value by another in all users, including the outputs."""
        old.replace_all_uses_with(new)
        self.outputs = [new if o is old else o for o in self.outputs]
        for state in self.states.values():
            state.new = new if state.new is old else state.new

    def clean(self) -> None:
        """Removes calls and constants that are not read."""
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "call_function" or node in self.constants):
                self.constants.pop(node, None)
                self.graph.erase_node(node)

    def array(self, node: fx.Node, dtype: torch.dtype | None = None) -> npt.NDArray[Any]:
        """A constant, or the initial value of a state, as a NumPy array (bfloat16 as its bits), rounded to `dtype` if one is given.
        The same array is returned every time, and for the same memory in all modules that share `arrays`.
        """
        given = self.states[node].value if node in self.states else self.constants[node]
        key = (*_identity(given), dtype)
        if key not in self.arrays:
            tensor = given
            whole = None if dtype is None else self._whole(tensor)
            if whole is not None:
                first = tensor.storage_offset() - self.constants[whole].storage_offset()
                rounded = self.array(whole, dtype).reshape(-1)
                array = rounded[first : first + tensor.numel()].reshape(tensor.shape)
            else:
                tensor = tensor.detach().contiguous()
                tensor = tensor if dtype is None else tensor.to(dtype)
                array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
            self.arrays[key] = given, array  # the tensor stays, so that no other one takes its memory
        made: npt.NDArray[Any] = self.arrays[key][1]
        return made

    def holds(self, node: fx.Node, dtype: torch.dtype) -> bool:
        """Whether another type holds exactly the numbers of a constant. Asked for the same memory once, as with `array`."""
        given = self.constants[node]
        key = ("holds", *_identity(given), dtype)
        if key not in self.arrays:
            whole = self._whole(given)
            exact = given.equal(given.to(dtype).to(given.dtype)) if whole is None else self.holds(whole, dtype)
            self.arrays[key] = given, exact
        found: bool = self.arrays[key][1]
        return found

    def _whole(self, part: torch.Tensor) -> fx.Node | None:
        """A larger constant that a tensor is a part of, in the same memory: both are rounded once."""
        if not part.is_contiguous() or part.nbytes == part.untyped_storage().nbytes():
            return None
        first, memory = part.storage_offset(), part.untyped_storage().data_ptr()
        for node, tensor in self.constants.items():
            rest = tensor.numel() - (first - tensor.storage_offset())  # elements from there on
            is_around = tensor.storage_offset() <= first and part.numel() <= rest and part.numel() < tensor.numel()
            alike = tensor.dim() > 1 and tensor.dtype is part.dtype and tensor.is_contiguous()
            if is_around and alike and tensor.untyped_storage().data_ptr() == memory:
                return node
        return None
