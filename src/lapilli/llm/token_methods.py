"""What a program of a language model runs: its methods, which choose each next token where its logits are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lapilli.llm.about import LONGEST, SCORED, step_name, step_sizes
from lapilli.llm.beams import RANKED
from lapilli.llm.decoder import Decoder
from lapilli.llm.encoder_decoder import EncoderDecoder
from lapilli.llm.paged_cache import PagedCache
from lapilli.sampling import next_token

ALTERNATIVES = 20
"""How many likely tokens a program lists."""


class TokenMethods(nn.Module):
    """What all models that write have. Last tokens are states, so that a step needs nothing from the host.

    A sequence has a line of the states: the last token, its logits, which tokens were seen, which are allowed (a bit for each, 32
    in a word), and where its keys and values lie. Rows that are computed in vain have the line behind those of all sequences.
    Methods that
    choose take a row of integers and one of numbers for each sequence:

        int32: the token, or KNOWN: that of the line; position; line; top_k; and two numbers from which its draw follows
        float32: temperature; top_p; floor; penalty

    and return tokens [n] and their log-probabilities [n] by the model's own logits. floor: only logits that are at most this much
    (a number <= 0) below the largest can be drawn (min-p). penalty: positive logits of tokens seen so far are divided by it,
    negative ones multiplied.
    """

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        super().__init__()
        self.model = model
        words, lines = model.shape.words, model.size.lines
        self.token = nn.Buffer(torch.zeros(lines, dtype=torch.int64))
        self.seen = nn.Buffer(torch.zeros(lines * words, dtype=torch.int32))
        self.allowed = nn.Buffer(torch.full((lines, -(-words // 32)), -1, dtype=torch.int32))
        self.logits = nn.Buffer(torch.zeros(lines, words))

    def prompt(self, tokens: Tensor, sequence: Tensor, numbers: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: int64 [1, n], of a sequence int64 [1], from the position in its row on, whose token is not read."""
        row = numbers.long()
        logits = self.model(tokens, row[:, 1], sequence).float()
        return self._next(self._kept(logits, row[:, 1] + (tokens.shape[1] - 1), row[:, 2]), row, numbers, limits)

    def step(self, numbers: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row is the next token of its line."""
        row = numbers.long()
        given, position, line, words = row[:, 0], row[:, 1], row[:, 2], self.model.shape.words
        known = self.token.index_select(0, line)
        tokens = torch.where(given >= 0, given, known)
        self.seen.index_copy_(0, line * words + tokens, torch.ones(len(row), dtype=torch.int32))
        logits = self.model.step(tokens, position, line).float()
        return self._next(self._kept(logits, position, line), row, numbers, limits)

    def likely(self, most: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely last tokens [n] of a line int64 [1], in order, and their log-probabilities [n]; most: [n], whatever it
        holds.
        """
        logits = self.logits.index_select(0, line)[0]
        found = torch.topk(torch.log_softmax(logits + 0 * most[:1], -1), most.shape[0])
        return found.indices, found.values

    def remember(self, line: Tensor, seen: Tensor) -> None:
        """Sets which tokens were seen: 0 or 1, int32 [words]."""
        places = line * self.model.shape.words + torch.arange(self.model.shape.words)
        self.seen.index_copy_(0, places, seen)

    def allow(self, line: Tensor, allowed: Tensor) -> None:
        """Sets which tokens can be chosen: bits, int32 [words / 32, rounded up]."""
        self.allowed.index_copy_(0, line, allowed[None])

    def lay(self, line: Tensor, pages: Tensor) -> None:
        """As `PageTable.lay`."""
        self.model.pages.lay(line, pages)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """As `PagedCache.copy`, in all layers."""
        for cache in self.model.modules():
            if isinstance(cache, PagedCache):
                cache.copy(source, target)

    def _kept(self, logits: Tensor, position: Tensor, line: Tensor) -> Tensor:
        """Keeps the logits [n, words] of the tokens after those at positions [n], and returns them."""
        self.logits.index_copy_(0, line, logits)
        return logits

    def _allowed(self, scores: Tensor, line: Tensor) -> Tensor:
        """Scores [n, words] of the tokens that lines [n] may write; -infinity of the others."""
        bits = self.allowed.index_select(0, line)[:, :, None] >> torch.arange(32, dtype=torch.int32)
        return torch.where((bits & 1).flatten(1)[:, : self.model.shape.words] != 0, scores, -torch.inf)

    def _next(self, logits: Tensor, row: Tensor, numbers: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
        line, words = row[:, 2], self.model.shape.words
        temperature, top_p, floor, penalty = limits.unbind(1)
        seen = self.seen.view(-1, words).index_select(0, line)
        repeated = torch.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
        wanted = torch.where(seen > 0, repeated, logits)
        wanted = self._allowed(wanted, line)
        wanted = torch.where(wanted >= wanted.amax(-1, keepdim=True) + floor[:, None], wanted, -torch.inf)
        token = next_token(wanted, temperature, row[:, 3], top_p, numbers[:, 4:])
        self.token.index_copy_(0, line, token)
        return token, logits.gather(-1, token[:, None])[:, 0] - logits.logsumexp(-1)


class DecoderMethods(TokenMethods):
    """Those of a decoder, with what only it has."""

    model: Decoder

    def embed(self, tokens: Tensor, sequence: Tensor, start: Tensor) -> Tensor:
        """What the head would read of each token, [n, width]; arguments as for `prompt`, start: int64 [1]."""
        return self.model.hidden(tokens, start, sequence)[0].float()

    def score(self, given: Tensor, following: Tensor) -> Tensor:
        """Log-probabilities [n] of tokens int64 [n] after those of which `embed` gave [n, width]. A method that reads the tokens
        itself would take as long to compile as `embed` does.
        """
        logits = self.model.head(given[None])[0].float()
        found: Tensor = logits.gather(-1, following[:, None])[:, 0] - logits.logsumexp(-1)
        return found


class EncoderDecoderMethods(TokenMethods):
    """Those of an encoder and a decoder, with one for what is given: tokens, or a spectrum.

    A line has two states more: whether its answer has times, and the logarithm of the sum of e to the power of each logit, of those
    tokens, too, that are never written. untimed: the token before those of times, if there are some.
    """

    model: EncoderDecoder

    def __init__(self, model: EncoderDecoder, untimed: int | None = None) -> None:
        super().__init__(model)
        self.untimed = untimed
        self.timed = nn.Buffer(torch.zeros(model.size.lines, dtype=torch.int64))
        self.whole = nn.Buffer(torch.zeros(model.size.lines))

    def encode(self, tokens: Tensor, count: Tensor, sequence: Tensor) -> None:
        """As `EncoderDecoder.encode`."""
        self.model.encode(tokens, count, sequence)

    def encode_spectrum(self, spectrum: Tensor, sequence: Tensor) -> None:
        """As `EncoderDecoder.encode_spectrum`."""
        self.model.encode_spectrum(spectrum, sequence)

    def carry(self, source: Tensor, target: Tensor) -> None:
        """As `EncoderDecoder.carry`."""
        self.model.carry(source, target)

    def align(self, tokens: Tensor, sequence: Tensor) -> Tensor:
        """As `EncoderDecoder.align`."""
        return self.model.align(tokens, sequence)

    def time(self, line: Tensor, timed: Tensor) -> None:
        """Sets whether the answer of a line has times: int64 [1], 0 or 1."""
        self.timed.index_copy_(0, line, timed)

    def ranked(self, most: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
        """As `likely`, of the tokens that the line may write: the logarithm of a probability among all, whatever may be written."""
        scores = self.logits.index_select(0, line) - self.whole.index_select(0, line)[:, None]
        found = torch.topk(self._allowed(scores, line)[0] + 0 * most[:1], most.shape[0])
        return found.indices, found.values

    def _kept(self, logits: Tensor, position: Tensor, line: Tensor) -> Tensor:
        self.whole.index_copy_(0, line, logits.logsumexp(-1))
        return super()._kept(self.model.writable(logits, position, self.timed.index_select(0, line)), position, line)

    def _allowed(self, scores: Tensor, line: Tensor) -> Tensor:
        """A time is written where all times together are likelier than any other token."""
        scores = super()._allowed(scores, line)
        if self.untimed is None:
            return scores
        first = self.untimed + 1
        timed = scores[:, first:].logsumexp(-1) > scores[:, :first].amax(-1)
        timed = timed & (self.timed.index_select(0, line) != 0)
        return torch.where(timed[:, None] & (torch.arange(scores.shape[1]) < first), -torch.inf, scores)


def methods(model: Decoder) -> dict[str, Any]:
    """The methods, as `lapilli.compile` takes them."""
    writer = DecoderMethods(model).requires_grad_(False).eval()
    found, first = _writing(writer), torch.zeros(1, dtype=torch.int64)
    count = _count(model.size.context)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    found["embed"] = (writer.embed, (tokens, first, first), (count, None, None))
    rows = {0: torch.export.Dim("rows", min=2, max=SCORED)}
    found["score"] = (writer.score, (torch.zeros(8, model.shape.width), tokens[0]), (rows, rows))
    return found


def encoder_decoder_methods(model: EncoderDecoder, untimed: int | None = None) -> dict[str, Any]:
    """The same of an encoder and a decoder. untimed: as for `EncoderDecoderMethods`."""
    writer = EncoderDecoderMethods(model, untimed).requires_grad_(False).eval()
    found, first = _writing(writer), torch.zeros(1, dtype=torch.int64)
    found["ranked"] = (writer.ranked, (torch.zeros(min(RANKED, model.shape.words)), first))
    if model.size.is_paged:
        found["carry"] = (writer.carry, (first, first))
    if untimed is not None:
        found["time"] = (writer.time, (first, first))
    if model.shape.alignment:
        given = {1: torch.export.Dim("written", min=2, max=model.size.context)}
        found["align"] = (writer.align, (torch.zeros(1, 8, dtype=torch.int64), first), (given, None))
    if model.shape.bins:
        spectrum = torch.zeros(1, model.shape.bins, 2 * model.places)
        return found | {"encode": (writer.encode_spectrum, (spectrum, first))}
    count = {1: torch.export.Dim("given", min=2, max=model.places)}
    tokens = (torch.zeros(1, 8, dtype=torch.int64), first, first)
    return found | {"encode": (writer.encode, tokens, (count, None, None))}


def _count(context: int) -> dict[int, Any]:
    return {1: torch.export.Dim("tokens", min=2, max=min(context, LONGEST))}


def _writing(writer: TokenMethods) -> dict[str, Any]:
    """The methods that all have."""
    tokens, first = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    model, words = writer.model, writer.model.shape.words

    def rows(n: int) -> tuple[Tensor, Tensor]:
        numbers, limits = torch.zeros(n, 6, dtype=torch.int32), torch.ones(n, 4)
        numbers[:, 2] = torch.arange(n)
        return numbers, limits

    found: dict[str, Any] = {
        "prompt": (writer.prompt, (tokens, first, *rows(1)), (_count(model.size.context), None, None, None))
    }
    found |= {step_name(n): (writer.step, rows(n)) for n in step_sizes(model.size.sequences)}
    if model.size.is_paged:
        found["lay"] = (writer.lay, (first, torch.zeros(model.size.most, dtype=torch.int64)))
        found["copy"] = (writer.copy, (first, first))
    return found | {
        "likely": (writer.likely, (torch.zeros(min(ALTERNATIVES, words)), first)),
        "remember": (writer.remember, (first, torch.zeros(words, dtype=torch.int32))),
        "allow": (writer.allow, (first, torch.zeros(-(-words // 32), dtype=torch.int32))),
    }
