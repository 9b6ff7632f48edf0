"""Tiny models with an encoder and a decoder and random weights, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import language_models
import torch
import torchvision_without_ops

torchvision_without_ops.allow()
import transformers  # noqa: E402

from lapilli.llm import SequenceToSequence, Transcriber  # noqa: E402
from lapilli.llm.encoder_decoder_source import read_speech_folder, read_text_folder  # noqa: E402
from lapilli.llm.from_encoder_decoder import build_encoder_decoder  # noqa: E402

WORDS, BEGIN, END = language_models.WORDS, language_models.BEGIN, language_models.END
_CODES = (
    "ar",
    "cs",
    "da",
    "de",
    "en",
    "es",
    "fi",
    "fr",
    "hi",
    "it",
    "ja",
    "ko",
    "nl",
    "no",
    "pl",
    "pt",
    "ru",
    "sv",
    "tr",
    "zh",
)
LANGUAGES = {f"<|{code}|>": 273 + k for k, code in enumerate(_CODES)}
TASKS = {"transcribe": 293, "translate": 294}
UNTIMED, SEED = 295, 3
T5: dict[str, dict[str, Any]] = {
    "t5": dict(num_layers=2),
    "t5-1.1": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_layers=3, num_decoder_layers=2),
    "mt5": dict(feed_forward_proj="gated-silu", tie_word_embeddings=False, num_layers=2),
}


def spread(model: Any) -> Any:
    """The model, whose logits are far apart."""
    for name, p in model.named_parameters():
        p.copy_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 2 / p[0].numel() ** 0.5))
        if p.dim() == 1 and name.endswith("norm.weight"):
            p += 1
    return model


def made_t5(kind: str) -> Any:
    """A text-to-text model in float32."""
    torch.manual_seed(sum(kind.encode()) + SEED)
    config_class, model_class = ("MT5Config", "MT5") if kind == "mt5" else ("T5Config", "T5")
    config = getattr(transformers, config_class)(
        vocab_size=WORDS, d_model=48, d_kv=12, d_ff=96, num_heads=4, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=END, relative_attention_max_distance=60, **T5[kind],
    )  # fmt: skip
    return spread(getattr(transformers, f"{model_class}ForConditionalGeneration")(config).eval().requires_grad_(False))


def made_whisper(several: bool = True, untimed: int = UNTIMED, **given: Any) -> Any:
    """A Whisper of two seconds, in float32. several: whether it knows several languages. untimed: the token before its times."""
    torch.manual_seed(5)
    numbers: dict[str, Any] = dict(
        vocab_size=WORDS, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=100, max_target_positions=140, num_mel_bins=20,
        decoder_start_token_id=BEGIN, eos_token_id=END, pad_token_id=END, bos_token_id=END,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    config = transformers.WhisperConfig(**(numbers | given))
    model = spread(transformers.WhisperForConditionalGeneration(config).eval().requires_grad_(False))
    for layer in model.model.decoder.layers:
        layer.encoder_attn.out_proj.weight.mul_(3)  # so that what is heard matters
    generation = model.generation_config
    generation.suppress_tokens = [*range(40, 60), *range(273, END)]
    generation.begin_suppress_tokens = [*range(60, 120), END]
    generation.no_timestamps_token_id, generation.is_multilingual = untimed, several
    generation.decoder_start_token_id, generation.max_length = BEGIN, 140
    generation.alignment_heads = [[0, 2], [1, 0], [1, 3]]
    if several:
        generation.lang_to_id, generation.task_to_id = LANGUAGES, TASKS
    return model


def save(model: Any, path: Path) -> Path:
    """A folder as save_pretrained writes it, with a tokenizer."""
    model.save_pretrained(path)
    language_models.tokenizer().save(str(path / "tokenizer.json"))
    return path


def text_model(folder: Path, context: int, places: int, **options: Any) -> SequenceToSequence:
    """As `SequenceToSequence(folder)`, without the plans of other devices, which take as long to compile."""
    file = folder / "one.lap"
    options = {"target": "cpu-fp32"} | options
    file.write_bytes(build_encoder_decoder(read_text_folder(folder), context, places, **options))
    return SequenceToSequence(file)


def speech_model(folder: Path, **options: Any) -> Transcriber:
    """As `Transcriber(folder)`, with one plan."""
    file = folder / "one.lap"
    options = {"target": "cpu-fp32"} | options
    file.write_bytes(build_encoder_decoder(read_speech_folder(folder), **options))
    return Transcriber(file)
