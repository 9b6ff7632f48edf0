"""Language models from files and folders to text, beside transformers on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import as_gpu
import gguf
import language_models
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from language_models import AS_GGUF, END, KINDS, TEMPLATE, WORDS, made, save_folder, save_gguf

import lapilli
from lapilli.cli import main
from lapilli.llm import LLM
from lapilli.llm.decoder import Decoder
from lapilli.llm.from_source import build, kept, quantized, read
from lapilli.llm.gguf_source import read_gguf
from lapilli.player import _player, check

SEQUENCES = 3
PROMPT = "The theory of an answer in a sentence"


def theirs(model: Any, tokens: list[int], count: int) -> list[int]:
    """What transformers writes, greedily."""
    given = torch.tensor([tokens])
    model.generation_config.eos_token_id = None
    found = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return list(found[0, len(tokens) :].tolist())


def ours(lm: LLM, tokens: list[int], count: int) -> list[int]:
    lm.text = dataclasses.replace(lm.text, ends=())  # transformers goes on as well
    return [t.id for t in lm.generate(tokens, max_tokens=count).tokens]


def of_one_plan(path: Path, context: int, half: bool = False, quantize: Any = None, sequences: int = 1) -> LLM:
    """As `LLM(path, context=context)`, without the plans of other devices, which take as long to compile."""
    file = path.parent / "one.lap"
    target = "cpu-fp16" if half else "cpu-fp32"
    file.write_bytes(build(read(path), context, quantize=quantize, sequences=sequences, target=target))
    return LLM(file)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.part(12)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """For 128 tokens after 18: phi3's window and the scaled positions of others begin to count on the way."""
    model = made(kind)
    folder = save_folder(model, tmp_path / kind)
    with LLM(folder, context=146) if kind == "llama" else of_one_plan(folder, 146) as lm:
        assert lm.program.report().segments == ("gpu",)
        tokens = lm.tokens(PROMPT[:22])
        found = ours(lm, tokens, 128)
        assert found == theirs(model, tokens, 128)
        assert len(found) == 128 and len(set(found)) > 8


@pytest.mark.parametrize(
    "kind, form",
    [*((k, "folder") for k in KINDS), *((k, "gguf") for k in AS_GGUF), ("phi", "gguf-fused")],
)
@pytest.mark.part(1)
def test_decoders_compute_what_transformers_does(kind: str, form: str, tmp_path: Path) -> None:
    """Without a compiler: all logits after a prompt that is longer than the windows."""
    model = made(kind)
    if form == "folder":
        source = read(save_folder(model, tmp_path / kind))
    else:
        source = read(save_gguf(model, tmp_path / "model.gguf", fused=form == "gguf-fused"))
    tokens = torch.randint(WORDS, [1, 40], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits[:, -1]
        found = Decoder(source.shape, source.tensors, 64)(tokens, torch.tensor([0]))
    # sums of some hundred terms in another order, in three layers
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "kind, blocks",
    [("llama", "F32"), ("phi3", "F32"), ("gemma", "F32"), ("qwen3", "F16"), ("qwen2", "BF16"), ("phi", "F32")],
)
@pytest.mark.part(6)
def test_gguf_files_hold_the_same_models(kind: str, blocks: str, tmp_path: Path) -> None:
    model = made(kind)
    if blocks != "F32":
        model = (model.half() if blocks == "F16" else model.bfloat16()).float()
    file = save_gguf(model, tmp_path / "model.gguf", blocks)
    with of_one_plan(file, 64, blocks != "F32") as lm:
        tokens = lm.tokens(PROMPT)
        assert tokens == language_models.tokenizer().encode(PROMPT).ids
        assert ours(lm, tokens, 24) == theirs(model, tokens, 24)
        matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        stored = sum(c.size for c in lm.program.description.constants)
        assert stored < 1.1 * matrices * (4 if blocks == "F32" else 2)


