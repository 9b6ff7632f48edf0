"""What a program of a language model runs: its methods, which choose each next token where its logits are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lapilli.llm.about import LONGEST
from lapilli.llm.decoder import Decoder
from lapilli.sampling import next_token


class TokenMethods(nn.Module):
    """The last token and its position are states, so that a step needs nothing from the host.

    Methods that choose take floats [] (temperature, top_p, floor, penalty) and an int64 [] (top_k), and return the token [1] and
    its log-probability [1] by the model's own logits. floor: only logits that are at most this much (a number <= 0) below the
    largest can be drawn (min-p). penalty: positive logits of tokens seen so far are divided by it, negative ones multiplied.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.token, self.place = (nn.Buffer(torch.zeros(1, dtype=torch.int64)) for _ in range(2))
        self.seen = nn.Buffer(torch.zeros(model.shape.words, dtype=torch.int32))
        self.logits = nn.Buffer(torch.zeros(1, model.shape.words))

    def prompt(self, tokens: Tensor, start: Tensor, *drawn: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: [1, n], which follow those in places 0 to start - 1; start: [1]."""
        self.place.copy_(start)
        return self._next(tokens, *drawn)

    def step(self, *drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Goes on after the last token."""
        self.seen.index_copy_(0, self.token, torch.ones(1, dtype=torch.int32))
        return self._next(self.token[None], *drawn)

    def likely(self, most: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely last tokens [n] in order, and their log-probabilities [n]; most: [n], whatever it holds."""
        found = torch.topk(torch.log_softmax(self.logits[0] + 0 * most[:1], -1), most.shape[0])
        return found.indices, found.values

    def _next(
        self, tokens: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor, penalty: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.model(tokens, self.place).float()
        self.logits.copy_(logits)
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        wanted = torch.where(self.seen > 0, repeated, logits)
        wanted = torch.where(wanted >= wanted.amax(-1, keepdim=True) + floor, wanted, -torch.inf)
        token = next_token(wanted, temperature, top_k, top_p)
        self.place.add_(tokens.shape[1])
        self.token.copy_(token)
        return token, logits.gather(-1, token[None])[0] - logits.logsumexp(-1)


ALTERNATIVES = 20
"""How many likely tokens a program lists."""


def methods(model: Decoder, context: int) -> dict[str, Any]:
    """The methods, as `lapilli.compile` takes them."""
    writer = TokenMethods(model).requires_grad_(False).eval()
    one, start = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    drawn = torch.tensor(1.0), torch.tensor(0), torch.tensor(1.0), torch.tensor(-torch.inf), torch.tensor(1.0)
    sizes = ({1: torch.export.Dim("tokens", min=2, max=min(context, LONGEST))}, None, (None,) * len(drawn))
    count = min(ALTERNATIVES, model.shape.words)
    return {
        "prompt": (writer.prompt, (one, start, *drawn), sizes),
        "step": (writer.step, drawn),
        "likely": (writer.likely, (torch.zeros(count),)),
    }
