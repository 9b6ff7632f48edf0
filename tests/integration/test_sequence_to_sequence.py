"""Text-to-text models from folders, beside transformers on the CPU."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any, cast

import as_gpu
import hostile
import hostile_files
import numpy as np
import pytest
import torch
from encoder_decoders import END, T5, made_t5, made_whisper, save, speech_model, text_model
from language_models import made, save_folder

import lapilli
from lapilli.llm import LLM, Beams, SequenceToSequence, Transcriber
from lapilli.llm.encoder_decoder import buckets
from lapilli.llm.encoder_decoder_source import read_text_folder
from lapilli.player import _player, check

TEXTS = ("The theory of an answer in a sentence", "a", "in the theory, " * 6)


def theirs(model: Any, tokens: list[int], count: int) -> list[int]:
    """What transformers writes, greedily, without the token that begins it."""
    model.generation_config.eos_token_id = None
    found = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(found[0, 1:].tolist())


def endless(model: SequenceToSequence) -> SequenceToSequence:
    """The same, which goes on after the end, as transformers does in these tests."""
    model.text = dataclasses.replace(model.text, ends=())
    return model


@pytest.mark.parametrize("kind", T5)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """For 128 tokens, so that distances come to the last of their classes."""
    model = made_t5(kind)
    with text_model(save(model, tmp_path / kind), 129, 96) as ours:
        assert ours.program.report().segments == ("gpu",)
        endless(ours)
        seen = set[int]()
        for text in TEXTS:
            tokens = ours.tokens(text)
            found = [t.id for t in ours.generate(text, max_tokens=128).tokens]
            assert found == theirs(model, tokens, 128)
            assert len(found) == 128
            seen |= set(found)
        assert len(seen) > 8
        # and again the first one: nothing of the texts between is left
        assert [t.id for t in ours.generate(TEXTS[0]).tokens] == theirs(model, ours.tokens(TEXTS[0]), 129)[:129]


def test_classes_of_distances_are_those_of_transformers() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 300)
    for both in (True, False):
        for count, furthest in ((32, 128), (32, 60), (16, 20)):
            wanted = T5Attention._relative_position_bucket(distances, both, count, furthest)
            assert torch.equal(buckets(distances, count, furthest, both), wanted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(made_t5("t5-1.1"), tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    with text_model(folder, 24, 40) as found:
        yield found


@pytest.mark.long
def test_texts_in_turn_do_not_disturb_each_other(model: SequenceToSequence) -> None:
    """Streams that are read in turn, a list, and one at a time: the same answers."""
    alone = [model.generate(text, max_tokens=20).text for text in TEXTS[:2]]
    assert alone[0] != alone[1]
    assert [a.text for a in model.generate(list(TEXTS[:2]), max_tokens=20)] == alone
    streams = [model.generate(text, max_tokens=20, stream=True) for text in TEXTS[:2]]
    for _ in range(40):
        for stream in streams:
            next(stream, None)
    assert [stream.answer.text for stream in streams] == alone


@pytest.fixture(scope="module")
def wide(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model, which writes up to three answers in a step."""
    place = tmp_path_factory.mktemp("wide")
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    with text_model(place, 24, 40, sequences=3) as found:
        yield found


def test_several_answers_in_a_step_are_those_of_one(model: SequenceToSequence, wide: SequenceToSequence) -> None:
    """Answers of other lengths: a step is of those that are left, each with what the encoder gave for it."""
    texts = ["the end", *TEXTS[:2], "in the theory", "in an answer", "b" * 40]
    counts = [3, 20, 9, 17, 12, 20]
    alone = [[t.id for t in model.generate(text, max_tokens=n).tokens] for text, n in zip(texts, counts, strict=True)]
    assert len({tuple(tokens[:3]) for tokens in alone}) > 3
    streams = [wide.generate(text, max_tokens=n, stream=True) for text, n in zip(texts, counts, strict=True)]
    wide._session.steps.clear()
    wide._written(streams)
    assert [[t.id for t in stream.answer.tokens] for stream in streams] == alone
    assert max(wide._session.steps) == 3 and {1, 2} & set(wide._session.steps)
    # more streams than sequences, read in turn
    streams = [wide.generate(text, max_tokens=n, stream=True) for text, n in zip(texts[:4], counts, strict=False)]
    for _ in range(30):
        for stream in streams:
            next(stream, None)
    assert [[t.id for t in stream.answer.tokens] for stream in streams] == alone[:4]


