"""The programs of signatures: in memory, on disk, or compiled on demand.

On disk there is one file per signature, in the cache folder. It holds the programs that were compiled for it, each with a
guard that states the sizes for which it is valid. Its name is a digest of the signature, of the device's class and of the
compiler's own source, so that programs compiled by another version are never used.
"""

from __future__ import annotations

import hashlib
import json
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch

from lapilli.codegen.build import compiler_digest
from lapilli.eager import device_state
from lapilli.eager.call_signature import CallSignature, CannotRun, NumberOperand, TensorOperand
from lapilli.eager.compile_call import Compiled, compile
from lapilli.player import NativeProgram
from lapilli.runtime.cache import Cache
from lapilli.runtime.devices import devices as vulkan_devices
from lapilli.runtime.host import DTYPES
from lapilli.runtime.notice import working
from lapilli.runtime.sizes import formula
from lapilli.target import Target, of_device

CACHE = Cache("eager", 2 << 30)
_DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in DTYPES}

TOO_LARGE = "its tensors are larger than what the kernels of the device reach at once"

Shape = tuple[int, ...]
Results = list[tuple[Shape, Shape, torch.dtype]]


_programs: weakref.WeakSet[OperatorProgram] = weakref.WeakSet()


@device_state.on_loss.append
def _unload(device: int) -> None:
    for program in list(_programs):
        program._loaded.pop(device, None)


class OperatorProgram:
    """A compiled program with its guard and its results, as functions of sizes."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self._guard: Callable[..., bool] = formula(compiled.sizes, compiled.guard)
        self._results: Callable[..., Any] = formula(compiled.sizes, compiled.results)
        self._loaded: dict[int, NativeProgram] = {}
        _programs.add(self)

    def sizes(self, operands: Sequence[TensorOperand]) -> list[int]:
        return [operands[k].shape[d] // unit for k, d, unit in self.compiled.sizes.values()]

    def fits(self, operands: Sequence[TensorOperand]) -> bool:
        return bool(self._guard(*self.sizes(operands)))

    def results(self, operands: Sequence[TensorOperand]) -> Results:
        """Shape, strides and dtype of every result tensor."""
        found = self._results(*self.sizes(operands))
        return [(tuple(map(int, s)), tuple(map(int, t)), _DTYPES[d]) for s, t, d in found]

    def loaded(self, device: int, load: Callable[[bytes], NativeProgram]) -> NativeProgram:
        """The program on a device, with its pipelines."""
        if device not in self._loaded:
            self._loaded[device] = load(self.compiled.data)
        return self._loaded[device]


@dataclass
class _Known:
    """The programs of a signature, and why there is none (for sizes that no program fits)."""

    programs: list[OperatorProgram] = field(default_factory=list)
    constant_numbers: bool = False  # numbers must be compiled in
    fixed_sizes: bool = False  # sizes must be compiled in


@cache
def target_of(device: int, matrix: bool = False) -> Target:
    """The target for calls on a device. matrix: with its matrix units, if it has them."""
    return of_device(vulkan_devices()[device], half=True, matrix=matrix)


def load(device: int, data: bytes) -> NativeProgram:
    """Loads a program on a device."""
    with working():
        return NativeProgram.load(data, device=device, verify=False)


@cache
def programs_of(target: Target) -> Programs:
    return Programs(target)


class Programs:
    """The programs for one class of devices."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.known: dict[str, _Known] = {}
        self.compiled = 0
        """The number of programs that were compiled in this process."""

    def find(self, signature: CallSignature, numbers: Sequence[Any]) -> tuple[OperatorProgram, CallSignature]:
        """A program for a call, and the signature that it is for, in which numbers may be compiled in. Raises CannotRun."""
        known = self._read(signature)
        if not known.constant_numbers:
            found = next((p for p in known.programs if p.fits(signature.operands())), None)
            if found is not None:
                return found, signature
            try:
                return self._compile(signature, numbers), signature
            except CannotRun:
                if not numbers:
                    raise
            known.constant_numbers = True
            self._write(signature)
        return self.find(with_numbers(signature, numbers), ())

    def _compile(self, signature: CallSignature, numbers: Sequence[Any]) -> OperatorProgram:
        """Compiles with dynamic sizes or, if that fails, with these sizes."""
        known = self._read(signature)
        if not signature.exact and not known.fixed_sizes:
            try:
                with working():
                    program = OperatorProgram(compile(signature, numbers, self.target))
            except CannotRun:
                known.fixed_sizes = True
            else:
                if program.fits(signature.operands()):
                    return self._add(signature, program)
        exact = replace(signature, exact=True)
        fitting = self._read(exact).programs
        if fitting:
            return fitting[0]
        with working():
            made = self._add(exact, OperatorProgram(compile(exact, numbers, self.target)))
        if known.fixed_sizes:
            self._write(signature)
        return made

    def _add(self, signature: CallSignature, program: OperatorProgram) -> OperatorProgram:
        self.compiled += 1
        self.known[signature.text()].programs.append(program)
        self._write(signature)
        return program

    # -- on disk
    def _key(self, text: str) -> str:
        return hashlib.sha256(f"{compiler_digest()} {torch.__version__} {self.target}\n{text}".encode()).hexdigest()

    def _read(self, signature: CallSignature) -> _Known:
        text = signature.text()
        known = self.known.get(text)
        if known is None:
            known = self.known[text] = _stored(self._key(text)) or _Known()
        return known

    def _write(self, signature: CallSignature) -> None:
        text = signature.text()
        _store(self._key(text), self.known[text])


def with_numbers(signature: CallSignature, numbers: Sequence[Any]) -> CallSignature:
    """The signature with the numbers compiled in."""
    given = iter(numbers)

    def known(leaf: Any) -> Any:
        if isinstance(leaf, tuple):
            return tuple(map(known, leaf))
        return next(given) if isinstance(leaf, NumberOperand) else leaf

    return replace(signature, leaves=tuple(map(known, signature.leaves)))


def _store(key: str, known: _Known) -> None:
    """Writes, for every program, its description and its bytes."""
    parts = []
    for program in known.programs:
        described = asdict(replace(program.compiled, data=b""))
        text = json.dumps({k: v for k, v in described.items() if k != "data"}).encode()
        parts.append(struct.pack("<QQ", len(text), len(program.compiled.data)) + text + program.compiled.data)
    CACHE.write(key, struct.pack("<??", known.constant_numbers, known.fixed_sizes) + b"".join(parts))


def _stored(key: str) -> _Known | None:
    """The programs in the cache; None if there is no file, or it is damaged."""
    content = CACHE.read(key)
    if content is None:
        return None
    known = _Known([], *struct.unpack_from("<??", content))
    at = 2
    while at < len(content):
        length, size = struct.unpack_from("<QQ", content, at)
        at += 16
        described = json.loads(content[at : at + length])
        data = content[at + length : at + length + size]
        at += length + size
        known.programs.append(OperatorProgram(_compiled(described, data)))
    return known


def _compiled(described: dict[str, Any], data: bytes) -> Compiled:
    return Compiled(
        data,
        tuple((kind, k, d, unit) for kind, k, d, unit in described["symbols"]),
        {name: (k, d, unit) for name, (k, d, unit) in described["sizes"].items()},
        described["guard"],
        described["results"],
        described["tree"],
        tuple(tuple(a) for a in described["aligned"]),
    )
