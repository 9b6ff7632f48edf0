"""Damaged files of models with an encoder: each is read well, or refused with a sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ctranslate2_files
import encoder_decoders
import hostile
import numpy as np
import pytest

import lapilli
from lapilli.llm import packages, text
from lapilli.llm.about_encoder import KEY, AboutEncoder
from lapilli.llm.encoder_decoder_source import EncoderDecoderSource, read_speech_folder, read_text_folder

WORDS = encoder_decoders.WORDS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("whole")
    made = {
        "t5": encoder_decoders.save(encoder_decoders.made_t5("t5"), place / "t5"),
        "whisper": encoder_decoders.save(encoder_decoders.made_whisper(), place / "whisper"),
    }
    path = place / "ctranslate2"
    path.mkdir()
    (path / "model.bin").write_bytes(ctranslate2_files.model_bin(ctranslate2_files.tiny_whisper(WORDS)))
    (path / "config.json").write_text(json.dumps({"suppress_ids": [1, 2], "suppress_ids_begin": [5], "lang_ids": []}))
    tokenizer = json.loads((made["t5"] / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for name, number in (("<|endoftext|>", 299), ("<|startoftranscript|>", 298), ("<|notimestamps|>", 297)):
        vocabulary = {k: v for k, v in vocabulary.items() if v != number} | {name: number}
    tokenizer["model"]["vocab"], tokenizer["added_tokens"] = vocabulary, []
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made | {"ctranslate2": path}


READERS: dict[str, Callable[[Path], EncoderDecoderSource]] = {
    "t5": read_text_folder,
    "whisper": read_speech_folder,
    "ctranslate2": read_speech_folder,
}


@pytest.mark.parametrize("kind", READERS)
def test_changed_bytes_and_cut_files(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Of the weights' file."""
    folder = tmp_path / kind
    shutil.copytree(folders[kind], folder)
    assert READERS[kind](folder).shape.words == WORDS
    name = "model.bin" if kind == "ctranslate2" else "model.safetensors"
    whole, rng, well = (folder / name).read_bytes(), np.random.default_rng(6), 0
    head = len(whole) if kind == "ctranslate2" else 8 + int.from_bytes(whole[:8], "little")
    for k in range(120):
        data = bytearray(whole)
        for at in rng.integers(0, head, int(rng.integers(1, 4))):
            data[at] = int(rng.integers(256))
        (folder / name).write_bytes(data[: int(rng.integers(1, len(data)))] if k % 8 == 0 else data)
        well += _is_read(READERS[kind], folder)
    assert well < 120


@pytest.mark.parametrize("kind", READERS)
def test_other_settings(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """JSON of the settings, changed in one to three places: a tokenizer is read by a package of its own."""
    folder, rng, well = tmp_path / kind, random.Random(7), 0
    shutil.copytree(folders[kind], folder)
    for name in ("config.json", "generation_config.json"):
        if not (folder / name).exists():
            continue
        whole = (folder / name).read_text()
        for _ in range(100):
            (folder / name).write_text(json.dumps(hostile.damaged(json.loads(whole), rng)))
            well += _is_read(READERS[kind], folder)
        (folder / name).write_text(whole)
    assert well > 0


def _is_read(read: Callable[[Path], EncoderDecoderSource], folder: Path) -> bool:
    try:
        source = read(folder)
    except lapilli.LapilliError as error:
        assert str(error)
        return False
    shape = source.shape
    assert shape.words == len(source.tensors["token_embd.weight"]) and 0 <= source.start < shape.words
    return True


def test_metadata_of_a_program() -> None:
    good = json.loads(AboutEncoder(40, 1, 8, {"en": 3, "de": 4}, {"transcribe": 5}, 6, 2).metadata()[KEY])
    rng, well = random.Random(8), 0
    for _ in range(2000):
        try:
            found = AboutEncoder.of_metadata({KEY: json.dumps(hostile.damaged(good, rng))}, 9)
        except lapilli.InvalidFileError as error:
            assert "metadata of the encoder are damaged" in str(error)
            continue
        well += 1
        tokens = [found.start, *found.languages.values(), *found.tasks.values()]
        assert all(0 <= t < 9 for t in tokens) and found.places > 1 and json.dumps(asdict(found))
        assert all(isinstance(name, str) for name in (*found.languages, *found.tasks))
    assert 0 < well < 2000


def test_the_tokenizer_is_read_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a real Whisper has 2 MB of JSON."""
    asked = list[str]()

    def need(name: str, what: str) -> Any:
        asked.append(name)
        return packages.need(name, what)

    monkeypatch.setattr(text, "need", need)
    for kind, read in READERS.items():
        asked.clear()
        source = read(folders[kind])
        source.text.encode("a")
        assert asked == ["tokenizers"], kind