def test_beams_are_those_of_transformers(wide: SequenceToSequence) -> None:
    """With answers that end early, late and not at all, and in each manner to end the search."""
    exact, text = made_t5("t5-1.1"), wide.text
    lengths = set[int]()
    for given in TEXTS[:2]:
        tokens = wide.tokens(given)
        free = theirs_by_beams(exact, tokens, Beams(3), 299)
        ends = [299, free[3], free[9]]
        for k, end in enumerate(ends):
            wide.text = dataclasses.replace(text, ends=(end,))
            for beams in (
                Beams(3),
                Beams(2, length_penalty=2.0),
                Beams(3, -0.5, True),
                Beams(3, 1.5, "never"),
            )[k % 2 :: 2]:
                answer = wide.generate(given, max_tokens=20, beams=beams)
                found = [t.id for t in answer.tokens]
                assert found == theirs_by_beams(exact, tokens, beams, end), (given, end, beams)
                assert answer.reason == ("stop" if found[-1] == end else "length")
                lengths.add(len(found))
    wide.text = text
    assert len(lengths) > 2 and 20 in lengths
    assert wide.generate([TEXTS[1], TEXTS[0]], beams=3)[1] == wide.generate(TEXTS[0], beams=3)
    assert wide.generate(TEXTS[0], beams=1) == wide.generate(TEXTS[0])


def theirs_by_beams(model: Any, tokens: list[int], beams: Beams, end: int) -> list[int]:
    """What transformers finds with beams, 20 tokens at most."""
    found = model.generate(
        torch.tensor([tokens]), max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=end, num_beams=beams.count,
        length_penalty=beams.length_penalty, early_stopping=beams.early_stopping,
    )[0, 1:].tolist()  # fmt: skip
    return found[: found.index(end) + 1] if end in found else found


def test_beams_are_checked(model: SequenceToSequence, wide: SequenceToSequence) -> None:
    for given, options, said in (
        (model, {"beams": 2}, "beams is 2; this model can search with 1 at most: compile it with more `sequences`"),
        (wide, {"beams": 4}, "this model can search with 3 at most"),
        (wide, {"beams": 0}, "beams is 0; it can be 1 to 16"),
        (wide, {"beams": 2, "temperature": 0.5}, "beams have no draws"),
        (wide, {"beams": 2, "stream": True}, "has no stream"),
    ):
        with pytest.raises(lapilli.InvalidInputError, match=said):
            given.generate("a", **options)
    with pytest.raises(lapilli.InvalidInputError, match='can be True, False or "never"'):
        Beams(2, early_stopping="always")  # type: ignore[arg-type]
    with pytest.raises(lapilli.InvalidInputError, match="length_penalty is nan"):
        Beams(2, float("nan"))


