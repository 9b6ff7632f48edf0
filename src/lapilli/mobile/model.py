"""The folded model inside an optimized module, and the programs compiled from it for given sizes of inputs.

The first run compiles for the sizes of its inputs, and so do runs with other sizes. Sizes that have varied are then compiled as
dynamic, so that a varying batch or image takes two compilations, not one for each size. Programs are cached on disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import Dim

from lapilli.backend.placement import device_of, targets
from lapilli.codegen.build import compiler_digest
from lapilli.compiler import compile_to_bytes
from lapilli.errors import CompileError, InvalidInputError, LapilliError
from lapilli.mobile.arguments import Type, pack, type_of, unpack
from lapilli.runtime.cache import Cache
from lapilli.runtime.host import OWN
from lapilli.runtime.program import Program
from lapilli.runtime.seeding import draw_key
from lapilli.version import __version__

Tensors = list[torch.Tensor]
Shapes = tuple[tuple[int, ...], ...]
CACHE = Cache("mobile", 2 << 30)


@dataclass(frozen=True)
class Sizes:
    """What an input is: its dtype and sizes, and the axes of which others are taken, too."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    dynamic: tuple[int, ...] = ()


def model_of(data: torch.Tensor) -> Model:
    """The model in a module's attribute; the same object as long as the attribute lives."""
    model: Model | None = getattr(data, "_lapilli_model", None)
    if model is None:
        with _opening:
            model = getattr(data, "_lapilli_model", None) or Model(data.detach().cpu().numpy().tobytes())
            data._lapilli_model = model  # type: ignore[attr-defined]
    return model


_opening = threading.Lock()


class Model:
    """A model folded by `optimize_for_mobile`, from its bytes."""

    def __init__(self, data: bytes) -> None:
        files = {"lapilli.json": ""}
        self._module = torch.jit.load(io.BytesIO(data), map_location="cpu", _extra_files=files)  # type: ignore[no-untyped-call]
        options = json.loads(files["lapilli.json"])
        self._precision: Literal["fp32", "fp16"] = options["precision"]
        self._target: str | None = options.get("target")
        self._traced: list[tuple[str, list[int]]] = options.get("traced", [])
        self._digest = hashlib.sha256(data).hexdigest()
        self._methods: dict[str, _Method] = {}
        self._lock = threading.Lock()

    def run(self, name: str, inputs: Tensors, settings: list[str]) -> tuple[Tensors, list[str]]:
        """Runs a method on tensors on the CPU."""
        return self._method(name).run(inputs, settings)

    def run_on_device(self, name: str, inputs: Tensors, settings: list[str]) -> tuple[Tensors, list[str]]:
        """Runs a method on tensors of the device "vulkan"."""
        elsewhere = [t for t in inputs if t.device.type != "vulkan"]
        if elsewhere:
            raise InvalidInputError(
                f"an input is on {elsewhere[0].device}, and this module was optimized without automatic transfer "
                "(VULKAN_AUTOMATIC_GPU_TRANSFER is in its blocklist): give it tensors on the device, x.to('vulkan')"
            )
        return self._method(name).run(inputs, settings)

    def method(self, name: str) -> Any:
        """The method itself, as TorchScript has it."""
        return getattr(self._module, name)

    def traced(self) -> tuple[Sizes, ...]:
        """What forward was traced with; empty where it was not."""
        return tuple(Sizes(getattr(torch, dtype), tuple(shape)) for dtype, shape in self._traced)

    def seen(self, name: str) -> tuple[Sizes, ...]:
        """What a method that takes nothing but tensors was run with in this process; empty where it was not."""
        return self._method(name).seen()

    def portable(self, name: str, inputs: Sequence[Sizes]) -> bytes:
        """A program of the method for every kind of device, or for those of the module's backend. Raises UnsupportedOperatorError
        if torch would have to run a part."""
        return self._method(name).portable(inputs, self._target)

    def _method(self, name: str) -> _Method:
        with self._lock:
            if name not in self._methods:
                self._methods[name] = _Method(self._module, name, f"{self._digest} {self._precision}", self._precision)
            return self._methods[name]


