"""Recurrent layers under torch.export: kept whole where the length of a sequence varies.

torch unrolls them while it traces, and thereby fixes the length. Under `whole_layers` such a call is an operator of its own,
`lapilli::lstm` and so on, of the same arguments as ATen's; the graph stage gives it ATen's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

_library: Any = torch.library.Library("lapilli", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = "Tensor[] params, bool biases, int layers, float dropout, bool train, bool bidirectional, bool batch_first"
KINDS = {
    "lstm": aten.lstm.input,
    "gru": aten.gru.input,
    "rnn_tanh": aten.rnn_tanh.input,
    "rnn_relu": aten.rnn_relu.input,
}


def _shapes(x: Tensor, states: Sequence[Tensor], bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:
    outer = x.shape[:2]
    width = states[0].shape[2] * (2 if bidirectional else 1)
    return (x.new_empty(*outer, width), *(s.new_empty(s.shape) for s in states))


def _define(name: str, overload: Any) -> None:
    several = name == "lstm"
    results = "(Tensor, Tensor, Tensor)" if several else "(Tensor, Tensor)"
    _library.define(f"{name}(Tensor input, Tensor{'[]' if several else ''} hx, {_ARGUMENTS}) -> {results}")

    def shapes(x: Tensor, hx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return _shapes(x, hx if several else [hx], *arguments[-2:])

    _library.impl(name, overload, "CompositeExplicitAutograd")
    _library.impl(name, shapes, "Meta")


for _name, _overload in KINDS.items():
    _define(_name, _overload)

_CALLS: dict[Any, str] = {f: name for name, overload in KINDS.items() for f in (getattr(torch, name), overload)}
"""How Python and TorchScript call them."""


class whole_layers(TorchFunctionMode):
    """While a model is traced: recurrent layers whose length varies are calls of `lapilli::lstm` and so on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _CALLS.get(func)
        # with lengths of packed sequences there are as many arguments, of other types
        if (
            name is not None
            and not kwargs
            and len(args) == 9
            and isinstance(args[8], bool)
            and isinstance(args[3], bool)
        ):
            length = args[0].shape[1 if args[8] else 0]
            if isinstance(length, torch.SymInt):
                return getattr(torch.ops.lapilli, name)(*args)
        return func(*args, **(kwargs or {}))