@pytest.mark.long
@pytest.mark.parametrize("target", ["cpu-fp16", "gpu-fp16", "gpu-fp16-matrix"])
def test_half_precision_keeps_halves_in_the_cache(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of prompts is then computed by matrix units, where there are some."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "cache"))
    as_gpu.on_any_device(monkeypatch.setattr)
    path = save_folder(made("llama"), tmp_path / "llama")
    file = path.parent / "half.lap"
    file.write_bytes(build(read(path), 64, precision="fp16", target=target))
    source = read(path)
    model = Decoder(source.shape, source.tensors, 64)
    with LLM(file) as lm, torch.no_grad():
        states = {s.name: s.dtype for s in lm.program.description.states}
        assert {str(d) for n, d in states.items() if n.endswith(("keys", "values"))} == {"float16"}, states
        if target == "gpu-fp16-matrix":
            plan = next(p for p in lm.program.description.methods[0].plans if p.name == target)
            assert any(d.kernel == "attention_matrix" for d in plan.run)
        tokens, place = lm.tokens(PROMPT), 0
        for new in (tokens, tokens[:1], tokens[:5]):
            tokens_so_far = torch.tensor([new])
            wanted = model(tokens_so_far, torch.tensor([place]))
            _read(lm, new, place)
            found = torch.from_numpy(lm.program.state()["owner.logits"])
            # roundings of halves, 2 ** -11, in two layers of some ten values each
            assert float((found - wanted).norm() / wanted.norm()) < 1e-2
            place += len(new)


@pytest.mark.long
def test_devices_that_bind_four_buffers_draw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_gpu.on_any_device(monkeypatch.setattr)
    path = save_folder(made("llama"), tmp_path / "llama")
    found = []
    for target in ("cpu-fp32", "any-fp32-few"):
        file = path.parent / f"{target}.lap"
        file.write_bytes(build(read(path), 64, target=target))
        with LLM(file) as lm:
            lm.text = dataclasses.replace(lm.text, ends=())
            options: list[dict[str, Any]] = [
                {"temperature": 0.8, "seed": 3},
                {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "seed": 4},
                {"temperature": 1.0, "top_p": 0.5, "repetition_penalty": 1.3, "seed": 5},
            ]
            found.append([[t.id for t in lm.generate(PROMPT, max_tokens=24, **o).tokens] for o in options])
            if target == "any-fp32-few":
                assert all(k.bindings <= 4 and math.prod(k.local) <= 128 for k in lm.program.description.kernels)
    assert found[0] == found[1]


def _read(lm: LLM, tokens: list[int], place: int) -> None:
    """By the program's own methods."""
    numbers = np.array([[tokens[0], place, 0, 0, 0, 0]], np.int32)
    limits = np.array([[0, 1, -np.inf, 1]], np.float32)
    if len(tokens) == 1:
        lm.program.methods["step"].submit(numbers, limits).result()
    else:
        lm.program.methods["prompt"].submit(np.array([tokens]), np.array([0]), numbers, limits).result()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LLM]:
    """A llama of Q8_0 blocks, and the same saved as a program."""
    folder = tmp_path_factory.mktemp("llm")
    torch.manual_seed(0)
    model = language_models.made("qwen2")
    config = model.config
    config.hidden_size, config.intermediate_size = 64, 96
    model = type(model)(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.copy_(torch.randn_like(p) * (1 if p.dim() == 1 else 2 / p.shape[1] ** 0.5))
    file = save_gguf(model, folder / "model.gguf", "Q8_0")
    lm = of_one_plan(file, 96, sequences=SEQUENCES)
    lm.save(folder / "model.lap")
    return folder / "model.lap", lm


@pytest.fixture
def lm(files: tuple[Path, LLM]) -> LLM:
    return files[1]


def test_packed_weights_give_the_dequantized_models_tokens(files: tuple[Path, LLM], lm: LLM) -> None:
    source = read_gguf(files[0].with_suffix(".gguf"))
    model = Decoder(source.shape, source.tensors, 96)
    found = [t.id for t in lm.generate(PROMPT, max_tokens=48).tokens]
    tokens, place, wanted = torch.tensor([lm.tokens(PROMPT)]), 0, list[int]()
    with torch.no_grad():
        while len(wanted) < 48 and END not in wanted:
            logits = model(tokens, torch.tensor([place]))
            place += tokens.shape[1]
            tokens = logits.argmax(-1)[None]
            wanted.append(int(tokens))
    assert found == wanted
    stored = {c.name: c.size for c in lm.program.description.constants}
    assert sum(stored.values()) < 1.02 * sum(
        np.asarray(t.data).nbytes for t in gguf.GGUFReader(files[0].with_suffix(".gguf")).tensors
    )


def test_a_saved_model_needs_neither_source_nor_torch(files: tuple[Path, LLM], lm: LLM) -> None:
    code = (
        "import sys, lapilli\n"
        f"lm = lapilli.LLM({str(files[0])!r})\n"
        f"print([t.id for t in lm.generate({PROMPT!r}, max_tokens=9, temperature=2.0, seed=5).tokens])\n"
        "assert 'torch' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True)
    again = lm.generate(PROMPT, max_tokens=9, temperature=2.0, seed=5)
    assert run.stdout.strip() == str([t.id for t in again.tokens])


def test_what_is_drawn_follows_the_seed_and_the_options(lm: LLM) -> None:
    given = dict(max_tokens=20, temperature=3.0)
    one = lm.generate(PROMPT, seed=1, **given)
    assert lm.generate(PROMPT, seed=1, **given).tokens == one.tokens
    assert lm.generate(PROMPT, seed=2, **given).tokens != one.tokens
    greedy = lm.generate(PROMPT, max_tokens=20).tokens
    for narrow in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)):
        assert lm.generate(PROMPT, seed=1, **given, **narrow).tokens == greedy
    # 0.5: any token half as likely as the first; what is drawn is never less likely.
    for token in lm.generate(PROMPT, temperature=1.0, min_p=0.5, logprobs=1, max_tokens=30, seed=3).tokens:
        assert token.logprob >= token.likely[0][1] + np.log(0.5) - 1e-4


def test_log_probabilities_are_those_of_the_model(files: tuple[Path, LLM], lm: LLM) -> None:
    answer = lm.generate(PROMPT, max_tokens=6, logprobs=3)
    source = read_gguf(files[0].with_suffix(".gguf"))
    model, tokens = Decoder(source.shape, source.tensors, 96), lm.tokens(PROMPT)
    with torch.no_grad():
        for written in answer.tokens:
            wanted = torch.log_softmax(model(torch.tensor([tokens]), torch.tensor([0]))[0], -1)
            top = wanted.topk(3)
            assert [n for n, _ in written.likely] == top.indices.tolist()
            np.testing.assert_allclose([p for _, p in written.likely], top.values.numpy(), rtol=0, atol=1e-4)
            assert abs(written.logprob - float(wanted[written.id])) < 1e-4
            tokens = [*tokens, written.id]


