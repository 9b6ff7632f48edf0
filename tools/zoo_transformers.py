"""Tiny configurations of transformers' architectures: two layers of 32 features, random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]

TOKENS, WORDS = 12, 99
"""Length of a text, and how many different tokens there are."""

SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 64,
    "patch_size": 16,
}  # fmt: skip
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
PAIR: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
WAVE: dict[str, Any] = SIZES | {
    "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _words(length: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, WORDS, (1, length), generator=torch.Generator().manual_seed(2))


def _text() -> Inputs:
    """A text, its last three tokens padding."""
    return {"input_ids": _words(), "attention_mask": (torch.arange(TOKENS) < TOKENS - 3).long()[None]}


def _pair() -> Inputs:
    return _text() | {"decoder_input_ids": _words(7)}


def _pixels() -> Inputs:
    return {"pixel_values": _random(1, 3, 64, 64)}


def _wave() -> Inputs:
    return {"input_values": _random(1, 2000)}


def _both() -> Inputs:
    return _text() | _pixels()


def _make(kind: str, options: dict[str, Any], inputs: Callable[[], Inputs], head: str = "") -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **options)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    auto = getattr(transformers, f"AutoModel{head}")
    return auto.from_config(config).eval(), inputs()


Maker = Callable[[], tuple[nn.Module, Inputs]]


def _of(
    inputs: Callable[[], Inputs], options: dict[str, Any], head: str = "", **kinds: dict[str, Any]
) -> dict[str, Maker]:
    """Architectures of the same inputs: name=own options."""
    return {
        k.replace("__", "-"): partial(_make, k.replace("__", "-"), options | own, inputs, head)
        for k, own in kinds.items()
    }


ENCODERS = _of(
    _text, SIZES,
    bert={}, roberta={"pad_token_id": 1}, distilbert={"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    albert={"embedding_size": 16}, electra={"embedding_size": 16}, mpnet={}, deberta={}, rembert={},
    squeezebert={"embedding_size": 32},
    modernbert={"pad_token_id": 0, "global_attn_every_n_layers": 2}, roformer={"embedding_size": 32},
    convbert={"embedding_size": 32},
    mobilebert={"embedding_size": 32, "intra_bottleneck_size": 32},
    deberta__v2={"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
)  # fmt: skip
ENCODERS |= _of(
    lambda: {"input_ids": _words()}, SIZES, fnet={}, nystromformer={"num_landmarks": 12, "segment_means_seq_len": 12}
)

DECODERS = _of(
    _text, SIZES, "ForCausalLM",
    gpt2={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, opt={"ffn_dim": 64, "word_embed_proj_dim": 32},
    gpt_neo={"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}, gpt_neox={},
    gptj={"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}, bloom={"n_layer": 2, "n_head": 4},
    falcon={"new_decoder_architecture": True, "num_kv_heads": 2}, phi={},
)  # fmt: skip
DECODERS |= _of(
    _text, GROUPED, "ForCausalLM",
    llama={}, mistral={"sliding_window": 8}, mixtral={"num_local_experts": 4}, qwen2={}, qwen3={"head_dim": 8},
    gemma={"head_dim": 8},
    gemma2={"head_dim": 8, "sliding_window": 8}, phi3={"pad_token_id": 0}, stablelm={}, starcoder2={}, olmo2={}, granite={},
    cohere={},
)  # fmt: skip
DECODERS |= _of(
    lambda: {"input_ids": _words()}, {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2}, "ForCausalLM",
    mamba={"state_size": 8}, rwkv={"attention_hidden_size": 32, "context_length": 64},
)  # fmt: skip

PAIRS = _of(
    _pair, PAIR, "ForSeq2SeqLM", bart={}, mbart={}, pegasus={}, marian={}, m2m_100={}, blenderbot={},
)  # fmt: skip
PAIRS |= _of(
    _pair,
    {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    "ForSeq2SeqLM", t5={}, mt5={},
)  # fmt: skip

STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
VISION = _of(
    _pixels, IMAGE, vit={}, deit={}, beit={}, dinov2={}, yolos={"image_size": [64, 64], "num_detection_tokens": 5},
    dpt={"backbone_out_indices": [0, 1], "neck_hidden_sizes": [8, 8, 8, 8]}, siglip_vision_model={}, clip_vision_model={},
)  # fmt: skip
VISION |= _of(
    _pixels, STAGES, convnext={}, convnextv2={}, regnet={"groups_width": 8}, resnet={"embedding_size": 8},
    segformer={"num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
    swin={"embed_dim": 8, "num_heads": [1, 2, 2, 4], "image_size": 64, "patch_size": 2, "window_size": 4},
    poolformer={},
    mobilevit={"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64], "num_attention_heads": 4},
)  # fmt: skip
TOWER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
VISION |= _of(
    _both,
    {"projection_dim": 16, "text_config": TOWER | {"vocab_size": WORDS}}
    | {"vision_config": TOWER | {"image_size": 64, "patch_size": 16}},
    clip={},
)  # fmt: skip

SPEECH = _of(_wave, WAVE, wav2vec2={}, hubert={}, wavlm={"num_buckets": 16, "max_bucket_distance": 32})
SPEECH |= _of(
    lambda: {"input_features": _random(1, 16, 40), "decoder_input_ids": _words(7)},
    PAIR | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20}, "ForSpeechSeq2Seq", whisper={},
)  # fmt: skip
SPEECH |= _of(
    lambda: {"input_values": _random(1, 64, 32)},
    IMAGE | {"num_mel_bins": 32, "max_length": 64}, **{"audio__spectrogram__transformer": {}},  # type: ignore[arg-type]
)  # fmt: skip

TRANSFORMERS: dict[str, Maker] = ENCODERS | DECODERS | PAIRS | VISION | SPEECH
