"""Models with an encoder and a decoder as they come from folders: T5's, and Whisper as Hugging Face or CTranslate2 saves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapilli.errors import CompileError, InvalidFileError
from lapilli.llm.ctranslate2 import whisper_tensors
from lapilli.llm.encoder_decoder import Activation, TwoStacks
from lapilli.llm.folder_source import check_file, json_of, name_of, text_of, weights_of
from lapilli.llm.source import SPEECH_KINDS, TEXT_KINDS, check_layers, reading
from lapilli.llm.text import Text

_ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu_new", "silu": "silu"}
"""By T5's names."""
_SEVERAL = 51865
"""Words from which on a Whisper model knows several languages, if it does not say so."""
_LATEST = 50
"""The last time that can be the first one of an answer, a second, if the folder does not say it."""


@dataclass
class EncoderDecoderSource:
    """tensors: as `EncoderDecoder` takes them. The rest as `AboutEncoder` has it."""

    name: str
    shape: TwoStacks
    tensors: Mapping[str, Any]
    text: Text
    start: int
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    untimed: int | None = None
    latest: int | None = None

    def check(self) -> None:
        """Raises InvalidFileError if a tensor is missing or has another shape than the model's numbers say."""
        s, given = self.shape, self.tensors
        numbers = [s.words, s.width, s.encoders, s.decoders, s.heads, s.size, s.inner]
        numbers += [] if s.bins else [s.buckets, s.distance - s.buckets // 2]
        if not all(isinstance(n, int) and 1 <= n < 2**31 for n in numbers) or not 0 < s.eps < 1:
            raise InvalidFileError(f"{self.name}: these numbers are no encoder's and decoder's: {s}.")
        if not all(0 <= layer < s.decoders and 0 <= head < s.heads for layer, head in s.alignment):
            raise InvalidFileError(f"{self.name} names heads for alignment that it does not have: {s.alignment}.")
        tokens = {self.start, *self.languages.values(), *self.tasks.values(), *s.suppressed, *s.first_suppressed}
        tokens |= {t for t in (self.untimed, self.latest) if t is not None}
        tokens |= set(self.text.ends)
        if not all(isinstance(t, int) and 0 <= t < s.words for t in tokens):
            raise InvalidFileError(f"{self.name} names tokens that are not among its {s.words}.")
        inside = s.heads * s.size
        wanted: dict[str, tuple[int, ...]] = {"token_embd": (s.words, s.width)}
        for part, layers, kinds in (("enc", s.encoders, ("attn_",)), ("dec", s.decoders, ("attn_", "cross_attn_"))):
            wanted[f"{part}.output_norm"] = (s.width,)
            for k in range(layers):
                prefix = f"{part}.blk.{k}."
                for kind in kinds:
                    wanted |= {f"{prefix}{kind}{name}": (inside, s.width) for name in "qkv"}
                    wanted |= {f"{prefix}{kind}o": (s.width, inside), f"{prefix}{kind}norm": (s.width,)}
                wanted |= {f"{prefix}ffn_up": (s.inner, s.width), f"{prefix}ffn_down": (s.width, s.inner)}
                wanted |= {f"{prefix}ffn_norm": (s.width,)}
                if f"{prefix}ffn_gate.weight" in given:
                    wanted[f"{prefix}ffn_gate"] = (s.inner, s.width)
            if not s.bins:
                wanted[f"{part}.blk.0.attn_rel_b"] = (s.buckets, s.heads)
        if s.bins:
            wanted |= {"conv1": (s.width, s.bins, 3), "conv2": (s.width, s.width, 3)}
        if "output.weight" in given:
            wanted["output"] = (s.words, s.width)
        whole = {f"{name}.weight": size for name, size in wanted.items()}
        if s.bins:
            whole |= {"enc.positions": (s.places or 0, s.width), "dec.positions": (s.context or 0, s.width)}
            whole |= {"conv1.bias": (s.width,), "conv2.bias": (s.width,)}
        for name, size in whole.items():
            found = None if name not in given else tuple(given[name].shape)
            if found != size:
                raise InvalidFileError(f"{self.name}: {name} is of shape {found or 'none'}; the model's is {size}.")
        for name, value in given.items():
            stem = name.removesuffix(".bias")
            if stem != name and tuple(value.shape) != wanted.get(stem, (0,))[:1]:
                raise InvalidFileError(
                    f"{self.name}: {name} is of shape {tuple(value.shape)}; its matrix is {wanted.get(stem)}."
                )


def read_text_folder(path: Path) -> EncoderDecoderSource:
    """The text-to-text model in a Hugging Face folder.

    Raises:
        InvalidFileError: a file is damaged, or there is no weight that the configuration asks for.
        CompileError: its architecture is not one of those that are taken.
        LapilliError: a package of the extra `llm` is missing.
        OSError: a file is missing or cannot be read.
    """
    with reading(path):
        config = _config(path, TEXT_KINDS)
        tensors = dict(_renamed(path, _t5_name))
        activation = _ACTIVATIONS.get(str(config.get("feed_forward_proj", "relu")).removeprefix("gated-"))
        if activation is None:
            raise CompileError(
                f"The activation is {config['feed_forward_proj']!r}; taken are relu, gated-gelu and gated-silu."
            )
        tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
        shape = TwoStacks(
            words=len(tensors["token_embd.weight"]), width=config["d_model"], encoders=config["num_layers"],
            decoders=config.get("num_decoder_layers") or config["num_layers"], heads=config["num_heads"], size=config["d_kv"],
            inner=config["d_ff"], eps=float(config.get("layer_norm_epsilon", 1e-6)), scale=1.0, activation=activation,
            head_scale=config["d_model"] ** -0.5 if tied else 1.0, buckets=config.get("relative_attention_num_buckets", 32),
            distance=config.get("relative_attention_max_distance", 128),
        )  # fmt: skip
        for name, count, prefix in (
            ("num_layers", shape.encoders, "enc.blk."),
            ("num_decoder_layers", shape.decoders, "dec.blk."),
        ):
            check_layers(path / "config.json", name, count, tensors, prefix)
        source = EncoderDecoderSource(
            name_of(path, config), shape, tensors, text_of(path, config), int(config.get("decoder_start_token_id") or 0)
        )
        source.check()
    return source


def read_speech_folder(path: Path) -> EncoderDecoderSource:
    """The Whisper model in a folder of Hugging Face's, or of CTranslate2's (faster-whisper); errors as for `read_text_folder`."""
    with reading(path):
        if (path / "model.bin").exists() and not list(path.glob("*.safetensors")):
            source = _of_ctranslate2(path)
        else:
            source = _of_hugging_face(path)
        source.check()
    return source


def _of_hugging_face(path: Path) -> EncoderDecoderSource:
    config = _config(path, SPEECH_KINDS)
    generation = json_of(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    if (path / "preprocessor_config.json").exists():
        given = json_of(path / "preprocessor_config.json")
        usual = {"n_fft": 400, "hop_length": 160, "sampling_rate": 16000}
        other = {k: given[k] for k in usual if given.get(k, usual[k]) != usual[k]}
        if other:
            raise CompileError(f"The spectrum of {path} is computed with {other}; taken is {usual}.")
    if config.get("scale_embedding") or config.get("activation_function", "gelu") != "gelu":
        raise CompileError("Embeddings that are scaled, and activations other than gelu, are not taken.")
    if config["encoder_attention_heads"] != config["decoder_attention_heads"]:
        raise CompileError("Encoder and decoder have different numbers of heads, which is not taken.")
    if config["encoder_ffn_dim"] != config["decoder_ffn_dim"]:
        raise CompileError("Networks of encoder and decoder differ in size, which is not taken.")
    said = {**config, **{k: v for k, v in generation.items() if v is not None}}
    tensors = dict(_renamed(path, _whisper_name))
    return _whisper(
        name_of(path, config), tensors, text_of(path, {**config, "eos_token_id": said.get("eos_token_id")}),
        heads=config["encoder_attention_heads"], suppressed=said.get("suppress_tokens") or (),
        first=said.get("begin_suppress_tokens") or (), start=said["decoder_start_token_id"],
        several=said.get("is_multilingual"), languages=said.get("lang_to_id"),
        tasks=said.get("task_to_id"), untimed=said.get("no_timestamps_token_id"), latest=said.get("max_initial_timestamp_index"),
        alignment=said.get("alignment_heads"),
    )  # fmt: skip


def _of_ctranslate2(path: Path) -> EncoderDecoderSource:
    check_file(path, "config.json")
    check_file(path, "tokenizer.json")
    config = json_of(path / "config.json")
    heads, tensors = whisper_tensors(path / "model.bin")
    text = text_of(path, {})
    end, start = text.number("<|endoftext|>"), text.number("<|startoftranscript|>")
    if start is None or end is None:
        raise InvalidFileError(
            f"{path / 'tokenizer.json'} lacks <|startoftranscript|> or <|endoftext|>, which Whisper's have."
        )
    return _whisper(
        name_of(path, config), tensors, text.with_ends((end,)), heads=heads, suppressed=config.get("suppress_ids") or (),
        first=config.get("suppress_ids_begin") or (), start=start, latest=_LATEST,
        alignment=config.get("alignment_heads"),
    )  # fmt: skip


def _whisper(
    name: str,
    tensors: Mapping[str, Any],
    text: Text,
    *,
    heads: int,
    suppressed: Any,
    first: Any,
    start: int,
    several: bool | None = None,
    languages: Any = None,
    tasks: Any = None,
    untimed: int | None = None,
    latest: int | None = None,
    alignment: Any = None,
) -> EncoderDecoderSource:
    """What the file does not say of tokens, the tokenizer does: models of one language have neither languages nor tasks."""
    words, width = tensors["token_embd.weight"].shape
    untimed = text.number("<|notimestamps|>") if untimed is None else untimed
    kept: dict[str, int] = {}
    if several if several is not None else words >= _SEVERAL:
        tasks = tasks or {task: text.number(f"<|{task}|>") for task in ("transcribe", "translate")}
        if languages is None:  # they come between these two
            end = text.number("<|translate|>") or start + 1
            languages = {text.name(t): t for t in range(start + 1, end)}
        kept = {k.strip("<|>"): v for k, v in languages.items()}
    tasks = {k: v for k, v in (tasks or {}).items() if v is not None} if kept else {}
    begins = 1 + bool(kept) + bool(tasks) + (untimed is not None)
    shape = TwoStacks(
        words=words, width=width, encoders=_layers(tensors, "enc"), decoders=_layers(tensors, "dec"), heads=heads,
        size=width // heads, inner=len(tensors["enc.blk.0.ffn_up.weight"]), eps=1e-5, scale=(width // heads) ** -0.5,
        activation="gelu", context=len(tensors["dec.positions"]), places=len(tensors["enc.positions"]),
        bins=tensors["conv1.weight"].shape[1], suppressed=_tokens(suppressed), first_suppressed=_tokens(first), first=begins - 1,
        alignment=tuple(sorted((int(layer), int(head)) for layer, head in alignment or ())),
    )  # fmt: skip
    return EncoderDecoderSource(name, shape, tensors, text, start, kept, tasks, untimed, latest)


def _tokens(given: Any) -> tuple[int, ...]:
    return tuple(int(t) for t in given if int(t) >= 0)


def _layers(tensors: Mapping[str, Any], part: str) -> int:
    return 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith(f"{part}.blk."))


def _config(path: Path, kinds: tuple[str, ...]) -> Any:
    check_file(path, "config.json")
    config = json_of(path / "config.json")
    kind = config.get("model_type")
    if kind not in kinds:
        raise CompileError(f"The model type of {path} is {kind!r}; taken here are {', '.join(kinds)}.")
    check_file(path, "tokenizer.json")
    return config


def _renamed(path: Path, rename: Callable[[str], str | None]) -> Any:
    for name, value in weights_of(path):
        own = rename(name)
        if own is not None:
            yield own, value


_T5_PARTS = {
    "SelfAttention": "attn_", "EncDecAttention": "cross_attn_", "DenseReluDense.wi": "ffn_up",
    "DenseReluDense.wi_0": "ffn_gate", "DenseReluDense.wi_1": "ffn_up", "DenseReluDense.wo": "ffn_down",
}  # fmt: skip
_T5_WHOLE = {
    "shared.weight": "token_embd.weight", "lm_head.weight": "output.weight",
    "encoder.final_layer_norm.weight": "enc.output_norm.weight", "decoder.final_layer_norm.weight": "dec.output_norm.weight",
}  # fmt: skip


def _t5_name(name: str) -> str | None:
    """GGUF's name of a weight; None: it is another name of the embedding."""
    if name in _T5_WHOLE:
        return _T5_WHOLE[name]
    if name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        return None
    pieces = name.split(".", 5)
    if len(pieces) == 6 and pieces[1] == "block" and pieces[3] == "layer" and pieces[0] in ("encoder", "decoder"):
        part, layer, sub, rest = pieces[0][:3], pieces[2], int(pieces[4]), pieces[5]
        kinds = ("attn_", "ffn_") if part == "enc" else ("attn_", "cross_attn_", "ffn_")
        prefix, stem = f"{part}.blk.{layer}.", rest.removesuffix(".weight")
        if stem == "layer_norm" and sub < len(kinds):
            return f"{prefix}{kinds[sub]}norm.weight"
        if stem in _T5_PARTS:
            return f"{prefix}{_T5_PARTS[stem]}.weight"
        kind, _, matrix = stem.partition(".")
        if kind in _T5_PARTS:
            return f"{prefix}{_T5_PARTS[kind]}{'rel_b' if matrix == 'relative_attention_bias' else matrix}.weight"
    raise _unknown(name, TEXT_KINDS)


_WHISPER_PARTS = {
    "self_attn_layer_norm": "attn_norm", "encoder_attn_layer_norm": "cross_attn_norm", "final_layer_norm": "ffn_norm",
    "fc1": "ffn_up", "fc2": "ffn_down",
    **{f"self_attn.{a}_proj": f"attn_{b}" for a, b in zip(("q", "k", "v", "out"), "qkvo", strict=True)},
    **{f"encoder_attn.{a}_proj": f"cross_attn_{b}" for a, b in zip(("q", "k", "v", "out"), "qkvo", strict=True)},
}  # fmt: skip
_WHISPER_WHOLE = {
    "encoder.embed_positions.weight": "enc.positions", "decoder.embed_positions.weight": "dec.positions",
    "decoder.embed_tokens.weight": "token_embd.weight",
}  # fmt: skip


def _whisper_name(name: str) -> str | None:
    """The name of a weight as `EncoderDecoder` has it; None: it is another name of the embedding."""
    if name == "proj_out.weight":
        return None
    name = name.removeprefix("model.")
    if name in _WHISPER_WHOLE:
        return _WHISPER_WHOLE[name]
    stem, _, kind = name.rpartition(".")
    part, _, rest = stem.partition(".")
    if part in ("encoder", "decoder"):
        if rest == "layer_norm":
            return f"{part[:3]}.output_norm.{kind}"
        if rest in ("conv1", "conv2"):
            return f"{rest}.{kind}"
        pieces = rest.split(".", 2)
        if len(pieces) == 3 and pieces[0] == "layers" and pieces[2] in _WHISPER_PARTS:
            return f"{part[:3]}.blk.{pieces[1]}.{_WHISPER_PARTS[pieces[2]]}.{kind}"
    raise _unknown(name, SPEECH_KINDS)


def _unknown(name: str, kinds: tuple[str, ...]) -> CompileError:
    return CompileError(f"There is a weight {name}, which models of the types {', '.join(kinds)} do not have.")