def test_a_penalty_is_that_of_transformers_processor(files: tuple[Path, LLM], lm: LLM) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    source = read_gguf(files[0].with_suffix(".gguf"))
    model, tokens = Decoder(source.shape, source.tensors, 96), lm.tokens(PROMPT)
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    first = len(tokens)
    with torch.no_grad():
        while len(tokens) < first + 20:
            logits = model(torch.tensor([tokens]), torch.tensor([0]))
            tokens.append(int(processor(torch.tensor([tokens]), logits).argmax()))
    found = [t.id for t in lm.generate(PROMPT, max_tokens=20, repetition_penalty=1.7).tokens]
    assert found == tokens[first : first + len(found)] and (len(found) == 20 or found[-1] == END)


def test_the_cache_ends(lm: LLM) -> None:
    """A prompt may fill it; the last token is written after the last place."""
    whole = [5] * 96
    assert lm.generate(whole[:90], max_tokens=None, temperature=5.0, top_k=0, seed=4, stop=None).reason in (
        "length",
        "stop",
    )
    assert len(lm.generate(whole, temperature=5.0, seed=4).tokens) == 1
    answer = lm.generate(whole[:94], temperature=5.0, seed=4)
    assert len(answer.tokens) == 3 and answer.reason == "length"
    with pytest.raises(lapilli.InvalidInputError, match="97 tokens, and the cache holds 96"):
        lm.generate([*whole, 5])


