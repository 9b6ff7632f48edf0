"""What clients of OpenAI's interface ask for, as `LLM.generate` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from lapilli.errors import InvalidInputError
from lapilli.llm.answer_options import Choices
from lapilli.llm.grammar import ANY_OBJECT

_TAKEN = {
    "model", "stream", "stream_options", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop",
    "seed", "logprobs", "response_format", "grammar",
}  # fmt: skip
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""They ask for nothing that an answer shows."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "echo": (False,), "suffix": ("",),
    "modalities": (["text"],), "parallel_tool_calls": (True, False),
}  # fmt: skip
"""What is not taken but where it asks for nothing."""

MOST_TEXTS = 2048
"""Texts of a request for embeddings, as OpenAI has it."""


@dataclass(frozen=True)
class CompletionRequest:
    """prompt: as `LLM.generate` takes it. choices: its keywords. stream: pieces as they come. usage: and how many, at the end."""

    prompt: Any
    choices: Choices
    stream: bool
    usage: bool
    chat: bool


def completion_request(body: Any, chat: bool) -> CompletionRequest:
    """A request's JSON.

    Raises:
        InvalidInputError: something is missing, of another type, or not offered; the message says which.
    """
    if not isinstance(body, dict):
        raise InvalidInputError("The body is not a JSON object.")
    given = {k: v for k, v in body.items() if v is not None}
    own = {"messages", "max_completion_tokens", "top_logprobs"} if chat else {"prompt"}
    for name, value in given.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise InvalidInputError(f"{name!r} is not offered here; leave it out.")
        if name not in _TAKEN | own | _IGNORED | _NEUTRAL.keys():
            raise InvalidInputError(f"{name[:100]!r} is not offered here; leave it out.")
    options = given.get("stream_options", {})
    for name, value in (("stream", given.get("stream", False)), ("include_usage", _field(options, "include_usage"))):
        if not isinstance(value, bool):
            raise InvalidInputError(f"{name!r} is {value!r}; it is true or false.")
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "grammar")
    choices: dict[str, Any] = {"temperature": 1.0} | {k: given[k] for k in names if k in given}
    if "max_completion_tokens" in given:
        choices["max_tokens"] = given["max_completion_tokens"]
    schema = _schema(given.get("response_format", {"type": "text"}))
    if schema is not None:
        choices["json_schema"] = schema
    listed = _listed(given, chat)
    if listed is not None:
        choices["logprobs"] = listed
    stop = choices.get("stop", [])
    if not isinstance(stop, str | list):
        raise InvalidInputError(f"'stop' is {stop!r}; it is a text or a list of texts.")
    prompt = _messages(given) if chat else _prompt(given)
    usage = _field(options, "include_usage")
    return CompletionRequest(prompt, cast(Choices, choices), given.get("stream", False), usage, chat)


def _schema(form: Any) -> Mapping[str, Any] | None:
    """Of the answer; None: it is any text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
        schema = form["json_schema"].get("schema")
        if isinstance(schema, dict):
            return schema
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "text":
        return None
    raise InvalidInputError(
        '"response_format" is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}.'
    )


@dataclass(frozen=True)
class EmbeddingRequest:
    """texts: as `LLM.embed` takes them. base64: whether vectors are bytes of little-endian float32."""

    texts: list[Any]
    base64: bool


def embedding_request(body: Any) -> EmbeddingRequest:
    """A request's JSON; raises as `completion_request`."""
    if not isinstance(body, dict):
        raise InvalidInputError("The body is not a JSON object.")
    given = {k: v for k, v in body.items() if v is not None}
    for name in given:
        if name not in {"input", "model", "encoding_format"} | _IGNORED:
            raise InvalidInputError(f"{name[:100]!r} is not offered here; leave it out.")
    texts, form = given.get("input"), given.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise InvalidInputError(f"'encoding_format' is {str(form)[:100]!r}; it is 'float' or 'base64'.")
    if isinstance(texts, str) or (isinstance(texts, list) and texts and all(map(_is_token, texts))):
        texts = [texts]
    listed: list[Any] = texts if isinstance(texts, list) else []
    good = all(isinstance(t, str) or (isinstance(t, list) and all(map(_is_token, t))) for t in listed)
    if not good or not 0 < len(listed) <= MOST_TEXTS:
        raise InvalidInputError(
            f"'input' is missing, or not a text, a list of tokens, or a list of 1 to {MOST_TEXTS} of those."
        )
    return EmbeddingRequest(listed, form == "base64")


def _is_token(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _field(options: Any, name: str) -> Any:
    if not isinstance(options, dict):
        raise InvalidInputError("'stream_options' is not an object.")
    return options.get(name, False)


def _listed(given: Mapping[str, Any], chat: bool) -> int | None:
    """How many likely tokens are listed for each; None: no log-probabilities."""
    wanted = given.get("logprobs", False if chat else None)
    if not chat:
        found: int | None = wanted
        return found
    if not isinstance(wanted, bool):
        raise InvalidInputError(f"'logprobs' is {wanted!r}; it is true or false.")
    if "top_logprobs" in given and not wanted:
        raise InvalidInputError("'top_logprobs' needs 'logprobs' to be true.")
    return given.get("top_logprobs", 0) if wanted else None


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidInputError("'messages' is missing or not a list of objects with 'role' and 'content'.")
    return [{"role": m.get("role"), "content": _content(m.get("content"))} for m in messages]


def _content(content: Any) -> Any:
    """The text of a message, which may come in parts."""
    if not isinstance(content, list):
        return content
    texts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
    if not all(isinstance(t, str) for t in texts):
        raise InvalidInputError("A message has a part that is no text; only texts are read here.")
    return "".join(t for t in texts if t)


def _prompt(given: Mapping[str, Any]) -> Any:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    good = isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_token, prompt)))
    if not good:
        raise InvalidInputError("'prompt' is missing, or not one text or one list of tokens.")
    return prompt