class _Method:
    """A method, and its programs by device, by arguments that are not tensors, and by dtypes and ranks."""

    def __init__(self, module: Any, name: str, digest: str, precision: Literal["fp32", "fp16"]) -> None:
        self._method = getattr(module, name)
        self._digest, self._precision = f"{digest} {name}", precision
        schema = module._c._get_method(name).schema
        self._given = Type("Tuple", tuple(type_of(a.type) for a in schema.arguments[1:]))
        self._returned = type_of(schema.returns[0].type)
        self._variants: dict[tuple[Any, ...], _Variant] = {}
        self._lock = threading.Lock()

    def run(self, inputs: Tensors, settings: list[str]) -> tuple[Tensors, list[str]]:
        device = inputs[0].get_device() if inputs and inputs[0].device.type != "cpu" else None
        key = (tuple(settings), tuple(t.dtype for t in inputs), tuple(t.dim() for t in inputs), device)
        with self._lock:
            if key not in self._variants:
                self._variants[key] = _Variant()
            variant = self._variants[key]
        args = unpack(iter(inputs), iter(settings), self._given)
        program = variant.program(tuple(tuple(t.shape) for t in inputs), lambda s, d: self._compiled(s, d, key))
        draw_key(program)
        return pack(program(*args), self._returned)

    def seen(self) -> tuple[Sizes, ...]:
        with self._lock:
            for (_, dtypes, _, _), variant in reversed(self._variants.items()):
                if all(part.kind == "Tensor" for part in self._given.parts):
                    known = zip(dtypes, *variant.seen(), strict=True)
                    return tuple(Sizes(dtype, shape, tuple(sorted(axes))) for dtype, shape, axes in known)
        return ()

    def portable(self, inputs: Sequence[Sizes], target: str | None) -> bytes:
        name = self._file(f"{target or 'every device'} {inputs}")
        path = CACHE.file(name)
        if path is not None:
            return Path(path).read_bytes()
        dynamic = tuple(dict.fromkeys(one.dynamic, Dim.AUTO) or None for one in inputs)
        data = compile_to_bytes(
            self._method,
            tuple(torch.zeros(one.shape, dtype=one.dtype) for one in inputs),
            precision=self._precision,
            dynamic_shapes=dynamic if any(dynamic) else None,
            target=target,
            fallback="error",
        )
        CACHE.keep(name, data)
        return data

    def _compiled(self, shapes: Shapes, dynamic: Sequence[set[int]], key: Any) -> Program:
        """A program for these shapes, with these axes dynamic; warns about operators that run on the CPU."""
        program = self._program(shapes, dynamic, key)
        left = program.report().on_cpu
        if left:
            reasons = "; ".join(sorted({f"{o.operator}: {o.reason}" for o in left}))
            warnings.warn(f"operators of the optimized module run on the CPU: {reasons}", stacklevel=2)
        return program

    def _program(self, shapes: Shapes, dynamic: Sequence[set[int]], key: Any) -> Program:
        """The program, from the disk if it is there."""
        name = self._file(f"{_target(self._precision, key[3])} {key[:3]} {shapes} {[sorted(axes) for axes in dynamic]}")
        device = key[3]
        path = CACHE.file(name)
        if path is not None:
            try:
                return Program(path, device, permission=OWN)
            except LapilliError:
                pass  # of another version, or damaged
        made = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, key[1], strict=True)]
        example = unpack(iter(made), iter(key[0]), self._given)
        numbers = {id(tensor): axes for tensor, axes in zip(made, dynamic, strict=True)}
        data = compile_to_bytes(
            self._method,
            example,
            precision=self._precision,
            dynamic_shapes=_specs(example, numbers) if any(dynamic) else None,
            target=_target(self._precision, device),
        )
        kept = CACHE.keep(name, data)
        return Program(data if kept is None else kept, device, permission=OWN)

    def _file(self, key: str) -> str:
        text = f"{__version__} {torch.__version__} {compiler_digest()} {self._digest} {key}"
        return f"{hashlib.sha256(text.encode()).hexdigest()}.lap"


class _Variant:
    """Programs for tensors of the same ranks and dtypes, and the shapes that were requested."""

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self._seen: list[Shapes] = []
        self._lock = threading.Lock()

    def seen(self) -> tuple[Shapes, list[set[int]]]:
        """The last shapes, and the axes on which others differed from them."""
        last = self._seen[-1]
        return last, [_varied(shape, [seen[k] for seen in self._seen]) for k, shape in enumerate(last)]

    def program(self, shapes: Shapes, compiled: Callable[[Shapes, Sequence[set[int]]], Program]) -> Program:
        """A program that accepts these shapes; it is compiled if there is none."""
        with self._lock:
            for program in self._programs:
                if _takes(program, shapes):
                    return program
            dynamic = [_varied(shape, [seen[k] for seen in self._seen]) for k, shape in enumerate(shapes)]
            self._seen.append(shapes)
            if any(dynamic):
                try:
                    program = compiled(shapes, dynamic)
                except CompileError:
                    pass  # the model needs these sizes to be fixed
                else:
                    self._programs.append(program)
                    if _takes(program, shapes):
                        return program
            self._programs.append(compiled(shapes, [set() for _ in shapes]))
            return self._programs[-1]


def _varied(shape: tuple[int, ...], seen: Sequence[tuple[int, ...]]) -> set[int]:
    """The axes of more than one element on which a shape differs from others."""
    return {axis for axis, size in enumerate(shape) if size > 1 and any(size != other[axis] for other in seen)}


def _takes(program: Program, shapes: Shapes) -> bool:
    """Whether inputs of these shapes fit the program, whose sizes are numbers or symbols with bounds."""
    bounds = {s.name: s for spec in program.inputs for s in spec.symbols if s.factor == 1 and s.offset == 0}
    values: dict[str, int] = {}
    for spec, shape in zip(program.inputs, shapes, strict=True):
        for wanted, size in zip(spec.shape, shape, strict=True):
            if isinstance(wanted, int):
                if size != wanted:
                    return False
                continue
            symbol = bounds.get(wanted)
            if symbol is None or values.setdefault(wanted, size) != size:
                return False
            if not symbol.min <= size <= (symbol.max or size):
                return False
    return True


def _specs(value: Any, axes: dict[int, set[int]]) -> Any:
    """dynamic_shapes for torch.export. axes: the dynamic ones, by id of a tensor."""
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(sorted(axes[id(value)]), Dim.AUTO) or None
    if isinstance(value, dict):
        return {key: _specs(item, axes) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_specs(item, axes) for item in value)
    return None


def _target(precision: str, device: int | None) -> str:
    """The plan for the device on which the program will run."""
    return targets(precision == "fp16", device_of((), device))[0].name
