"""Methods that share states: prefill and decode of a language model with its cache, and the general rules."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from agreement import relative_error
from decoder import Decoder, choice, compile_decoder, compile_writer, written
from torch import Tensor, nn

import lapilli
from lapilli.sampling import next_token

CONTEXT = 24


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-5), ("fp16", 2e-3)])
def test_prefill_and_decode_share_weights_and_cache(precision: str, bound: float) -> None:
    """Whatever the way tokens are cut into calls, the next token's logits are those of a single call, and of torch."""
    torch.manual_seed(1)
    model = Decoder(words=40, width=32, layers=2, heads=4, groups=2, context=CONTEXT).requires_grad_(False)
    tokens = torch.randint(40, (1, CONTEXT))
    want = model.train_on(tokens)
    with compile_decoder(model, CONTEXT, precision) as program:  # type: ignore[arg-type]
        assert program.report().segments == ("gpu",)
        assert sorted(program.state()) == sorted(f"blocks.{k}.{n}" for k in range(2) for n in ("keys", "values"))
        prefill, decode = program.methods["prefill"], program.methods["decode"]
        for lengths in ([9, *[1] * 15], [2, 5, 1, 1, 7, 8], [CONTEXT]):
            program.reset()
            place = 0
            for n in lengths:
                method = decode if n == 1 else prefill
                got = method(tokens[:, place : place + n], torch.tensor([place]))
                place += n
                assert relative_error(got, want[:, place - 1]) <= bound
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        assert sum(c.size for c in program.description.constants) < 1.1 * weights


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Buffer(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x
        return self.total * 1


class Reads(nn.Module):
    """Reads, and nothing more, a buffer that it calls something else."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.inner = counter

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner.total * 2 + 1) * x


class ReadsOnHost(Reads):
    """The same in two segments: there is no GPU kernel for float64."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner.total.double() * 2 + 1).float() * x


class AddsOnHost(Reads):
    def forward(self, x: Tensor) -> Tensor:
        self.inner.total += x.double().cumprod(0).float()
        return self.inner.total * 2


ONES = (torch.ones(2),)


@pytest.mark.parametrize("other", [Reads, ReadsOnHost])
def test_a_method_reads_what_another_changes(other: type[Reads]) -> None:
    model = Counter()
    expected = copy.deepcopy(model)
    with lapilli.compile({"read": (other(model), ONES), "add": (model, ONES)}) as program:
        assert list(program.state()) == ["total"]
        for k in range(3):
            x = torch.tensor([k + 1.0, 2.0])
            assert torch.equal(program.methods["read"](x), other(expected)(x))
            assert torch.equal(program.methods["add"](x), expected(x))
        program.reset()
        assert torch.equal(program.methods["read"](*ONES), torch.tensor([3.0, 5.0]))


def test_two_segments_change_what_the_player_holds() -> None:
    model = Counter()
    expected = copy.deepcopy(model)
    with lapilli.compile({"add": (model, ONES), "host": (AddsOnHost(model), ONES)}) as program:
        assert "cpu" in program.methods["host"].report().segments
        for k in range(3):
            x = torch.tensor([k + 1.0, 2.0])
            assert torch.equal(program.methods["host"](x), AddsOnHost(expected)(x))
            assert torch.equal(program.methods["add"](x), expected(x))
        assert np.array_equal(program.state()["total"], expected.total.numpy())


def test_programs_from_files_share_states_by_name() -> None:
    saved = [torch.export.export(copy.deepcopy(Counter()), ONES) for _ in range(2)]
    with lapilli.compile({"a": saved[0], "b": saved[1]}) as program:
        program.methods["a"](*ONES)
        assert program.methods["b"](*ONES).tolist() == [3, 4]


def test_different_buffers_of_one_name_are_refused() -> None:
    other = Counter()
    other.total += 1
    with pytest.raises(lapilli.CompileError, match="methods a and b have different buffers of the name 'total'"):
        lapilli.compile({"a": (Counter(), ONES), "b": (other, ONES)})


class Chosen(nn.Module):
    """A step that is given its token and position, and gives the next ones."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, place: Tensor, *drawn: Tensor) -> tuple[Tensor, Tensor]:
        return next_token(self.model(token, place), *drawn)[None], place + 1


@pytest.mark.long
def test_steps_take_their_input_from_the_step_before() -> None:
    """Greedy, a writer writes what torch finds likeliest after each token, however many steps are queued; drawn tokens depend on
    the seed, and not on whether the host is between two steps, or tensors of the device are.
    """
    torch.manual_seed(2)
    model = Decoder(words=40, width=32, layers=2, heads=4, groups=2, context=CONTEXT).requires_grad_(False)
    prompt, count = torch.randint(40, (1, 5)), 12
    with compile_writer(model, CONTEXT) as program:
        assert program.report().segments == ("gpu",)
        greedy = list(written(program, prompt, count, choice(0.0)))
        whole = torch.cat([prompt, torch.tensor([greedy[:-1]])], 1)
        assert greedy == model.train_on(whole)[0, 4:].argmax(-1).tolist()
        found = []
        for ahead in (1, 2, 7):
            program.reset()
            found.append(list(written(program, prompt, count, choice(3.0, 30, 0.95), ahead)))
        assert found[0] == found[1] == found[2] != greedy
        again = list(written(program, prompt, count, choice(3.0, 30, 0.95)))
        assert again != found[0]  # draws go on
        assert int(program.state()["owner.place"][0]) == 5 + count - 1

    drawn = choice(3.0, 30, 0.95)
    args = (torch.tensor([[1]]), torch.tensor([0]), *drawn)
    with lapilli.compile(Chosen(model), args, fallback="error") as program:
        token, place, here = args[0], args[1], []
        for _ in range(count):
            token, place = program(token, place, *drawn)
            here.append(int(token))
        program.reset()
        on_device = [t.to("vulkan") for t in args]
        there = []
        for _ in range(count):
            on_device[:2] = program(*on_device)
            there.append(on_device[0])
        assert torch.cat(there, 1).cpu()[0].tolist() == here and int(on_device[1]) == count
