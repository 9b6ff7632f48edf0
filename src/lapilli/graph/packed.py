"""Replaces packed sequences by padded ones: layers that know the lengths of their sequences, and masks.

The number of rows of packed sequences depends on the lengths, so that only the host could determine it. The same layers on
padded sequences do not need it. Packed rows that are read in any other way keep torch's operators, which run on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_map

from lapilli.graph.module import Module
from lapilli.graph.tracing import open_sizes
from lapilli.ir.recurrence import MOST_UNITS
from lapilli.runtime.sequences import KINDS

aten, ours = torch.ops.aten, torch.ops.lapilli

_PADDED: dict[Any, Any] = {
    getattr(ours, f"{kind}_packed").default: getattr(ours, f"{kind}_padded").default for kind in KINDS
}
_OF_ROWS: dict[Any, int] = {
    aten.linear.default: 0, aten.relu.default: 0, aten.tanh.default: 0, aten.sigmoid.default: 0, aten.gelu.default: 0,
    aten.silu.default: 0, aten.leaky_relu.default: 0, aten.layer_norm.default: 0, aten.embedding.default: 1,
}  # fmt: skip
"""Operators that treat every row alike, and the position of the argument with the rows."""


@dataclass(frozen=True)
class _Padded:
    """rows: [steps, batch, ...], in place of packed rows."""

    rows: fx.Node
    pack: fx.Node

    @property
    def lengths(self) -> fx.Node:
        found = self.pack.args[1]
        assert isinstance(found, fx.Node)
        return found


def unpack(module: Module) -> None:
    """Replaces packed sequences where possible. The remaining operators get ATen's names."""
    if any(n.target is ours.pack.default for n in module.graph.nodes):
        _Unpacking(module).run()
        module.clean()
    for node in module.graph.nodes:
        if node.target is ours.pack.default:
            node.target = aten._pack_padded_sequence.default
        elif node.target is ours.pad_packed.default:
            node.target = aten._pad_packed_sequence.default
            node.args = (*node.args[:2], *node.args[3:])
        elif node.target in _PADDED:
            node.target = getattr(aten, node.target._schema.name.split("::")[1].removesuffix("_packed")).data


