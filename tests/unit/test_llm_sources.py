"""Sources of language models that lack something, or contradict themselves: refused with a sentence that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from encoder_decoders import made_t5, save
from language_models import made, save_folder, save_gguf

from lapilli.errors import LapilliError
from lapilli.llm.encoder_decoder_source import read_speech_folder, read_text_folder
from lapilli.llm.from_source import read


def _config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="module")
def model() -> object:
    return made("llama")


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_of_the_configuration_are_those_of_the_weights(model: object, layers: int, tmp_path: Path) -> None:
    folder = save_folder(model, tmp_path / "model")
    assert read(folder).shape.layers == 2
    _config(folder, num_hidden_layers=layers)
    with pytest.raises(LapilliError, match=f"num_hidden_layers is {layers}, and there are weights of 2 layers"):
        read(folder)


def test_layers_of_t5_are_those_of_the_weights(tmp_path: Path) -> None:
    folder = save(made_t5("t5"), tmp_path / "model")
    layers = read_text_folder(folder).shape.encoders
    _config(folder, num_layers=layers - 1)
    with pytest.raises(LapilliError, match=f"num_layers is {layers - 1}, and there are weights of {layers} layers"):
        read_text_folder(folder)


def test_a_missing_shard_is_named(model: object, tmp_path: Path) -> None:
    folder = save_folder(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")  # type: ignore[attr-defined]
    assert read(folder).shape.layers == 2
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {lost.name}, 1 of the"):
        read(folder)


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "reader, kind", [(read, "llama"), (read_text_folder, "t5"), (read_speech_folder, "whisper")]
)  # fmt: skip
def test_a_missing_file_of_a_folder_is_named(
    model: object, lost: str, reader: Callable[[Path], object], kind: str, tmp_path: Path
) -> None:
    folder = save_folder(model, tmp_path / "model")
    _config(folder, model_type=kind)
    (folder / lost).unlink()
    (folder / "tokenizer.model").touch()
    with pytest.raises(FileNotFoundError, match=f"has no {lost}: a model's folder has config.json") as error:
        reader(folder)
    assert ("tokenizer.model is not read" in str(error.value)) == (lost == "tokenizer.json")


def test_a_gguf_file_that_ends_early_is_said_to(model: object, tmp_path: Path) -> None:
    file = save_gguf(model, tmp_path / "model.gguf")
    data = file.read_bytes()
    for count in (len(data) // 2, len(data) - 1000, 100):
        file.write_bytes(data[:count])
        with pytest.raises(LapilliError, match=f"ends too early or is damaged .* It has {count} bytes"):
            read(file)


def test_whisper_of_ctranslate2_is_for_the_transcriber(model: object, tmp_path: Path) -> None:
    folder = save_folder(model, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model.bin")
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [1], "alignment_heads": []}))
    with pytest.raises(LapilliError, match=r"CTranslate2's of Whisper: lapilli\.Transcriber compiles it"):
        read(folder)
