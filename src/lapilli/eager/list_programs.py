"""Programs for operators on lists of tensors. A program has slots, each for one tensor of every list as flat memory, so that it
depends on the operator and the dtypes alone. A slot whose size is 0 costs nothing on the device.
"""

from __future__ import annotations

import hashlib
import json
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_map
from torch.utils._sympy.value_ranges import ValueRanges

from lapilli.codegen.build import compiler_digest
from lapilli.compiler import assemble_graph
from lapilli.eager.call_signature import CannotRun
from lapilli.eager.programs import CACHE, load, target_of
from lapilli.graph.module import Module
from lapilli.ir.node import MOST_ELEMENTS
from lapilli.legalize.decompose import decompose_calls
from lapilli.legalize.passes import clean_up
from lapilli.lower import lower
from lapilli.player import NativeProgram
from lapilli.runtime.notice import working
from lapilli.target import Target

aten = torch.ops.aten

SLOTS = (8, 32)
"""The numbers of slots that programs have."""
_HINT = 1000  # sizes to trace with, all different: equal ones would be one symbol


@dataclass(frozen=True)
class ListForm:
    """What a program depends on.

    each: the operator of one tensor, without side effects. arguments: its arguments, each "list" (a tensor for each slot),
    "tensor" (one of one element for all), "number" (one for all) or "numbers" (one for each slot), named if they are given by
    name. dtypes: of the lists and tensors, in this order.
    """

    each: torch._ops.OpOverload
    arguments: tuple[tuple[str, str | None], ...]
    dtypes: tuple[torch.dtype, ...]
    slots: int


@cache
def list_program(form: ListForm, index: int) -> tuple[NativeProgram, tuple[tuple[str, int], ...]]:
    """A program on a device, and its symbols: ("size", slot) or ("number", k), those of slots in their order. Its inputs are the
    tensors for all slots, then those of the first slot, and so on. Raises CannotRun.
    """
    target = target_of(index)
    text = f"{compiler_digest()} {torch.__version__} {target}\nlist {form}"
    key = hashlib.sha256(text.encode()).hexdigest()
    stored = CACHE.read(key)
    if stored is None:
        with working():
            data, symbols = _compile(form, target)
        described = json.dumps(symbols).encode()
        CACHE.write(key, struct.pack("<Q", len(described)) + described + data)
    else:
        (length,) = struct.unpack_from("<Q", stored)
        symbols, data = [(kind, k) for kind, k in json.loads(stored[8 : 8 + length])], stored[8 + length :]
    return load(index, data), tuple(symbols)


def _compile(form: ListForm, target: Target) -> tuple[bytes, list[tuple[str, int]]]:
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        try:
            return _Lists(form).compile(target)
        except Exception as error:  # any error is a reason to compute the tensors one by one
            raise CannotRun(f"{type(error).__name__}: {error}") from error


class _Lists:
    """The graph of a program."""

    def __init__(self, form: ListForm) -> None:
        self.form = form
        self.graph = fx.Graph()
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment, allow_non_fake_inputs=True)
        self.symbols: dict[str, tuple[str, int]] = {}

    def compile(self, target: Target) -> tuple[bytes, list[tuple[str, int]]]:
        made = iter(self.form.dtypes)
        dtypes = {k: next(made) for k, (kind, _) in enumerate(self.form.arguments) if kind in ("list", "tensor")}
        once: dict[int, fx.Node] = {}
        for k, (kind, _) in enumerate(self.form.arguments):
            if kind == "tensor":
                once[k] = self._given([], dtypes[k])
            elif kind == "number":
                once[k] = self._number(k)
        results = []
        for slot in range(self.form.slots):
            size = self._size(slot)
            args, named = [], {}
            for k, (kind, name) in enumerate(self.form.arguments):
                value = once.get(k) or (
                    self._given([size], dtypes[k]) if kind == "list" else self._number(slot, "numbers")
                )
                if name is None:
                    args.append(value)
                else:
                    named[name] = value
            results.append(self._call(tuple(args), named))
        if any(n.meta["val"].dtype is not self.form.dtypes[0] for n in results):
            raise CannotRun("its results have another dtype")
        # torch found out that no size is 0 or 1. It makes no difference here: all tensors of a slot have the same one.
        ranges = dict.fromkeys(self.environment.var_to_range, ValueRanges(0, MOST_ELEMENTS))
        module = Module(self.graph, {}, results, {}, {}, ranges)
        self.graph.output(results)
        clean_up(module)
        if not decompose_calls(module):
            raise CannotRun("it has no decomposition")
        clean_up(module)
        lowered = lower(module, "fp32", target.half, keyed=True)
        if len(lowered.inputs) != sum(n.op == "placeholder" and "number" not in n.meta for n in self.graph.nodes):
            raise CannotRun("it does not read all that it is given")
        data, _ = assemble_graph(lowered, replace(target, ranges=False))  # a call waits for it
        return data, [self.symbols[name] for name in lowered.symbols]

    def _size(self, slot: int) -> Any:
        source = ConstantSource(f"s{slot}")
        symbol = self.environment.create_symbol(_HINT + slot, source, dynamic_dim=DimDynamic.DYNAMIC)
        self.symbols[str(symbol)] = ("size", slot)
        return self.environment.create_symintnode(symbol, hint=_HINT + slot, source=source)

    def _given(self, shape: Sequence[Any], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def _number(self, k: int, of: str = "number") -> fx.Node:
        node = self.graph.placeholder(f"{of}{k}")
        node.meta["number"], node.meta["val"] = "float", 0.375
        self.symbols[f"{of}{k}"] = (of, k)
        return node

    def _call(self, args: tuple[Any, ...], named: dict[str, Any]) -> fx.Node:
        given, by_name = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (args, named))
        node = self.graph.call_function(self.form.each, args, named)
        with self.mode:
            node.meta["val"] = self.form.each(*given, **by_name)
        return node
