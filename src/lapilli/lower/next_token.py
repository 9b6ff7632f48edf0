"""The next token of a language model (`lapilli.sampling`)."""

from __future__ import annotations

from functools import reduce

from lapilli import sampling
from lapilli.ir.axes import fresh_axes
from lapilli.ir.draw import Sampling
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, cast_to, const, index, load, loads
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Map, Node, Reduce
from lapilli.lower.random import philox, words_at
from lapilli.lower.registry import Call, broadcast, convert, lowering


@lowering(sampling.OPERATOR)
def next_token(
    call: Call, logits: Node, temperature: Node | None, top_k: Node | None, top_p: Node | None, key: Node | None = None
) -> Map:
    """logits [*, vocabulary] -> int64 [*]; the next three broadcast to [*], or are None; key: int32 [*, 2], or None."""
    *outer, size = logits.shape
    call.some(size)
    rows, at = fresh_axes(tuple(outer))
    (element,), (i,) = fresh_axes((size,), "r")

    def of_row(x: Node | None, dtype: DType) -> Expr | None:
        return None if x is None else convert(load(x, broadcast(x, at)), dtype)

    linear: Int = as_int(0)
    for place, extent in zip([*at, i], logits.shape, strict=True):
        linear = linear * extent + place

    def word() -> Expr:
        if key is None:
            return words_at(call, linear)[0]
        of_key = load(key, [*at, as_int(0)]), load(key, [*at, as_int(1)])
        return philox([index(i), const(0), const(0), const(0)], of_key)[0]

    note = Sampling(
        rows, element, cast_to(load(logits, [*at, i]), DType.float32), of_row(temperature, DType.float32),
        of_row(top_k, DType.int32), of_row(top_p, DType.float32),
        None if temperature is None else word(),
    )  # fmt: skip
    read = [cast_to(ld, DType.float32) for e in note.expressions for ld in loads(e)]
    chosen = Reduce(
        tuple(outer), DType.int32, f"{call.name}_token", call.op, axes=rows, raxes=(element,), op="argmax",
        body=reduce(lambda a, b: a + b, read), contraction=note,
    )  # fmt: skip
    return call.map(lambda *row: load(chosen, row))
