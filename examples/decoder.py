"""A language model that writes text on a Vulkan device: one program of two methods, which share weights and the KV cache.

    python examples/decoder.py [--device NAME] [--precision fp16] [--steps N] [--prompt TEXT]

A small Llama over bytes learns this project's documentation for half a minute with torch on the CPU; `prefill` then reads the
prompt, and `decode` writes byte by byte. Its keys and values are buffers of the model: states, which stay on the device. With a
temperature, `read` and `write` draw the bytes on the device, where each step takes its input from the one before: the host only
collects what is written.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
from lapilli.sampling import next_token

ROOT = Path(__file__).resolve().parent.parent


class Block(nn.Module):
    """Attention with rotary positions, grouped queries and a cache, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, groups: int, context: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.keys = nn.Buffer(torch.zeros(1, groups, context, self.size), persistent=False)
        self.values = nn.Buffer(torch.zeros(1, groups, context, self.size), persistent=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, places: Tensor | None) -> Tensor:
        """x: [batch, tokens, width]; places: [tokens], where in the cache the tokens go; None: no cache (training)."""
        y = self.before_attention(x)
        q = rotate(self._heads(self.q(y), self.heads), rotation)
        k, v = rotate(self._heads(self.k(y), self.groups), rotation), self._heads(self.v(y), self.groups)
        if places is not None:
            k, v = self.keys.index_copy_(2, places, k), self.values.index_copy_(2, places, v)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(2, (count, self.size)).transpose(1, 2)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (Su et al., 2021); x: [batch, heads, tokens, size], cosines and sines: [tokens, size / 2]."""
    (a, b), (cos, sin) = x.chunk(2, -1), rotation
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Decoder(nn.Module):
    """A Llama-like language model: tokens [1, n] at positions start, start + 1, ... to logits [1, words] of the next one."""

    def __init__(
        self, words: int, width: int, layers: int, heads: int, groups: int, context: int, inner: int | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, context, inner or 3 * width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, words, bias=False)
        size = width // heads
        angles = torch.arange(context)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.cos, self.sin = nn.Buffer(angles.cos()), nn.Buffer(angles.sin())
        self.positions = nn.Buffer(torch.arange(context))

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """tokens: [1, n] int64; start: [1] int64."""
        places = start + torch.arange(tokens.shape[1], device=start.device)
        mask = self.positions <= places[:, None]
        x, rotation = self.embedding(tokens), (self.cos[places], self.sin[places])
        for block in self.blocks:
            x = block(x, rotation, mask, places)
        return self.head(self.norm(x[:, -1]))

    def train_on(self, tokens: Tensor) -> Tensor:
        """Logits of all next tokens, without the cache; [batch, n] -> [batch, n, words]."""
        n = tokens.shape[1]
        mask = self.positions[:n] <= self.positions[:n, None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, (self.cos[:n], self.sin[:n]), mask, None)
        return self.head(self.norm(x))


def compile_decoder(
    model: Decoder, context: int, precision: Literal["fp32", "fp16"] = "fp32", target: str | None = None
) -> lapilli.Program:
    """One program: `prefill` takes any number of tokens, `decode` one."""
    many, one, start = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0])
    sizes = {"tokens": {1: torch.export.Dim("n", min=2, max=context)}, "start": None}
    methods = {"prefill": (model, (many, start), sizes), "decode": (model, (one, start))}
    return lapilli.compile(methods, precision=precision, target=target)


class Writer(nn.Module):
    """Chooses each next token where its logits are, and keeps it and its position there: the input of the next step."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self.token, self.place = (nn.Buffer(torch.zeros(1, dtype=torch.int64)) for _ in range(2))

    def read(self, tokens: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """tokens: [1, n], the prompt; the others: [] -> the token after it, [1]."""
        self.place.zero_()
        return self._next(tokens, temperature, top_k, top_p)

    def write(self, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """The token after the last one, [1]."""
        return self._next(self.token[None], temperature, top_k, top_p)

    def _next(self, tokens: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        token = next_token(self.model(tokens, self.place), temperature, top_k, top_p)
        self.place.add_(tokens.shape[1])
        self.token.copy_(token)
        return token


def choice(temperature: float, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """How tokens are drawn, as a program takes it."""
    return torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p)


def compile_writer(
    model: Decoder, context: int, precision: Literal["fp32", "fp16"] = "fp32", target: str | None = None
) -> lapilli.Program:
    """One program: `read` takes a prompt, `write` nothing but how to draw."""
    writer, drawn = Writer(model), choice(1.0)
    many = torch.zeros(1, 8, dtype=torch.int64)
    sizes = ({1: torch.export.Dim("n", min=2, max=context)}, None, None, None)
    methods = {"read": (writer.read, (many, *drawn), sizes), "write": (writer.write, drawn)}
    return lapilli.compile(methods, precision=precision, target=target)


def written(
    program: lapilli.Program, prompt: Tensor, count: int, drawn: tuple[Tensor, Tensor, Tensor], ahead: int = 2
) -> Iterator[int]:
    """`count` tokens after a prompt, each as soon as it is there; meanwhile the device has the next `ahead` steps to do."""
    runs = deque([program.methods["read"].submit(prompt, *drawn)])
    for k in range(count):
        while len(runs) <= ahead and k + len(runs) < count:
            runs.append(program.methods["write"].submit(*drawn))
        yield int(runs.popleft().result())


def learn(model: Decoder, text: Tensor, steps: int, context: int) -> float:
    """The loss after some steps of training on windows of a text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        at = torch.randint(len(text) - context, (16,))
        windows = torch.stack([text[i : i + context] for i in at.tolist()])
        loss = F.cross_entropy(model.train_on(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def draw(model: Decoder, context: int, options: argparse.Namespace) -> None:
    """Writes what is drawn."""
    path = Path("demo") / "writer.lap"
    path.parent.mkdir(exist_ok=True)
    with compile_writer(model, context, options.precision) as compiled:
        compiled.save(path)
    prompt = torch.tensor([list(options.prompt.encode())])
    count = min(options.count, context - prompt.shape[1])
    with lapilli.load(path, device=options.device) as program:
        print(f"device    {program.device.name} ({program.device.type}), plan {program.plan}")
        program.set_state({"lapilli.random": torch.tensor([0, options.seed], dtype=torch.int32)})
        start = time.perf_counter()
        tokens = list(written(program, prompt, count, choice(options.temperature, options.top_k, options.top_p)))
        print(f"written   {(time.perf_counter() - start) / count * 1e3:.2f} ms a token")
    print(f"\n{options.prompt}│{bytes(tokens).decode(errors='replace')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="index or part of a name; see `lapilli devices`")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--prompt", default="The compiler turns a model into ")
    parser.add_argument("--count", type=int, default=160, help="bytes to write")
    parser.add_argument("--temperature", type=float, help="draw bytes instead of taking the likeliest ones")
    parser.add_argument("--top-k", type=int, default=0, help="from this many, 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="from those that have this probability together")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    options = parser.parse_args()
    context = 256

    torch.manual_seed(0)
    text = torch.tensor(list(b"".join(p.read_bytes() for p in sorted(ROOT.glob("docs/architecture.md")))))
    model = Decoder(words=256, width=96, layers=3, heads=6, groups=2, context=context)
    loss = learn(model, text, options.steps, 128)
    print(f"learned   {len(text)} bytes, {options.steps} steps, loss {loss:.2f}")
    model.requires_grad_(False)

    if options.temperature is not None:
        draw(model, context, options)
        return
    path = Path("demo") / "decoder.lap"
    path.parent.mkdir(exist_ok=True)
    start = time.perf_counter()
    with compile_decoder(model, context, options.precision) as compiled:
        compiled.save(path)
    print(f"compile   {time.perf_counter() - start:.1f} s, {path}: {path.stat().st_size / 1e6:.1f} MB")

    with lapilli.load(path, device=options.device) as program:
        print(f"device    {program.device.name} ({program.device.type}), plan {program.plan}")
        prefill, decode = program.methods["prefill"], program.methods["decode"]
        prompt = torch.tensor([list(options.prompt.encode())])
        found = [int(prefill(prompt, torch.tensor([0])).argmax())]
        start = time.perf_counter()
        while len(found) < options.count and prompt.shape[1] + len(found) < context:
            place = torch.tensor([prompt.shape[1] + len(found) - 1])
            found.append(int(decode(torch.tensor([found[-1:]]), place).argmax()))
        seconds = time.perf_counter() - start
        print(f"decode    {seconds / max(len(found) - 1, 1) * 1e3:.2f} ms a token")

    given, expected = torch.cat([prompt, torch.tensor([found[:-1]])], 1), torch.tensor(found)
    exact = model.train_on(given)[0, prompt.shape[1] - 1 :].argmax(-1)
    print(f"torch     writes the same {int((exact == expected).sum())} of {len(found)} bytes")
    print(f"\n{options.prompt}│{bytes(found).decode(errors='replace')}")


if __name__ == "__main__":
    main()