class _Unpacking:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.packs: dict[fx.Node, fx.Node] = {}  # packed rows -> their pack
        self.steps: dict[fx.Node, fx.Node] = {}  # a tensor with one element for each step -> its pack
        self.padded: dict[fx.Node, _Padded] = {}  # by packed rows

    def run(self) -> None:
        calls = [n for n in self.module.graph.nodes if n.op == "call_function"]
        for node in calls:
            self._follow(node)
        kept = {self.packs[rows] for rows in self.packs if not all(self._reads(user, rows) for user in rows.users)}
        kept |= {self.packs[rows] for rows in self.packs if rows in self.module.outputs}
        for node in calls:
            pack = node if node.target is ours.pack.default else self._pack_of(node)
            if pack is None or pack in kept:
                continue
            with self.module.graph.inserting_before(node):
                if node is pack:
                    self._pack(node)
                elif node.target in _PADDED:
                    self._layer(node, pack)
                elif node.target is ours.pad_packed.default:
                    self._pad(node, pack)
                else:
                    args = [self.padded[a].rows if a in self.padded else a for a in node.args]
                    self.padded[node] = _Padded(self._add(node.target, *args, **node.kwargs), pack)

    # -- which packed rows can be padded: those read by operators known below, either all of a pack or none
    def _follow(self, node: fx.Node) -> None:
        parts = self._parts(node)
        if node.target is ours.pack.default:
            self.packs |= dict.fromkeys(parts.get(0, []), node)
            self.steps |= dict.fromkeys(parts.get(1, []), node)
        elif (pack := self._pack_of(node)) is not None and node.target is not ours.pad_packed.default:
            self.packs |= dict.fromkeys(parts.get(0, []) if node.target in _PADDED else [node], pack)

    def _pack_of(self, node: fx.Node) -> fx.Node | None:
        """The pack of the rows that a call reads, if it could read them padded."""
        place = 0 if node.target in _PADDED or node.target is ours.pad_packed.default else _OF_ROWS.get(node.target)
        rows: Any = node.args[place] if place is not None and len(node.args) > place else None
        return self.packs.get(rows)

    def _reads(self, node: fx.Node, rows: fx.Node) -> bool:
        """Whether a call reads packed rows in a way in which it could read padded ones."""
        pack = self.packs[rows]
        if self._pack_of(node) is not pack or sum(a is rows for a in node.all_input_nodes) > 1:
            return False
        if node.target in _OF_ROWS:
            return True
        if self.steps.get(node.args[1]) is not pack:  # type: ignore[arg-type]
            return False
        if node.target in _PADDED:
            states: Any = node.args[2]
            given = states if isinstance(states, Sequence) else [states]
            return all(s.meta["val"].shape[2] <= MOST_UNITS for s in given)
        return any(_same(self._value(node.args[5]), size) for size in self._lengths(pack))

    def _lengths(self, pack: fx.Node) -> tuple[Any, Any]:
        """The length of the longest sequence, and that of the padded tensor."""
        x: Any = pack.args[0]
        return pack.meta["val"][1].shape[0], x.meta["val"].shape[1 if pack.args[2] else 0]

    def _value(self, size: Any) -> Any:
        return size.meta["val"] if isinstance(size, fx.Node) else size

    # -- padded sequences
    def _add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.module.graph.call_function(target, args, kwargs)
        given, named = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (args, kwargs))
        mode = detect_fake_mode([v for n in node.all_input_nodes if isinstance(v := n.meta["val"], torch.Tensor)])
        with torch.no_grad(), open_sizes(mode), mode or nullcontext(), enable_python_dispatcher():
            node.meta["val"] = target(*given, **named)
        return node

    def _arange(self, count: Any, like: fx.Node) -> fx.Node:
        """0, 1, ..., count - 1. (torch's own function would fix a dynamic count; the operator does not.)"""
        node = self.module.graph.call_function(aten.arange.default, (count,))
        size = count.meta["val"] if isinstance(count, fx.Node) else count
        node.meta["val"] = like.meta["val"][1].new_empty((size,), dtype=torch.int64)
        return node

    def _parts(self, node: fx.Node) -> dict[int, list[fx.Node]]:
        found: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if user.target is operator.getitem:
                found.setdefault(user.args[1], []).append(user)  # type: ignore[arg-type]
        return found

    def _pack(self, node: fx.Node) -> None:
        x: Any = node.args[0]
        rows = self._swapped(x) if node.args[2] else x
        self.padded |= dict.fromkeys(self._parts(node).get(0, []), _Padded(rows, node))

    def _swapped(self, x: fx.Node) -> fx.Node:
        return self._add(aten.transpose.int, x, 0, 1)

    def _layer(self, node: fx.Node, pack: fx.Node) -> None:
        given = self.padded[node.args[0]]  # type: ignore[index]
        made = self._add(_PADDED[node.target], given.rows, given.lengths, *node.args[2:])
        for k, users in self._parts(node).items():
            part = self._add(operator.getitem, made, k)
            for user in users:
                if k == 0:
                    self.padded[user] = _Padded(part, pack)
                else:
                    self.module.replace(user, part)

    def _pad(self, node: fx.Node, pack: fx.Node) -> None:
        given = self.padded[node.args[0]]  # type: ignore[index]
        rows, steps = given.rows, node.args[5]
        longest, _ = self._lengths(pack)
        if _same(self._value(steps), longest):
            most = self._add(aten.max.default, given.lengths)
            steps = self.module.graph.call_function(aten.item.default, (most,))
            steps.meta["val"] = longest
            rows = self._add(aten.slice.Tensor, rows, 0, 0, steps)
        mask = self._add(aten.lt.Tensor, self._add(aten.unsqueeze.default, self._arange(steps, pack), 1), given.lengths)
        for _ in range(rows.meta["val"].dim() - 2):
            mask = self._add(aten.unsqueeze.default, mask, -1)
        result = self._add(aten.where.ScalarOther, mask, rows, node.args[4])
        if node.args[3]:
            result = self._swapped(result)
        for k, users in self._parts(node).items():
            for user in users:
                self.module.replace(user, given.lengths if k else result)


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal."""
    known = [s.node.expr if isinstance(s, torch.SymInt) else s for s in (a, b)]
    return bool(known[0] == known[1])
