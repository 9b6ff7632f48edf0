"""Folders as Hugging Face's models are saved: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lapilli.errors import CompileError, InvalidFileError
from lapilli.llm.decoder import Shape
from lapilli.llm.gguf_source import arranged
from lapilli.llm.packages import need
from lapilli.llm.source import KINDS, SPEECH_KINDS, TEXT_KINDS, Source, check_layers, reading
from lapilli.llm.text import Text

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "self_attn.dense": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_AROUND = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
"""Where norms are after a part of a layer, too, or only there."""
_NORMS_AROUND, _OF_ONE = ("olmo2", "gemma3_text"), ("gemma", "gemma3_text")
_WINDOWED = ("phi3", "mistral", "starcoder2", "gemma3_text")
_CENTRED = {"phi": "layer_norm_eps", "starcoder2": "norm_epsilon", "stablelm": "layer_norm_eps"}
"""What those with norms that take off the mean call the smallest variance."""
_UNGATED, _TIED = ("phi", "starcoder2"), (*_OF_ONE, "smollm3", "starcoder2")
_ROTATED = {"phi": 0.5, "stablelm": 0.25}
"""The part of a head that is rotated, where the file does not say."""
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"} | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"
)
_WHOLE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.final_layernorm": "output_norm", "lm_head": "output",
}  # fmt: skip


def read_folder(path: Path) -> Source:
    """The model in a folder.

    Raises:
        InvalidFileError: a file is damaged, or there is no weight that the configuration asks for.
        CompileError: its architecture is not one of those that are taken.
        LapilliError: a package of the extra `llm` is missing.
        OSError: a file is missing or cannot be read.
    """
    with reading(path):
        check_file(path, "config.json")
        config = json_of(path / "config.json")
        kind = config.get("model_type")
        if kind is None and (path / "model.bin").exists() and "suppress_ids" in config:
            raise CompileError(f"The model in {path} is CTranslate2's of Whisper: lapilli.Transcriber compiles it.")
        for kinds, reader in ((TEXT_KINDS, "SequenceToSequence"), (SPEECH_KINDS, "Transcriber")):
            if kind in kinds:
                raise CompileError(f"The model in {path} has an encoder ({kind}): lapilli.{reader} compiles it.")
        if kind not in KINDS:
            raise CompileError(f"The model type of {path} is {kind!r}; taken are {', '.join(KINDS)}.")
        check_file(path, "tokenizer.json")
        shape = _shape(kind, config)
        tensors = _tensors(path, kind)
        check_layers(path / "config.json", "num_hidden_layers", shape.layers, tensors)
        if config.get("tie_word_embeddings", kind in _TIED):
            tensors.pop("output.weight", None)
        if config.get("logits_scaling", 1) != 1:
            tensors["output_norm.weight"] = tensors["output_norm.weight"].float() / config["logits_scaling"]
        source = Source(name_of(path, config), shape, arranged("", shape, tensors), text_of(path, config))
    source.check()
    return source


def name_of(path: Path, config: Mapping[str, Any]) -> str:
    """What the model in a folder is called."""
    return str(config.get("_name_or_path") or path.resolve().name)


def check_file(path: Path, name: str) -> None:
    """Raises FileNotFoundError if a folder lacks a file that all have."""
    if (path / name).exists():
        return
    advice = ""
    if name == "tokenizer.json" and (path / "tokenizer.model").exists():
        advice = (
            " tokenizer.model is not read: transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…) makes it."
        )
    raise FileNotFoundError(
        f"{path} has no {name}: a model's folder has config.json, *.safetensors and tokenizer.json.{advice}"
    )


def json_of(path: Path) -> Any:
    """What a file of JSON holds. Raises InvalidFileError if it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidFileError(f"{path} is no JSON: {error}.") from error


def _tensors(path: Path, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in weights_of(path):
        own = _name(name, _AROUND if kind in _NORMS_AROUND else {})
        if own is not None:
            # Gemma's norms multiply by 1 + weight.
            found[own] = value.float() + 1 if kind in _OF_ONE and own.endswith("norm.weight") else value
    return found


def weights_of(path: Path) -> Iterator[tuple[str, Any]]:
    """The tensors in a folder's *.safetensors by name, mapped into memory. Raises InvalidFileError if a file is damaged, OSError if
    there is none.
    """
    safetensors = need("safetensors", "A Hugging Face folder")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} has no *.safetensors; weights in other formats are not read.")
    index = path / "model.safetensors.index.json"
    named = sorted(set(json_of(index)["weight_map"].values())) if index.exists() else []
    missing = [name for name in named if not (path / str(name)).exists()]
    if missing:
        raise FileNotFoundError(
            f"{path} lacks {', '.join(map(str, missing[:5]))}{', …' * (len(missing) > 5)}, {len(missing)} of the {len(named)} "
            f"files that {index.name} names: get them, too."
        )
    for file in files:
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    yield name, opened.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise InvalidFileError(f"{file} is damaged: {error}.") from error


def _name(name: str, other: Mapping[str, str]) -> str | None:
    """GGUF's name of a weight; None: it is no weight. other: than the usual ones."""
    stem, _, part = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{part}"
    pieces = stem.split(".", 3)
    if pieces[:2] == ["model", "layers"] and len(pieces) == 4:
        inner = other.get(pieces[3]) or _NAMES.get(pieces[3])
        if inner is not None:
            return f"blk.{pieces[2]}.{inner}.{part}"
        if pieces[3].endswith("rotary_emb"):
            return None
    raise CompileError(f"There is a weight {name}, which models of the types {', '.join(KINDS)} do not have.")


