"""`SequenceToSequence`: a model that reads a text, and writes another one, on a Vulkan device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np

from lapilli.errors import InvalidFileError, InvalidInputError
from lapilli.llm.about import About
from lapilli.llm.about_encoder import AboutEncoder
from lapilli.llm.answer_options import AnswerOptions, Choices
from lapilli.llm.beams import RANKED, Beams, BeamSearch
from lapilli.llm.given import checked_tokens, text_or_list
from lapilli.llm.language_model import Answer, AnswerStream, Token, WritingModel, closed_if_refused
from lapilli.llm.turn import Allowed, Given
from lapilli.runtime.program import Program

_PADDING = 0


class EncodingModel(WritingModel):
    """What models with an encoder have in common.

    Attributes:
        places: how many tokens, or pairs of a spectrum's frames, the encoder reads at most.
    """

    _reads: Literal["tokens", "a spectrum"]

    def _of(self, program: Program) -> None:
        with closed_if_refused(program):
            about = About.of_metadata(program.metadata)
            self._encoder = AboutEncoder.of_metadata(program.metadata, about.words)
            more = {"encode", "ranked", *(("carry",) if about.cache.is_paged else ())}
            self._of_methods(program, about, more | ({"time"} if self._encoder.untimed is not None else set()))
            reads = "a spectrum" if self._encoder.bins else "tokens"
            if reads != self._reads:
                other = "Transcriber" if self._encoder.bins else "SequenceToSequence"
                raise InvalidFileError(f"The model {self.name} reads {reads}: lapilli.{other} loads it.")
            self.places = self._encoder.places

    def _room(self, begin: Sequence[int], options: AnswerOptions) -> int:
        """How many tokens an answer that begins so has at most. The last one needs no place: nothing is read after it."""
        room = self.context - len(begin) + 1
        return room if options.max_tokens is None else min(options.max_tokens, room)

    def _searched(
        self,
        begin: Sequence[int],
        options: AnswerOptions,
        beams: Beams,
        given: Given,
        allowed: Allowed = None,
        timed: bool = False,
    ) -> Answer:
        """The answer that a search with beams finds, after the tokens that it begins with."""
        kinds, room = len(self.text.ends), self._room(begin, options)
        search = BeamSearch(beams, self.text.ends, kinds, room)
        if beams.count > self.sequences or search.width > RANKED:
            raise InvalidInputError(
                f"beams is {beams.count}; this model can search with {min(self.sequences, RANKED // max(2, 1 + kinds))} at most: "
                "compile it with more `sequences`."
            )
        if dataclasses.replace(options, max_tokens=None) != AnswerOptions():
            raise InvalidInputError(
                "beams have no draws, stop words, grammars or lists of likely tokens: leave those out."
            )
        if room < 1:
            return Answer()
        self._session.search(begin, given, search, allowed, timed)
        best = search.finished[0]
        pairs = zip(best.tokens, best.logprobs, strict=True)
        tokens = [Token(t, self.text.piece_text(t), logprob) for t, logprob in pairs]
        ended = best.tokens[-1] in self.text.ends
        text = self.text.decode(best.tokens[: -1 if ended else None])
        return Answer(text, tokens, "stop" if ended else "length", len(begin))


def beams_of(beams: int | Beams | None) -> Beams | None:
    """As a caller gives them; None: one answer is written, token by token. Raises InvalidInputError if they are none."""
    made = beams if beams is None or isinstance(beams, Beams) else Beams(beams)
    return None if made is not None and made.count == 1 else made


class SequenceToSequence(EncodingModel):
    """A model with an encoder and a decoder, such as T5, ready to write.

    It holds device memory until it is closed or leaves its `with` block.

    model = lapilli.SequenceToSequence("flan-t5-small")
    print(model.generate("translate English to German: How old are you?").text)
    model.save("model.lap")  # one file, which loads without the folder, torch or a compiler

    Attributes:
        name: what the model is called.
        context: how many tokens an answer has at most, the one that begins it included.
        places: how many tokens a text that is given has at most.
        text: tokenizer.
        program: the program that runs; its method `encode` reads a text.
    """

    _reads = "tokens"

    def __init__(
        self,
        source: str | os.PathLike[str] | memoryview,
        *,
        device: str | int | None = None,
        context: int | None = None,
        places: int | None = None,
        precision: Literal["fp32", "fp16"] = "fp32",
        quantize: Literal["int8", "int4"] | None = None,
        sequences: int = 1,
        progress: Callable[[str, int, int], None] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Loads a program, or compiles a model and loads it.

        Args:
            source: a file that `save` wrote, or its content; or a folder with config.json, *.safetensors and tokenizer.json, which
                is compiled: that needs `pip install lapilli[compile,llm]`.
            device: as for `lapilli.load`.
            context: how many tokens of an answer there is room for; None: 512.
            places: how many tokens of a text that is given there is room for; None: 512.
            precision: as for `lapilli.compile`. T5 models that were trained in bfloat16 leave the range of float16.
            quantize: as for `LLM`.
            sequences: how many answers, or beams of one, are written in one step; each has caches of its own.
            progress: as for `lapilli.compile`.
            say: is told what is converted, in a sentence.

        Raises:
            CompileError: the model's architecture is not taken (t5 and mt5 are), or an argument is not accepted.
            InvalidFileError: a file is damaged, or holds no such model.
            LapilliError: a package is missing; the message says what to install.
            NoDriverError: there is no Vulkan driver.
            NoDeviceError: there is no such device.
            OSError: a file cannot be read.
        """
        options = {
            "context": context, "places": places, "precision": precision, "quantize": quantize, "sequences": sequences,
        }  # fmt: skip
        usual = {"context": None, "places": None, "precision": "fp32", "quantize": None, "sequences": 1}
        self._of(self._opened(source, device, options, usual, {"progress": progress, "say": say}))

    @classmethod
    def _compiled(cls, path: Path, **options: Any) -> bytes:
        from lapilli.llm.from_encoder_decoder import compile_text_folder

        return compile_text_folder(path, **options)

    def tokens(self, text: str | Sequence[int]) -> list[int]:
        """The tokens of a text, with the one that ends it; tokens as they are.

        Raises:
            InvalidInputError: it is something else, a number is no token, there is none, or there are more than the encoder has
                places for.
        """
        return self._tokens(text, "The text")

    def _tokens(self, text: Any, what: str) -> list[int]:
        """what: is given, for messages."""
        words = self._session.about.words
        accepted = f"a text, or a list of tokens (numbers from 0 to {words - 1})"
        given = text_or_list(text, what, accepted)
        found = checked_tokens(self.text.encode(given) if isinstance(given, str) else given, words, what, accepted)
        if not 0 < len(found) <= self.places:
            raise InvalidInputError(
                f"The text has {len(found)} tokens; there can be 1 to {self.places}: shorten it, or compile the model with more "
                "places."
            )
        return found

    @overload
    def generate(
        self,
        text: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        beams: int | Beams | None = None,
        **choices: Unpack[Choices],
    ) -> Answer: ...
    @overload
    def generate(
        self,
        text: list[str] | list[list[int]],
        *,
        stream: Literal[False] = False,
        beams: int | Beams | None = None,
        **choices: Unpack[Choices],
    ) -> list[Answer]: ...
    @overload
    def generate(
        self, text: str | Sequence[int], *, stream: Literal[True], **choices: Unpack[Choices]
    ) -> AnswerStream: ...
    def generate(
        self, text: Any, *, stream: bool = False, beams: int | Beams | None = None, **choices: Unpack[Choices]
    ) -> Answer | list[Answer] | AnswerStream:
        """Writes the answer to a text, or to each of several texts, as many in one step as the model has `sequences`.

        Args:
            text: a text, or tokens; or a list, or an iterator, of those.
            stream: returns at once, an `AnswerStream` of pieces of text.
            beams: the answer is searched for with so many beams, as transformers' `num_beams` does it; at most as many as the model
                has `sequences`. Such answers are written one after the other, and have no stream and no other options than
                `max_tokens`.
            **choices: as for `LLM.generate`; a repetition penalty counts the tokens of the answer.

        Returns:
            an `Answer`, whose `prompt_tokens` are those of the text; a list of them for a list.

        Raises:
            InvalidInputError: an option is outside of what is accepted, or a text has no tokens or too many.
            MissingExtraError: a grammar is given, and its package is not installed.
        """
        options, searched = AnswerOptions.of(choices), beams_of(beams)
        given = text_or_list(text, "The text", "a text, or a list of tokens; or a list of those")
        if given == [] and not stream:
            return []
        one = isinstance(given, str) or all(isinstance(t, int) for t in given)
        texts = [given] if one else list(given)
        names = ["The text"] if one else [f"Text {k} of the list" for k in range(len(texts))]
        if stream and searched is not None:
            raise InvalidInputError(
                "An answer that is searched for with beams has no stream: its beginning may change."
            )
        if stream and not one:
            raise InvalidInputError("Several texts have no stream: give one text, and read several streams in turn.")
        if searched is not None:
            found = [self._best(tokens, options, searched) for tokens in map(self._tokens, texts, names)]
            return found[0] if one else found
        made = [self._stream(tokens, options) for tokens in map(self._tokens, texts, names)]
        if stream:
            return made[0]
        return self._written(made)[0] if one else self._written(made)

    def _stream(self, tokens: list[int], options: AnswerOptions) -> AnswerStream:
        begin = [self._encoder.start]
        made = AnswerStream(self, begin, options, self._room(begin, options), _given(tokens))
        made.answer.prompt_tokens = len(tokens)
        return made

    def _best(self, tokens: list[int], options: AnswerOptions, beams: Beams) -> Answer:
        found = self._searched([self._encoder.start], options, beams, _given(tokens))
        found.prompt_tokens = len(tokens)
        return found


def _given(tokens: list[int]) -> Given:
    padded = tokens + [_PADDING] * (len(tokens) == 1)  # the method takes two or more
    return np.array([padded]), np.array([len(tokens)])