def test_prompts_of_any_length(lm: LLM) -> None:
    """The same tokens whether they are read at once, one after the other by steps, or in part before."""
    tokens = lm.tokens(PROMPT)
    for n in (1, 2, 3, len(tokens)):
        answers = []
        for before in ([], tokens[: n - 1], tokens[: n // 2], tokens[:n]):
            lm.generate([7, 7, 7], max_tokens=1)
            if before:
                lm.generate(before, max_tokens=1)
            answers.append([t.id for t in lm.generate(tokens[:n], max_tokens=8).tokens])
        assert all(a == answers[0] for a in answers)
    assert lm.generate("", max_tokens=4).prompt_tokens == 1
    assert lm.generate(tokens, max_tokens=0).tokens == []


def test_what_prompts_begin_with_alike_is_read_once(lm: LLM) -> None:
    lm.generate([7, 7, 7], max_tokens=1)
    first = lm.generate(PROMPT, max_tokens=5)
    read = lm._session.read
    more = lm.tokens(PROMPT) + [t.id for t in first.tokens] + [3, 4]
    lm.generate(more, max_tokens=5)
    assert lm._session.read - read <= 4


def test_answers_take_turns(lm: LLM) -> None:
    """Streams that are read in turn, and threads, write what each would alone, drawn tokens too."""
    given = [dict(prompt=PROMPT, seed=1), dict(prompt="Another one begins", seed=2), dict(prompt=PROMPT[:9], seed=3)]
    common: dict[str, Any] = dict(temperature=2.0, max_tokens=15, repetition_penalty=1.3)
    alone = [lm.generate(**g, **common).text for g in given]
    streams = [lm.generate(**g, **common, stream=True) for g in given]
    texts = ["".join(p) for p in zip(*itertools.zip_longest(*streams, fillvalue=""), strict=True)]
    assert texts == alone
    found = [""] * len(given)

    def write(k: int) -> None:
        found[k] = lm.generate(**given[k], **common).text

    threads = [threading.Thread(target=write, args=(k,)) for k in range(len(given))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == alone


def test_answers_depend_on_their_prompt_and_options_alone(lm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was written before, in whatever order streams are read, and however prompts are cut: at random."""
    rng = np.random.default_rng(5)
    base = [int(t) for t in rng.integers(0, 290, 60)]
    made, alone = list[tuple[list[int], dict[str, Any]]](), list[str]()
    for _ in range(8):
        start, n = int(rng.integers(2)), int(rng.integers(1, 50))
        options = dict(
            max_tokens=int(rng.integers(1, 20)), temperature=float(rng.choice([0.0, 2.0])), seed=int(rng.integers(9)),
            repetition_penalty=float(rng.choice([1.0, 1.5])), top_p=float(rng.choice([1.0, 0.9])),
        )  # fmt: skip
        made.append((base[start : start + n], options))
        lm._session.forget()  # reads it whole
        alone.append(lm.generate(*made[-1][:1], **options).text)
    for longest in (3, 8, 512):
        monkeypatch.setattr("lapilli.llm.session.LONGEST", longest)
        streams = [lm.generate(prompt, **options, stream=True) for prompt, options in made]
        left = list(range(len(streams)))
        while left:
            k = int(rng.choice(left))
            for _ in range(int(rng.integers(1, 4))):
                if next(streams[k], None) is None and k in left:
                    left.remove(k)
        assert [s.answer.text for s in streams] == alone


def test_what_joins_and_leaves_changes_no_answer(lm: LLM) -> None:
    """At random: streams begin, are read for a while, are cancelled or forgotten, more of them than there are slots; embeddings are
    made between. Each writes what it writes alone, drawn tokens, penalties and log-probabilities too.
    """
    rng = np.random.default_rng(11)
    base = [int(t) for t in rng.integers(0, 290, 90)]

    def chosen() -> tuple[list[int], dict[str, Any]]:
        start, n = 30 * int(rng.integers(2)), int(rng.integers(1, 60))
        options: dict[str, Any] = dict(
            max_tokens=int(rng.integers(1, 30)), temperature=float(rng.choice([0.0, 1.5])), seed=int(rng.integers(99)),
            repetition_penalty=float(rng.choice([1.0, 1.4])), logprobs=int(rng.integers(3)) or None,
        )  # fmt: skip
        return base[start : start + n], options

    def recent() -> Any:
        return begun[int(rng.integers(max(0, len(begun) - 5), len(begun)))][1]

    vector = lm.embed([base[:40]])
    begun: list[Any] = []
    for _ in range(160):
        act = rng.random()
        if act < 0.2 or not begun:
            given = chosen()
            begun.append((given, lm.generate(given[0], **given[1], stream=True)))
        elif act < 0.26:
            recent().cancel()
        elif act < 0.29:
            begun.pop()  # nobody reads it any more
        elif act < 0.31:
            np.testing.assert_allclose(lm.embed([base[:40]]), vector, rtol=0, atol=1e-5)
        else:
            stream = recent()
            for _ in range(int(rng.integers(1, 6))):
                next(stream, None)
    cancelled = 0
    for (prompt, options), stream in begun:
        list(stream)
        lm._session.forget()
        alone, found = lm.generate(prompt, **options).tokens, stream.answer.tokens
        if stream.answer.reason == "cancelled":
            cancelled += 1
            alone = alone[: len(found)]
        assert [t.id for t in found] == [t.id for t in alone]
        for a, b in zip(found, alone, strict=True):
            # sums of some fifty terms in other orders
            assert abs(a.logprob - b.logprob) < 1e-4 and [n for n, _ in a.likely] == [n for n, _ in b.likely]
    assert cancelled and len(begun) - cancelled > 10


def test_answers_with_a_grammar_are_written_beside_others(lm: LLM) -> None:
    """What a grammar allows is of its answer alone, also where slots move and are taken again."""
    rules = 'root ::= [a-f]{5,40} "."'
    given: list[tuple[str, dict[str, Any]]] = [
        ("x", dict(grammar=rules, seed=k, temperature=3.0))
        if k % 2
        else (PROMPT[: 3 + k], dict(seed=k, temperature=1.5))
        for k in range(6)
    ]
    alone = [lm.generate(p, **o, max_tokens=12 + 5 * k).text for k, (p, o) in enumerate(given)]
    for first in range(2):
        streams = [lm.generate(p, **o, max_tokens=12 + 5 * k, stream=True) for k, (p, o) in enumerate(given)]
        for part in (streams[first : first + 3], streams[:first] + streams[first + 3 :]):
            for _ in itertools.zip_longest(*part):
                pass
        assert [s.answer.text for s in streams] == alone
    assert all(set(t) <= set("abcdef.") for t in alone[1::2])
    assert any(s.answer.reason == "stop" and len(s.answer.text) > 5 for s in streams[1::2])
    for bad in (
        dict(grammar="root ::= ("),
        dict(grammar='root ::= root "a"'),
        dict(grammar="start: /[/"),
        dict(json_schema={"type": 5}),
        dict(json_schema=5),
        dict(grammar="x", json_schema={}),
    ):
        with pytest.raises(lapilli.InvalidInputError) as error:
            lm.generate("x", **bad)
        assert len(str(error.value)) < 200 and "\n" not in error.value.args[0]


def test_what_is_no_prompt_is_told(lm: LLM) -> None:
    given: list[tuple[Any, str]] = [
        (3, r"The prompt is 3 \(int\); it can be a text, a list of"), (None, "The prompt is None"), (b"the", r"their \.decode\(\)"),
        (["a", 3], r"Prompt 1 of the list is 3 \(int\)"), ({"role": "user", "content": "a"}, "Give a list of it"),
        (torch.tensor([1, 2]), r"Give its \.tolist\(\)"), (np.array([1, 2]), r"Give its \.tolist\(\)"),
        ([1, True], r"has True \(bool\) at place 1"), ([1, 10**9], "at place 1; it can be .* 0 to 299"),
        ("a\ud800", r"'\\ud800' at place 1, which is half of a character"), (["a", "\udfff"], "half of a character"),
        ([{"role": "user", "content": "\ud800"}], "half of a character"),
    ]  # fmt: skip
    for prompt, reason in given:
        with pytest.raises(lapilli.InvalidInputError, match=reason):
            lm.generate(prompt, max_tokens=2)
    calls: list[Any] = [lm.score, lm.perplexity, lm.embed, lm.tokens]
    for text in (3, None, b"the", "\ud800"):
        for call in calls:
            with pytest.raises(lapilli.InvalidInputError, match="can be a text|half of a character"):
                call(text)
    with pytest.raises(lapilli.InvalidInputError, match=r"Text 1 is 3 \(int\)"):
        lm.embed(["a", 3])  # type: ignore[list-item]
    wrong: list[tuple[Any, str]] = [({"max_token": 1}, "max_token is no .* mean max_tokens"), ({"stop": 3}, "stop is")]
    for options, reason in wrong:
        with pytest.raises(lapilli.InvalidInputError, match=reason):
            lm.generate("a", **options)
    of_none: Any = []
    assert lm.generate(of_none) == []
    several: list[Any] = ["the", "a"]
    one_by_one: Any = iter(several)
    assert [a.text for a in lm.generate(one_by_one, max_tokens=4)] == [
        a.text for a in lm.generate(several, max_tokens=4)
    ]


def test_several_prompts_are_written_in_one_step(lm: LLM) -> None:
    prompts: list[Any] = [PROMPT, "Another one begins", PROMPT[:9], [1, 2, 3], "x"]
    alone = [lm.generate(p, max_tokens=12).tokens for p in prompts]
    lm._session.steps.clear()
    found = lm.generate(prompts, max_tokens=12)
    assert [[t.id for t in a.tokens] for a in found] == [[t.id for t in a] for a in alone]
    steps = lm._session.steps
    assert len(steps) < sum(len(a) for a in alone) * 0.7 and set(steps) <= {1, 2, 3} and 3 in steps
    assert [a.text for a in lm.generate([[{"role": "user", "content": "a"}]] * 2, max_tokens=3)] == [
        lm.generate([{"role": "user", "content": "a"}], max_tokens=3).text
    ] * 2
    with pytest.raises(lapilli.InvalidInputError, match="97 tokens"):
        lm.generate(["a", [1] * 97])
    with pytest.raises(lapilli.InvalidInputError, match="no stream"):
        lm.generate(["a", "b"], stream=True)


def test_steps_get_smaller_when_others_end(lm: LLM) -> None:
    """A step is no larger than for the answers that are left, and what ended can still be gone on with."""
    given = [dict(prompt=[k, 7, 8, 9], max_tokens=n, temperature=2.0, seed=k) for k, n in ((1, 4), (2, 8), (3, 30))]
    alone = [lm.generate(**g).tokens for g in given]
    assert len(alone[2]) > 20
    streams = [lm.generate(**g, stream=True) for g in given]
    lm._session.steps.clear()
    for _ in itertools.zip_longest(*streams):
        pass
    assert [s.answer.tokens for s in streams] == alone
    assert lm._session.steps[-8:] == [1] * 8
    read = lm._session.read
    ended = [1, 7, 8, 9] + [t.id for t in alone[0]]
    lm.generate([*ended, 5], max_tokens=1)
    assert lm._session.read - read <= 2


def test_a_common_beginning_is_read_once(lm: LLM) -> None:
    """While the answer that read it goes on."""
    prompt = list(range(40, 90))
    first = lm.generate(prompt, temperature=2.0, seed=4, stream=True)
    next(first)
    read = lm._session.read
    other = lm.generate([*prompt, 5], max_tokens=3).tokens
    assert lm._session.read - read <= 1  # the last token is read by a step
    lm._session.forget()
    assert [t.id for t in lm.generate([*prompt, 5], max_tokens=3).tokens] == [t.id for t in other]


def test_memory_is_that_of_the_sequences(lm: LLM) -> None:
    page, rest = 2 * 2 * 1 * 64 * 16 * 4, WORDS * (4 + 4) + 8 + 64 * 4
    pages, lines = SEQUENCES * 2 + 1, SEQUENCES + 1  # the last ones: of rows that are computed in vain
    assert pages * page <= lm.memory().states < pages * page + lines * rest + 30 * 256


@pytest.mark.long
def test_memory_is_in_proportion_to_sequences(tmp_path: Path) -> None:
    folder, sizes = save_folder(made("llama"), tmp_path / "llama"), []
    for sequences in (1, 4):
        with of_one_plan(folder, 160, sequences=sequences) as lm:
            sizes.append(lm.memory().states)
    token, rest = 2 * 2 * 2 * 12 * 4, WORDS * (4 + 4) + 8 + 40
    for tokens, lines, size in zip((160, (4 * 3 + 1) * 64), (1, 5), sizes, strict=True):
        assert tokens * token <= size < tokens * token + lines * rest + 30 * 256  # each state begins at such a place


def test_embeddings_are_those_of_the_last_token(
    files: tuple[Path, LLM], lm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of parts of texts; or the mean of all tokens."""
    source = read_gguf(files[0].with_suffix(".gguf"))
    model = Decoder(source.shape, source.tensors, 96)
    texts: list[Any] = ["x", PROMPT, list(range(96)), [7, 8, 9]]
    for pooling in ("last", "mean"):
        monkeypatch.setattr(lm._session, "about", dataclasses.replace(lm._session.about, pooling=pooling))
        for longest in (3, 4, 512):
            monkeypatch.setattr("lapilli.llm.session.LONGEST", longest)
            found = torch.from_numpy(lm.embed(texts))
            for text, row in zip(texts, found, strict=True):
                with torch.no_grad():
                    hidden = model.hidden(torch.tensor([lm.tokens(text)]), torch.tensor([0]))[0]
                whole = hidden[-1] if pooling == "last" else hidden.mean(0)
                assert float((row - whole / whole.norm()).norm()) < 1e-5
    for bad in (list[Any](), [""], [[1] * 97]):
        with pytest.raises(lapilli.InvalidInputError):
            lm.embed(bad)


def test_an_answer_can_be_cancelled(lm: LLM) -> None:
    whole = lm.generate(PROMPT, max_tokens=30)
    stream = lm.generate(PROMPT, max_tokens=30, stream=True)
    begun = next(stream)
    stream.cancel()
    assert list(stream) == [] and stream.answer.reason == "cancelled" and whole.text.startswith(begun)
    assert lm.generate(PROMPT, max_tokens=30).text == whole.text


def test_stop_words_end_an_answer(lm: LLM) -> None:
    """Also across tokens; nothing of one is given out before."""
    whole = lm.generate(PROMPT, max_tokens=30, temperature=2.0, seed=1).text
    for at in range(0, len(whole) - 3, 3):
        word = whole[at : at + 3]
        stream = lm.generate(PROMPT, max_tokens=30, temperature=2.0, seed=1, stop=["never that", word], stream=True)
        assert "".join(stream) == whole[: whole.index(word)] and stream.answer.reason == "stop"
        assert stream.answer.text == whole[: whole.index(word)]


def test_chats_use_the_models_template(lm: LLM) -> None:
    messages = [{"role": "user", "content": "the question"}]
    text = "[user]the question<end>[assistant]"
    assert lm.text.template == TEMPLATE and lm.text.chat(messages) == text
    assert lm.tokens(messages) == language_models.tokenizer().encode(text).ids
    assert lm.generate(messages, max_tokens=3).prompt_tokens == len(lm.tokens(messages))
    hostile = dataclasses.replace(lm.text, template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    for bad, at in (
        (hostile, messages),
        (lm.text, []),
        (lm.text, [{"role": "user"}]),
        (lm.text, [{"role": 1, "content": ""}]),
    ):
        with pytest.raises(lapilli.InvalidInputError, match=r"template refuses|Messages are"):
            bad.chat(at)
    without = dataclasses.replace(lm.text, template=None)
    with pytest.raises(lapilli.InvalidInputError, match="no chat template"):
        without.chat(messages)


@pytest.mark.parametrize(
    "given, what",
    [
        (dict(temperature=-1.0), "temperature is -1.0"), (dict(temperature=float("nan")), "temperature"), (dict(top_p=2), "top_p"),
        (dict(top_k=-1), "top_k"), (dict(top_k=1.5), "top_k"), (dict(max_tokens=-1), "max_tokens"), (dict(stop=""), "stop"),
        (dict(stop=["x"] * 17), "stop"), (dict(min_p=-0.1), "min_p"), (dict(repetition_penalty=0), "repetition_penalty"),
        (dict(seed="x"), "seed"), (dict(logprobs=21), "logprobs"), (dict(temperature=1e9), "it can be between 0 and 1000000"),
        (dict(stop="x" * 5000), r"^stop is \('x{58}…; it can be a text"),
    ],
)  # fmt: skip
@pytest.mark.part(1)
def test_options_outside_of_what_is_accepted_are_named(lm: LLM, given: dict[str, Any], what: str) -> None:
    with pytest.raises(lapilli.InvalidInputError, match=what):
        lm.generate(PROMPT, **given)


def test_wrong_files_and_prompts_are_refused_with_a_reason(lm: LLM, tmp_path: Path) -> None:
    with pytest.raises(lapilli.InvalidInputError, match="numbers from 0 to 299"):
        lm.generate([1, 300])
    with pytest.raises(FileNotFoundError):
        LLM(tmp_path / "nothing.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(range(200)))
    with pytest.raises(lapilli.InvalidFileError, match="no whole GGUF file: it ends too early or is damaged"):
        LLM(tmp_path / "bad.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(lapilli.CompileError, match="'mamba'; taken are llama, qwen2, qwen3, gemma, phi2"):
        LLM(tmp_path / "other.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(lapilli.CompileError, match="'bert'; taken are llama"):
        LLM(tmp_path)
    lapilli.compile(torch.nn.ReLU(), (torch.ones(2),)).save(tmp_path / "relu.lap")
    with pytest.raises(lapilli.InvalidFileError, match="no language model"):
        LLM(tmp_path / "relu.lap")
    given = {"name": "x", "context": 8, "words": 9, "sequences": 1, "pooling": "last", "tokens": None}
    for metadata, reason in (
        ({"llm.model": "{}"}, "damaged"),
        ({"llm.model": '{"name": "x", "context": 8, "words": 99999999999}'}, "damaged: \"'sequences'"),
        ({"llm.model": json.dumps(given | {"words": 99999999999})}, "lacks the methods"),
        ({"llm.model": json.dumps(given | {"sequences": 10**9})}, "1000000000 sequences"),
        ({"llm.model": json.dumps(given | {"pooling": "most"})}, "pooling 'most'"),
        ({"llm.model": json.dumps(given | {"tokens": 7})}, "a cache of 7 tokens for a context of 8"),
        ({"llm.model": json.dumps(given | {"tokens": 10**9})}, "a cache of 1000000000 tokens"),
    ):
        lapilli.compile(torch.nn.ReLU(), (torch.ones(2),), metadata=metadata).save(tmp_path / "relu.lap")
        with pytest.raises(lapilli.InvalidFileError, match=reason):
            LLM(tmp_path / "relu.lap")


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"model_type": "stablelm", "qk_layernorm": True}, r"qk_layernorm of stablelm\) are not taken"),
        ({"model_type": "phi", "hidden_act": "relu"}, "activation is 'relu'; taken are 'silu'"),
        ({"model_type": "gpt_neox"}, "'gpt_neox'; taken are llama, .* phi, phi3, starcoder2, stablelm"),
        ({"model_type": "phi"}, "lacks 'layer_norm_eps'"),
    ],
)
@pytest.mark.part(1)
def test_configurations_that_are_not_taken_are_named(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    numbers = dict(
        vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, max_position_embeddings=9
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(numbers | given))
    language_models.tokenizer().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(lapilli.LapilliError, match=reason):
        read(tmp_path)


@pytest.mark.parametrize("quantize, most", [("int8", 0.32), ("int4", 0.19)])
@pytest.mark.long
def test_folders_can_be_quantized_on_the_way(quantize: Any, most: float, tmp_path: Path) -> None:
    """The size is that of codes and scales, and the tokens those of the numbers that they mean."""
    model = made("qwen2")
    model.config.hidden_size = 64
    model = type(model)(model.config).eval().requires_grad_(False)
    folder = save_folder(model, tmp_path / "model")
    source = read(folder)
    decoder = Decoder(source.shape, {k: quantized(v, quantize) for k, v in source.tensors.items()}, 64)
    with of_one_plan(folder, 64, True, quantize) as lm:
        matrices = sum(p.nbytes for p in model.parameters() if p.dim() > 1)
        assert sum(c.size for c in lm.program.description.constants) < most * matrices
        answer = lm.generate([1, 2, 3], max_tokens=3, logprobs=5)
        with torch.no_grad():
            wanted = torch.log_softmax(decoder(torch.tensor([[1, 2, 3]]), torch.tensor([0]))[0], -1)
        for number, logprob in answer.tokens[0].likely:
            assert abs(logprob - float(wanted[number])) < 1e-4


def test_matrices_of_any_width_can_be_quantized(tmp_path: Path) -> None:
    """44 and 67 columns are no whole number of groups, 67 no whole number of bytes: codes all the same, and the tokens of what they
    mean. Codes stay what they are, and that is said.
    """
    model = made("llama")
    model.config.hidden_size, model.config.intermediate_size = 44, 67
    model.config.num_attention_heads, model.config.head_dim, model.config.num_hidden_layers = 2, 22, 1
    torch.manual_seed(0)
    model = type(model)(model.config).eval().requires_grad_(False)
    folder = save_folder(model, tmp_path / "model")
    source = read(folder)
    decoder = Decoder(source.shape, {k: quantized(v, "int4") for k, v in source.tensors.items()}, 64)
    with of_one_plan(folder, 64, False, "int4") as lm:
        matrices = sum(p.nbytes for p in model.parameters() if p.dim() > 1)
        assert sum(c.size for c in lm.program.description.constants) < 0.22 * matrices
        answer = lm.generate([1, 2, 3], max_tokens=2, logprobs=5)
        with torch.no_grad():
            wanted = torch.log_softmax(decoder(torch.tensor([[1, 2, 3]]), torch.tensor([0]))[0], -1)
        for number, logprob in answer.tokens[0].likely:
            assert abs(logprob - float(wanted[number])) < 1e-4
    said = list[str]()
    kept({k: quantized(v, "int8") for k, v in source.tensors.items()}, "fp32", "int4", (), said.append)
    assert said == ["quantize='int4' changes nothing: all matrices are codes already, and stay as they are."]


def test_damaged_files_are_errors_with_a_reason(files: tuple[Path, LLM], tmp_path: Path) -> None:
    """Of changed bytes of the metadata and of cut files, none leads to another exception."""
    whole = files[0].with_suffix(".gguf").read_bytes()
    rng, read_well = np.random.default_rng(6), 0
    for k in range(150):
        data = bytearray(whole)
        for at in rng.integers(0, 14000, int(rng.integers(1, 4))):
            data[at] = int(rng.integers(256))
        (tmp_path / f"{k}.gguf").write_bytes(data[: int(rng.integers(10, len(data)))] if k % 10 == 0 else data)
        try:
            source = read_gguf(tmp_path / f"{k}.gguf")
        except lapilli.LapilliError as error:
            assert str(error)
            continue
        read_well += 1
        assert source.shape.layers == 2
    assert 0 < read_well < 150


class Writer:
    """The player's own, by the C interface."""

    def __init__(self, lm: LLM) -> None:
        self.ffi, self.library = _player()
        self.program = lm.program._loaded.native._program()
        made = self.ffi.new("lapilli_writer **")
        check(self.library.lapilli_writer_create(self.program, made))
        self.handle = self.ffi.gc(made[0], self.library.lapilli_writer_destroy)

    def begin(self, tokens: list[int], **sampling: float) -> None:
        given = {"temperature": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "top_k": 0, "seed": 0} | sampling
        options = self.ffi.new("lapilli_sampling *", given)
        check(self.library.lapilli_writer_begin(self.handle, tokens, len(tokens), options))

    def next(self) -> tuple[int, float]:
        token, logprob = self.ffi.new("int32_t *"), self.ffi.new("float *")
        check(self.library.lapilli_writer_next(self.handle, token, logprob))
        return token[0], logprob[0]

    def read(self) -> int:
        info = self.ffi.new("lapilli_writer_info *")
        check(self.library.lapilli_writer_describe(self.handle, info))
        return int(info.read)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.part(2)
def test_the_player_writes_the_same_tokens(sequences: int, tmp_path: Path) -> None:
    """Greedily and drawn, at every length of a prompt, after any other text; it reads what it has not read, and no more."""
    context = 40
    folder = save_folder(made("llama"), tmp_path / "llama")
    drawn = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "seed": 5}
    random = np.random.default_rng(0)
    with of_one_plan(folder, context, sequences=sequences) as lm:
        lm.text = dataclasses.replace(lm.text, ends=())
        prompts = [random.integers(0, 298, n).tolist() for n in (1, 2, 3, 17, context - 1, context)]
        prompts += [prompts[3][:9], prompts[3], [*prompts[3], 7]]
        wanted = [lm.generate(p, **c).tokens for p, c in itertools.product(prompts, ({}, drawn))]
        lm._session.forget()
        writer, cached = Writer(lm), list[int]()
        for (prompt, choices), answer in zip(itertools.product(prompts, ({}, drawn)), wanted, strict=True):
            before = writer.read()
            writer.begin(prompt, **choices)
            found = [writer.next() for _ in answer]
            assert [token for token, _ in found] == [t.id for t in answer]
            assert len(answer) == context - len(prompt) + 1
            with pytest.raises(lapilli.errors.IntegerOverflowError, match="context of 40 tokens is full"):
                writer.next()
            common = next((n for n, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), len(prompt))
            assert writer.read() - before == context - min(common, len(prompt) - 1)
            cached = [*prompt, *(token for token, _ in found)][:context]
        for wrong, message in (
            ([], "A prompt of 0 tokens"),
            ([300], "Token 0 is 300"),
            ([0] * 41, "it has 1 to 40"),
            ([-1], "is -1"),
        ):
            with pytest.raises(lapilli.InvalidInputError, match=message):
                writer.begin(wrong)
        for name, value in (
            ("temperature", float("nan")),
            ("top_p", 1.5),
            ("min_p", -1),
            ("repetition_penalty", 0),
            ("top_k", -1),
        ):
            with pytest.raises(lapilli.InvalidInputError, match=name):
                writer.begin([1], **{name: value})


def test_scores_are_the_models_own(files: tuple[Path, LLM], lm: LLM) -> None:
    """Of a text in windows, beside the decoder by torch. Windows are read a part at a time, with no step for a token."""
    source = read_gguf(files[0].with_suffix(".gguf"))
    tokens = lm.tokens(PROMPT * 3)[:70]
    wanted, window = [], 16
    for at in range(0, 70, window):
        part = tokens[at : at + window]
        model = Decoder(source.shape, source.tensors, 96)
        with torch.no_grad():
            logits = model.head(model.hidden(torch.tensor([part]), torch.tensor([0])))[0, :-1]
        wanted.append(torch.log_softmax(logits, -1)[range(len(part) - 1), part[1:]])
    lm._session.steps = []
    found = lm.score(tokens, window=window)
    assert found.shape == (65,) and np.abs(found - torch.cat(wanted).numpy()).max() < 1e-4
    assert not lm._session.steps
    assert lm.perplexity(tokens, window=window) == pytest.approx(float(np.exp(-found.mean())))
    assert lm.generate(PROMPT, max_tokens=8) == lm.generate(PROMPT, max_tokens=8)  # all tokens may be written again
    assert len({t.id for t in lm.generate(PROMPT, max_tokens=8).tokens}) > 1
    for text, length, said in (
        ("a", None, "The text has 1 tokens"),
        (PROMPT, 97, "window is 97; it can be 2 to 96"),
        (PROMPT, 1, "window is 1"),
    ):
        with pytest.raises(lapilli.InvalidInputError, match=said):
            lm.score(text, window=length)


def test_compiling_is_said_from_the_beginning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nobody gives a progress, which would say it: the import of torch and the reading of the source are in it."""
    inside, found = list[str](), list[list[str]]()

    @contextmanager
    def working(work: Any) -> Any:
        inside.append(work.present)
        try:
            yield
        finally:
            inside.pop()

    def compiled(path: Path, **_: Any) -> bytes:
        found.append(list(inside))
        raise lapilli.CompileError("enough")

    monkeypatch.setattr("lapilli.llm.language_model.working", working)
    monkeypatch.setattr(LLM, "_compiled", compiled)
    for progress in (None, lambda *_: None):
        with pytest.raises(lapilli.CompileError, match="enough"):
            LLM(tmp_path, progress=progress)
    assert found == [["compiling a language model"], []]


def test_reading_a_long_text_is_said(lm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the notice for work that takes longer than two seconds."""
    said = list[str]()

    def working(work: Any) -> Any:
        said.append(work.present)
        return nullcontext()

    monkeypatch.setattr("lapilli.llm.language_model.working", working)
    lm.score(PROMPT)
    lm.perplexity(PROMPT)
    lm.embed(PROMPT)
    assert said == ["reading a text"] * 3


def test_perplexity_on_the_command_line(files: tuple[Path, LLM], lm: LLM, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(PROMPT * 2)
    command = ["perplexity", str(files[0]), str(tmp_path / "text"), "--tokens", "20"]
    done = CliRunner().invoke(main, [*command, "--json"])
    assert done.exit_code == 0, done.output
    wanted = lm.perplexity(lm.tokens(PROMPT * 2)[:20])
    assert json.loads(done.stdout)["perplexity"] == pytest.approx(wanted) and json.loads(done.stdout)["tokens"] == 19
    assert CliRunner().invoke(main, command).stdout == f"{wanted:.6f}, the mean over 19 tokens\n"