def test_options_are_those_of_language_models(model: SequenceToSequence) -> None:
    greedy = model.generate(TEXTS[0], max_tokens=20, logprobs=2)
    assert greedy.prompt_tokens == len(model.tokens(TEXTS[0]))
    assert all(t.likely[0][0] == t.id and abs(t.likely[0][1] - t.logprob) < 1e-4 for t in greedy.tokens)
    drawn = [model.generate(TEXTS[0], max_tokens=20, temperature=1.5, top_k=50, seed=s).text for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    stop = greedy.text[3:5]
    found = model.generate(TEXTS[0], max_tokens=20, stop=stop)
    assert found.text == greedy.text[: greedy.text.index(stop)] and found.reason == "stop"
    ended = model.generate(TEXTS[0])
    assert ended.reason in ("stop", "length") and len(ended.tokens) <= 24


def test_a_saved_file_is_the_model(model: SequenceToSequence, tmp_path: Path) -> None:
    model.save(tmp_path / "model.lap")
    with SequenceToSequence(tmp_path / "model.lap") as again:
        assert again.generate(TEXTS[0], max_tokens=12) == model.generate(TEXTS[0], max_tokens=12)
    with pytest.raises(
        lapilli.CompileError, match="context, places, precision, quantize and sequences are chosen when"
    ):
        SequenceToSequence(tmp_path / "model.lap", places=8)
    with pytest.raises(lapilli.InvalidFileError, match=r"has an encoder: lapilli\.SequenceToSequence"):
        LLM(tmp_path / "model.lap")
    with pytest.raises(lapilli.InvalidFileError, match=r"reads tokens: lapilli\.SequenceToSequence loads it"):
        Transcriber(tmp_path / "model.lap")


def test_files_with_other_metadata_are_refused_or_write(model: SequenceToSequence, tmp_path: Path) -> None:
    """Numbers that do not belong to the program: a sentence, and nothing that an answer before has left behind."""
    model.save(tmp_path / "whole.lap")
    whole, rng, well = (tmp_path / "whole.lap").read_bytes(), random.Random(5), 0
    for k in range(10):
        program, data = hostile_files.parts_of(whole)
        key = (b"llm.encoder", b"llm.model")[k % 2]
        entry = next(e for e in program.metadata if e.key == key)
        entry.value = json.dumps(hostile.damaged(json.loads(entry.value), rng)).encode()
        try:
            with SequenceToSequence(memoryview(hostile_files.file_from(program, data))) as other:
                answer = other.generate("in the", max_tokens=2)
        except lapilli.LapilliError as error:
            assert str(error)
            continue
        well += 1
        assert all(0 <= t.id < 300 for t in answer.tokens)
    assert 0 < well < 10


@pytest.mark.long
def test_half_precision_and_codes_stay_near(folder: Path) -> None:
    """By the logits after the first token: roundings of halves 2 ** -11, of codes of 8 bits 2 ** -8."""
    exact = made_t5("t5-1.1")
    tokens = torch.tensor([[5, 9, 30, 7, END]])
    wanted = exact(input_ids=tokens, decoder_input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits[0, 0]
    for options, bound in (
        ({"precision": "fp16", "target": "cpu-fp16"}, 2e-2),
        ({"quantize": "int8"}, 5e-2),
        ({}, 1e-5),
    ):
        with text_model(folder, 8, 8, **options) as ours:
            ours.generate(tokens[0].tolist(), max_tokens=1)
            found = torch.from_numpy(ours.program.state()["owner.logits"])[0]
            assert float((found - wanted).norm() / wanted.norm()) < bound, options


def test_the_native_writer_refuses_models_with_an_encoder(model: SequenceToSequence) -> None:
    """It has nothing for the encoder to read."""
    ffi, library = _player()
    with pytest.raises(lapilli.InvalidInputError, match="has an encoder"):
        check(library.lapilli_writer_create(model.program._loaded.native._program(), ffi.new("lapilli_writer **")))


@pytest.mark.long
@pytest.mark.part(6)
@pytest.mark.parametrize("target", ["gpu-fp32", "gpu-fp16", "gpu-fp16-matrix"])
@pytest.mark.parametrize("kind", ["t5-1.1", "whisper"])
def test_plans_of_gpus_compute_the_same(
    kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the logits after the first token and after more, in float32, and with halves between kernels and in the cache."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "cache"))
    as_gpu.on_any_device(monkeypatch.setattr)
    exact = made_whisper(several=False) if kind == "whisper" else made_t5(kind)
    for name, weight in exact.named_parameters():
        if name.endswith(".q.weight"):
            weight.mul_(0.1)  # scores that T5 does not scale: or roundings would choose what is attended to
    folder, options = (
        save(exact, tmp_path / kind),
        {"precision": "fp32" if target == "gpu-fp32" else "fp16", "target": target},
    )
    rng = np.random.default_rng(0)
    if kind == "whisper":
        heard = rng.standard_normal((1, 20, 200)).astype(np.float32)
        ours: Any = speech_model(folder, **options)
        given: list[Any] = [heard]
        inputs = {"input_features": torch.from_numpy(heard)}
    else:
        tokens = rng.integers(1, 290, (1, 21))
        ours = text_model(folder, 40, 30, **options)
        given = [tokens, np.array([21])]
        inputs = {"input_ids": torch.from_numpy(tokens)}
    written = rng.integers(1, 290, (1, 12))
    wanted = exact(**inputs, decoder_input_ids=torch.from_numpy(written)).logits[0]
    rows = np.array([[0, 0, 0, 0, 0, 0]], np.int32), np.array([[0, 1, -np.inf, 1]], np.float32)
    with ours:
        methods = ours.program.methods
        methods["encode"].submit(*given, np.array([0])).result()
        methods["prompt"].submit(written[:, :9], np.array([0]), *rows).result()
        logits = [ours.program.state()["owner.logits"][0]]
        for place in range(9, 12):
            rows[0][0, :2] = written[0, place], place
            methods["step"].submit(*rows).result()
            logits.append(ours.program.state()["owner.logits"][0])
    for found, right in zip(logits, wanted[8:], strict=True):
        seen = np.isfinite(found)  # those that Whisper never writes are not
        error = np.linalg.norm(found[seen] - right.numpy()[seen]) / np.linalg.norm(right.numpy()[seen])
        assert seen.sum() > 200 and error < (1e-5 if target == "gpu-fp32" else 2e-2)


def test_what_is_given_is_checked(model: SequenceToSequence) -> None:
    for text, said in (
        ("", "0 tokens"),
        ("a" * 41, r"41 tokens; there can be 1 to 40"),
        ([1, 300], "numbers from 0 to 299"),
    ):
        with pytest.raises(lapilli.InvalidInputError, match=said):
            model.generate(text)
    with pytest.raises(lapilli.InvalidInputError, match="temperature"):
        model.generate("a", temperature=-1)
    with pytest.raises(lapilli.InvalidInputError, match="Several texts have no stream"):
        model.generate(["a", "b"], stream=True)


def test_what_is_no_text_is_told(model: SequenceToSequence) -> None:
    """What is no text is told, and no texts have no answers."""
    given: list[tuple[Any, str]] = [
        (3, r"The text is 3 \(int\); it can be a text, or a list of tokens"), (None, "The text is None"), (b"a", "decode"),
        (["a", 3], r"Text 1 of the list is 3 \(int\)"), ("\ud800", "half of a character"), ([1, 10**9], "at place 1"),
    ]  # fmt: skip
    for text, reason in given:
        with pytest.raises(lapilli.InvalidInputError, match=reason):
            model.generate(text)
    none, several = list[str](), ["a", "the"]
    assert model.generate(none) == []
    assert model.generate(cast(Any, iter(several)), max_tokens=3) == model.generate(several, max_tokens=3)


def test_folders_that_are_none_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(lapilli.CompileError, match=r"model type .* is 'llama'; taken here are t5, mt5"):
        SequenceToSequence(save_folder(made("llama"), tmp_path / "llama"))
    with pytest.raises(lapilli.CompileError, match=r"has an encoder \(t5\): lapilli\.SequenceToSequence compiles it"):
        LLM(folder)
    with pytest.raises(lapilli.CompileError, match="places is 3: choose 4 to"):
        text_model(folder, 8, 3)
    broken = save(made_t5("t5"), tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"d_ff": 95}))
    with pytest.raises(lapilli.InvalidFileError, match="ffn_up.weight is of shape"):
        read_text_folder(broken)
    (broken / "config.json").write_text(json.dumps(config | {"feed_forward_proj": "gated-tanh"}))
    with pytest.raises(lapilli.CompileError, match="'gated-tanh'; taken are"):
        read_text_folder(broken)
