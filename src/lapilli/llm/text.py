"""Between text and tokens: the tokenizer and the chat template of a model, as strings of the program's metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lapilli.errors import InvalidFileError, InvalidInputError
from lapilli.llm.given import whole_text
from lapilli.llm.packages import need

Messages = Sequence[Mapping[str, Any]]
TEXT_KEY, TOKENIZER_KEY = "llm.text", "llm.tokenizer"
_INCOMPLETE = "\ufffd"
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = tuple(b for b in range(256) if b not in _PRINTED)
_BYTES = {chr(b): b for b in _PRINTED} | {chr(256 + k): b for k, b in enumerate(_OTHERS)}
"""What GPT-2 and its relatives write for bytes in the names of tokens."""


@dataclass(frozen=True)
class Text:
    """tokenizer: JSON of the package tokenizers. ends: tokens that end an answer. template: of a chat, in Jinja. special: texts of
    the tokens bos_token and eos_token, which templates name.
    """

    tokenizer: str
    ends: tuple[int, ...]
    template: str | None = None
    special: Mapping[str, str] | None = None

    def metadata(self) -> dict[str, str]:
        """As strings of a program."""
        rest = {k: v for k, v in asdict(self).items() if k != "tokenizer"}
        return {TEXT_KEY: json.dumps(rest), TOKENIZER_KEY: self.tokenizer}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> Text:
        """Raises InvalidFileError if they are none."""
        try:
            rest = json.loads(metadata[TEXT_KEY])
            ends, template, special = (rest[k] for k in ("ends", "template", "special"))
            good = all(isinstance(e, int) for e in ends) and isinstance(template, str | None)
            good = good and all(isinstance(v, str) for v in (special or {}).values())
            if not good:
                raise ValueError("of other types")
            return cls(metadata[TOKENIZER_KEY], tuple(ends), template, special)
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidFileError(f"The metadata of the language model is damaged: {str(error)[:200]!r}.") from error

    @cached_property
    def _tokenizer(self) -> Any:
        package = need("tokenizers", "Text")
        try:
            return package.Tokenizer.from_str(self.tokenizer)
        except Exception as error:  # the package has no class of its own
            raise InvalidFileError(f"The tokenizer cannot be read: {str(error)[:200]}.") from error

    def with_ends(self, ends: tuple[int, ...]) -> Text:
        """The same with other ends; its tokenizer is not read again."""
        made = replace(self, ends=ends)
        made.__dict__["_tokenizer"] = self._tokenizer  # where cached_property keeps it
        return made

    def number(self, name: str) -> int | None:
        """The number of the token of this name; None: there is none."""
        found: int | None = self._tokenizer.token_to_id(name)
        return found

    def name(self, number: int) -> str | None:
        """The name of a token; None: there is none of this number."""
        found: str | None = self._tokenizer.id_to_token(number)
        return found

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a text. special: with those that the model wants at the beginning. Raises InvalidInputError for half a
        character.
        """
        found: list[int] = self._tokenizer.encode(whole_text(text), add_special_tokens=special).ids
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones. A character that is not complete is U+FFFD."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def piece_text(self, token: int) -> str:
        """The text of a token alone, special ones as they are called."""
        found: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return found

    def piece_bytes(self, token: int) -> bytes:
        """The bytes of a token alone, in UTF-8, also where they are a part of a character, whose text is U+FFFD."""
        text, name = self.piece_text(token), self.name(token)
        if _INCOMPLETE in text and name:
            if re.fullmatch("<0x[0-9A-F]{2}>", name):  # SentencePiece's
                return bytes([int(name[3:5], 16)])
            if all(c in _BYTES for c in name):
                return bytes(_BYTES[c] for c in name)
        return text.encode()

    @cached_property
    def _template(self) -> Any:
        need("jinja2", "A chat")
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: object) -> None:
            raise TemplateError(str(message))

        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = _now
        environment.filters["tojson"] = _to_json
        return environment.from_string(self.template or "")

    def chat(self, messages: Messages) -> str:
        """The text of a conversation, up to where the answer begins.

        Args:
            messages: {"role": "system" | "user" | "assistant", "content": text}.

        Raises:
            InvalidInputError: there is no template, a message is none, or the template refuses the conversation.
        """
        if self.template is None:
            raise InvalidInputError("The model has no chat template: give a prompt, a text to go on with.")
        given = [dict(m) if isinstance(m, Mapping) else {} for m in messages]
        if not given or not all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in given):
            raise InvalidInputError(
                'Messages are a list of {"role": "user", "content": text}, and there is at least one.'
            )
        try:
            text: str = self._template.render(
                messages=given, add_generation_prompt=True, tools=None, **(self.special or {})
            )
        except Exception as error:  # templates are programs: anything
            raise InvalidInputError(f"The chat template refuses these messages: {str(error)[:300]}.") from error
        return text


def _now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
