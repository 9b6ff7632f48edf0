"""The choice of an element by its logit: the annotation of a Reduce whose result is an index."""

from __future__ import annotations

from dataclasses import dataclass

from lapilli.ir.expr import Expr, loads
from lapilli.ir.integer import Var
from lapilli.ir.node import Node


@dataclass(frozen=True)
class Sampling:
    """out[row] = the index of one of the elements of a row, drawn with the probabilities softmax(logit / temperature) among
    those that are kept.

    temperature, top_k and top_p are expressions over the row's axes. top_k, if above 0, keeps the elements whose logit is not
    below the k-th largest. top_p, if below 1, keeps of those an element if all that are more probable have less than top_p of
    the probability together, and always the most probable. Elements with equal logits are kept or left out together. A
    temperature that is None, not above 0, or NaN, and a row whose largest logit is infinite or that has a NaN, give what
    argmax gives. word: 32 random bits of an element; the first of those with the largest logit / temperature - log(-log(1 -
    u)) for u = (word + 1/2) / 2^32 is the result (the exponential clock of `lower/random.py`).
    """

    rows: tuple[Var, ...]
    element: Var
    logit: Expr
    temperature: Expr | None
    top_k: Expr | None
    top_p: Expr | None
    word: Expr | None

    @property
    def expressions(self) -> list[Expr]:
        return [e for e in (self.logit, self.temperature, self.top_k, self.top_p, self.word) if e is not None]

    def operands(self) -> list[Node]:
        """The values that it reads, each once."""
        return list({ld.node.id: ld.node for e in self.expressions for ld in loads(e)}.values())