def _shape(kind: str, config: Mapping[str, Any]) -> Shape:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    context = int(config["max_position_embeddings"])
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    local = dict(rope.get("sliding_attention") or {})
    rope = dict(rope.get("full_attention") or rope)
    base = float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    part = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or _ROTATED.get(kind, 1.0)
    rotated = int(size * float(part))
    factors, attention = None, 1.0
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    if scaling == "linear":
        factors = (float(rope["factor"]),) * (rotated // 2)
    elif scaling == "llama3":
        factors = _llama3(rope, base, rotated)
    elif scaling == "longrope":  # the factors for short texts
        factors = tuple(map(float, rope["short_factor"]))
        original = int(
            rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or context
        )
        longer = context / original
        attention = rope.get("attention_factor") or (
            math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
        )
        context = original
    elif scaling != "default":
        raise CompileError(
            f"Positions are scaled as {scaling!r}; taken are 'linear', 'llama3' and 'longrope' (for short texts)."
        )
    activation = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    if kind in _OF_ONE:
        activation = "gelu_pytorch_tanh"  # whatever the file says
    if activation not in _ACTIVATIONS:
        raise CompileError(f"The activation is {activation!r}; taken are {', '.join(map(repr, _ACTIVATIONS))}.")
    if kind == "stablelm" and config.get("qk_layernorm"):
        raise CompileError("Norms of its own for each head (qk_layernorm of stablelm) are not taken.")
    if config.get("attn_logit_softcapping") or config.get("final_logit_softcapping"):
        raise CompileError("Scores and logits that are capped are not taken.")
    if config.get("use_bidirectional_attention"):
        raise CompileError("Attention to what comes later is not taken.")
    if kind not in _WINDOWED and config.get("use_sliding_window"):
        raise CompileError(
            "Sliding windows of some layers are not taken: set use_sliding_window to false for texts up to the window."
        )
    window, near, near_base = config.get("sliding_window") if kind in _WINDOWED else None, None, None
    layers = config["num_hidden_layers"]
    if kind == "gemma3_text":
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        types = config.get("layer_types") or ["full" if (k + 1) % every == 0 else "sliding" for k in range(layers)]
        near = tuple(k for k, name in enumerate(types) if str(name).startswith("sliding"))
        near_base = float(local.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0)
        base = float(config.get("rope_theta") or rope.get("rope_theta") or 1e6)
        if (local.get("rope_type") or "default") != "default":
            raise CompileError(
                f"Positions of near layers are scaled as {local['rope_type']!r}; taken are those that are not."
            )
    unrotated: tuple[int, ...] = ()
    if kind == "smollm3":
        every = config.get("no_rope_layer_interval") or 4
        given = config.get("no_rope_layers") or [(k + 1) % every for k in range(layers)]
        unrotated = tuple(k for k, rotates in enumerate(given) if not rotates)
    score = config.get("attention_multiplier") if kind == "granite" else None
    if kind == "gemma3_text":
        score = float(config.get("query_pre_attn_scalar") or 256) ** -0.5
    scale = config.get("embedding_multiplier", 1.0) if kind == "granite" else 1.0
    return Shape(
        words=config["vocab_size"], width=width, layers=layers, heads=heads,
        groups=config.get("num_key_value_heads") or heads, size=size, inner=config["intermediate_size"],
        eps=float(config[_CENTRED.get(kind, "rms_norm_eps")]), base=base, context=context, rotated=rotated,
        activation=_ACTIVATIONS[activation],
        embedding_scale=width**0.5 if kind in _OF_ONE else float(scale), score_scale=None if score is None else float(score),
        residual_scale=float(config.get("residual_multiplier", 1.0)), near=near, near_base=near_base, unrotated=unrotated,
        factors=factors, attention_factor=float(attention), window=window, centred=kind in _CENTRED, gated=kind not in _UNGATED,
        parallel=kind == "phi" or bool(config.get("use_parallel_residual")),
    )  # fmt: skip


def _llama3(rope: Mapping[str, Any], base: float, rotated: int) -> tuple[float, ...]:
    """Divisors of frequencies: long waves are stretched, short ones are not, and those between in between."""
    low, high, factor = (float(rope[k]) for k in ("low_freq_factor", "high_freq_factor", "factor"))
    original = float(rope["original_max_position_embeddings"])

    def of(k: int) -> float:
        turns: float = original / (2 * math.pi * base ** (2 * k / rotated))
        part = min(max((turns - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - part) / factor + part)

    return tuple(map(of, range(rotated // 2)))


def text_of(path: Path, config: Mapping[str, Any]) -> Text:
    """Tokenizer, template and ends of the model in a folder, whose configuration is given."""
    settings = json_of(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    generation = json_of(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    tokenizer = (path / "tokenizer.json").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if (path / "chat_template.jinja").exists():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    special = {k: _content(settings[k]) for k in ("bos_token", "eos_token") if settings.get(k)}
    ends: set[int] = set()
    for given in (config.get("eos_token_id"), generation.get("eos_token_id")):
        ends |= {given} if isinstance(given, int) else set(given or ())
    made = Text(tokenizer, (), template, special)
    named = made.number(special["eos_token"]) if "eos_token" in special else None
    ends |= set() if named is None else {named}
    return made.with_ends(tuple(sorted(ends)))


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
