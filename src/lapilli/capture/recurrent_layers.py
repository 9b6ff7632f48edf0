"""Recurrent layers under torch.export: kept whole if the length of a sequence is dynamic, or if sequences are packed.

torch unrolls layers while it traces, which fixes the length, and it cannot trace the sizes of packed sequences at all. Under
`whole_layers` and the calls of `rewrites`, such calls become custom operators (`runtime/sequences.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lapilli.capture.rewriting import Rewrite
from lapilli.runtime.sequences import KINDS

aten, ours = torch.ops.aten, torch.ops.lapilli

_LAYERS: dict[Any, str] = {
    f: kind for kind in KINDS for f in (getattr(torch, kind), getattr(aten, kind).input, getattr(aten, kind).data)
}
"""The layers' functions, as called by Python and by TorchScript."""
_PACK = {torch._VF._pack_padded_sequence, aten._pack_padded_sequence.default}
_PAD = {torch._VF._pad_packed_sequence, aten._pad_packed_sequence.default}
_FIRST = {Tensor.__getitem__: (0,), aten.select.int: (0, 0)}


def rewrites() -> dict[Any, Rewrite]:
    """For one trace: they remember which tensors are sizes of packed sequences."""
    batches: Any = WeakIdKeyDictionary()  # batch sizes of packed sequences, by their tensor of sizes per step

    def layer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = _LAYERS[func]
        if kwargs:
            return NotImplemented
        if isinstance(args[1], Tensor) and args[1] in batches:
            return getattr(ours, f"{name}_packed")(*args)
        padded = isinstance(args[3], bool)  # otherwise these are the weights
        if padded and isinstance(args[0].shape[1 if args[8] else 0], torch.SymInt):
            return getattr(ours, name)(*args)
        return NotImplemented

    def pack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            return NotImplemented
        data, batch_sizes = ours.pack(*args)
        batches[batch_sizes] = args[0].shape[0 if args[2] else 1]
        return data, batch_sizes

    def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or args[1] not in batches:
            return NotImplemented
        data, batch_sizes, *rest = args
        return ours.pad_packed(data, batch_sizes, batches[batch_sizes], *rest)

    def first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wanted = not kwargs and args[0] in batches and tuple(args[1:]) == _FIRST[func]
        return batches[args[0]] if wanted else NotImplemented  # every sequence has a first step

    return {
        **dict.fromkeys(_LAYERS, layer),
        **dict.fromkeys(_PACK, pack),
        **dict.fromkeys(_PAD, pad),
        **dict.fromkeys(_FIRST, first),
    }


@contextmanager
def whole_layers(model: torch.nn.Module) -> Iterator[None]:
    """A context for tracing a model: its recurrent layers do not look at the batch size of packed sequences."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.RNNBase)]
    for m in layers:
        # it would convert the batch size to a number, and thereby fix it
        vars(m)["check_forward_args"] = MethodType(_check_unless_packed, m)
    try:
        yield
    finally:
        for m in layers:
            del vars(m)["check_forward_args"]


def _check_unless_packed(layer: torch.nn.RNNBase, x: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
    if batch_sizes is None:
        type(layer).check_forward_args(layer, x, hidden, batch_sizes)
