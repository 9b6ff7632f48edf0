"""Tiny language models with random weights, as transformers saves them and as GGUF files, and a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torchvision_without_ops
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

torchvision_without_ops.allow()
import transformers  # noqa: E402

WORDS = 300
END, BEGIN = 299, 298
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
_COMMON: dict[str, Any] = dict(
    vocab_size=WORDS, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    max_position_embeddings=160, pad_token_id=None, bos_token_id=BEGIN, eos_token_id=END,
)  # fmt: skip
_LONG = dict(
    rope_type="longrope",
    partial_rotary_factor=0.5,
    short_factor=[1.0, 1.5, 2.0],
    long_factor=[2.0, 4.0, 8.0],
    rope_theta=10000.0,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=40,
    rope_theta=500.0,
)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-scaled": ("Llama", dict(rope_parameters=_LLAMA3, tie_word_embeddings=True, attention_bias=True)),
    "qwen2": ("Qwen2", dict(num_key_value_heads=1)),
    "qwen3": ("Qwen3", dict(head_dim=20)),
    "gemma": ("Gemma", dict(head_dim=16, num_key_value_heads=1)),
    "phi3": ("Phi3", dict(sliding_window=24)),
    "phi3-long": (
        "Phi3", dict(rope_parameters=_LONG, partial_rotary_factor=0.5, original_max_position_embeddings=150),
    ),
    "mistral": ("Mistral", dict(sliding_window=20)),
    "granite": ("Granite", dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=4.0)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1])),
    "olmo2": ("Olmo2", {}),
    "phi": ("Phi", dict(num_key_value_heads=4)),
    "phi-normed": ("Phi", dict(qk_layernorm=True, partial_rotary_factor=1 / 3)),
    "starcoder2": ("Starcoder2", dict(sliding_window=20, tie_word_embeddings=False)),
    "stablelm": ("StableLm", dict(partial_rotary_factor=0.5, use_qkv_bias=True)),
    "stablelm-parallel": ("StableLm", dict(partial_rotary_factor=0.5, use_parallel_residual=True)),
    "gemma3_text": (
        "Gemma3", dict(head_dim=16, num_hidden_layers=3, sliding_window=16, query_pre_attn_scalar=24, tie_word_embeddings=False,
                       layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
}  # fmt: skip
AS_GGUF = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "phi3",
    "phi",
    "starcoder2",
    "stablelm",
    "stablelm-parallel",
    "olmo2",
    "granite",
)
"""Those that `save_gguf` writes."""


def made(kind: str) -> Any:
    """A model of transformers in float32, whose logits are far apart."""
    name, given = KINDS[kind]
    torch.manual_seed(sum(kind.encode()))
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**(_COMMON | given))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter_name, p in model.named_parameters():
        small = (
            0.1 if name == "Phi" and parameter_name.endswith("bias") else 0.3
        )  # Phi's many biases would choose the token alone
        p.copy_(torch.randn_like(p) * (small if p.dim() == 1 else 2 / p.shape[1] ** 0.5))
        if p.dim() == 1 and parameter_name.endswith("norm.weight") and name not in ("Gemma", "Gemma3"):
            p += 1
    return model


def tokenizer() -> Tokenizer:
    """A token for each byte, some for pairs, and the special ones at the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("Ġ", "a"), ("th", "e"), ("i", "n")]
    tokens = letters + ["".join(p) for p in pairs]
    tokens += [f"<unused{k}>" for k in range(WORDS - 2 - len(tokens))] + ["<begin>", "<end>"]
    found = Tokenizer(models.BPE({t: k for k, t in enumerate(tokens)}, pairs))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(t, special=True) for t in tokens[-2:]])
    return found


def save_folder(model: Any, path: Path) -> Path:
    """As save_pretrained writes it, with tokenizer and chat template."""
    model.generation_config.eos_token_id = END
    model.save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<begin>", "eos_token": {"content": "<end>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


_NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
          "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
          "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up", "fc1": "ffn_up",
          "fc2": "ffn_down", "dense": "attn_output", "c_fc": "ffn_up", "c_proj": "ffn_down"}  # fmt: skip
_NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}


def save_program(folder: Path) -> Path:
    """A Llama as a program of two sequences, for the plainest plan of a CPU."""
    from lapilli.llm.from_source import compile_source

    source = save_gguf(made("llama"), folder / "model.gguf")
    path = folder / "model.lap"
    path.write_bytes(compile_source(source, context=128, sequences=2, target="cpu-fp32"))
    return path


def save_gguf(model: Any, path: Path, kind: str = "F32", fused: bool = False) -> Path:
    """As llama.cpp's converter writes it: queries and keys of Llama and Granite with the halves of a head interleaved, Gemma's
    norms plus 1. kind: of matrices. fused: queries, keys and values are of one matrix.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, {"phi": "phi2"}.get(config.model_type, config.model_type))
    writer.add_name("random")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_rope_dimension_count(int(size * config.rope_parameters.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_epsilon)
    if config.model_type == "stablelm":
        writer.add_parallel_residual(
            True
        )  # of models with two norms in a layer, too, where their configuration does not say
    if config.model_type == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    described = json.loads(tokenizer().to_str())
    by_number = sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(by_number)
    writer.add_token_types([3 if t in ("<begin>", "<end>") else 1 for t in by_number])
    writer.add_token_merges([" ".join(m) for m in described["model"]["merges"]])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    if fused:
        for part in ("weight", "bias"):
            for k in range(config.num_hidden_layers):
                layer = f"model.layers.{k}.self_attn."
                state[f"{layer}qkv_proj.{part}"] = torch.cat([state.pop(f"{layer}{n}_proj.{part}") for n in "qkv"])
    for name, value in state.items():
        array: NDArray[Any] = value.numpy()
        if config.model_type == "gemma" and name.endswith("norm.weight"):
            array = array + 1
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if config.model_type in ("llama", "granite") and heads:
            array = array.reshape(heads, 2, size // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if kind == "F32" or array.ndim == 1:
            writer.add_tensor(_gguf_name(name, config.model_type), np.ascontiguousarray(array, np.float32))
        else:
            of = gguf.GGMLQuantizationType[kind]
            packed = gguf.quantize(np.ascontiguousarray(array), of)
            writer.add_tensor(_gguf_name(name, config.model_type), packed, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str, kind: str) -> str:
    stem, _, part = name.rpartition(".")
    parts = stem.split(".")
    if parts[:2] == ["model", "layers"]:
        names = _NAMES | (_NORMS_AFTER if kind == "olmo2" else {})
        return f"blk.{parts[2]}.{names[parts[-1]]}.{part}"
    whole = {"embed_tokens": "token_embd", "norm": "output_norm", "final_layernorm": "output_norm", "lm_head": "output"}
    return f"{whole[parts[-1]]}.{part}"
