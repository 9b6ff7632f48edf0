"""`LLM`: a language model on a Vulkan device, from text to text. Needs torch only to compile."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Unpack, overload

from lapilli.errors import CompileError, InvalidFileError, InvalidInputError
from lapilli.llm.about import About
from lapilli.llm.answer_options import AnswerOptions, Choices
from lapilli.llm.session import Session, Turn
from lapilli.llm.stopping import Reader
from lapilli.llm.text import Messages, Text
from lapilli.player import MemoryInfo
from lapilli.runtime.closing import Closing
from lapilli.runtime.compiler_packages import require_compiler
from lapilli.runtime.host import OWN
from lapilli.runtime.load import load
from lapilli.runtime.program import Program


@dataclass(frozen=True)
class Token:
    """A written token.

    Attributes:
        id: its number.
        text: its text alone; a part of a character is U+FFFD.
        logprob: the logarithm of its probability by the model, whatever temperature and limits it was drawn with.
        likely: the most likely tokens, as (number, log-probability), the first ones first; empty unless asked for.
    """

    id: int
    text: str
    logprob: float
    likely: tuple[tuple[int, float], ...] = ()


@dataclass
class Answer:
    """A finished answer.

    Attributes:
        text: without stop words and special tokens.
        tokens: what was written, the token that ended it included.
        reason: "stop" (the model or a stop word ended it), "length" (max_tokens, or the cache is full) or "cancelled".
        prompt_tokens: how many tokens the prompt has.
    """

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    reason: Literal["stop", "length", "cancelled"] = "length"
    prompt_tokens: int = 0


class AnswerStream(Iterator[str]):
    """An answer while it is written: iterating gives its text, piece by piece.

    Attributes:
        answer: what there is so far. `answer.reason` is valid at the end.
    """

    def __init__(self, model: LLM, prompt: Sequence[int], options: AnswerOptions, count: int) -> None:
        """`LLM.generate` makes it."""
        self.answer = Answer(prompt_tokens=len(prompt))
        self._model, self._options, self._count = model, options, count
        seed = secrets.randbits(31) if options.seed is None else options.seed
        seed = (seed + 2**31) % 2**32 - 2**31
        self._turn = Turn(model._session, prompt, options, seed, count)
        self._reader = Reader(model.text, options.stop)
        self._ended = self._cancelled = False

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        while not self._ended:
            piece = self._step()
            self.answer.text += piece
            if piece:
                return piece
        raise StopIteration

    def cancel(self) -> None:
        """Ends the answer; may be called from another thread. What was kept back as a possible stop word is not given."""
        self._cancelled = True

    def _step(self) -> str:
        answer = self.answer
        if self._cancelled or len(answer.tokens) >= self._count:
            self._ended = True
            answer.reason = "cancelled" if self._cancelled else "length"
            return "" if self._cancelled else self._rest()
        number, logprob, likely = self._turn.next()
        text = self._model.text
        answer.tokens.append(Token(number, text.piece_text(number), logprob, tuple(likely)))
        if number in text.ends:
            self._ended, answer.reason = True, "stop"
            return self._reader.rest()
        piece = self._reader.take(number)
        if self._reader.ended:
            self._ended, answer.reason = True, "stop"
        return piece

    def _rest(self) -> str:
        piece = self._reader.rest()
        if self._reader.ended:
            self.answer.reason = "stop"
        return piece


class LLM(Closing):
    """A language model, ready to write. It holds device memory until it is closed or leaves its `with` block.

    lm = lapilli.LLM("model.gguf")
    print(lm.generate("Once upon a time", max_tokens=50).text)
    for piece in lm.generate([{"role": "user", "content": "Why is the sky blue?"}], stream=True):
        print(piece, end="")
    lm.save("model.lap")  # one file, which loads without the source, torch or a compiler

    Attributes:
        name: what the model is called.
        context: how many tokens prompt and answer have together at most.
        text: tokenizer and chat template.
        program: the program that runs.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        device: str | int | None = None,
        context: int | None = None,
        precision: Literal["fp32", "fp16"] = "fp32",
        quantize: Literal["int8", "int4"] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Loads a program, or compiles a model and loads it.

        Args:
            source: a file that `save` wrote; a GGUF file; or a folder with config.json, *.safetensors and tokenizer.json. The
                latter two are compiled, which needs `pip install lapilli[compile,llm]`.
            device: as for `lapilli.load`.
            context: how many tokens there is room for; None: as many as the model was made for, at most 4096. Memory for keys and
                values is taken for all of them.
            precision: as for `lapilli.compile`; packed weights, and those of float16, stay as they are in both.
            quantize: weights that are no codes yet become codes of 8 or 4 bits, with a scale for 32.
            progress: as for `lapilli.compile`.
            say: is told what is converted, in a sentence.

        Raises:
            CompileError: the model's architecture, or the type of a weight, is not taken, or an argument is not accepted.
            InvalidFileError: a file is damaged, or holds no language model.
            LapilliError: a package is missing; the message says what to install.
            NoDriverError: there is no Vulkan driver.
            NoDeviceError: there is no such device.
            OSError: a file cannot be read.
        """
        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        if path.suffix == ".lap":
            if quantize is not None or context is not None or precision != "fp32":
                raise CompileError(
                    "context, precision and quantize are chosen when a model is compiled; this file has been"
                )
            program = load(path, device, allow_host=False)
        else:
            require_compiler()
            from lapilli.llm.from_source import build, read

            data = build(read(path), context, precision, quantize, None, progress, say)
            program = Program(data, device, permission=OWN)
        try:
            self._of(program)
        except BaseException:
            program.close()
            raise

    def _of(self, program: Program) -> None:
        about = About.of_metadata(program.metadata)
        states = {s.name: (s.dtype, s.shape) for s in program.description.states}
        wanted = {
            "owner.seen": ("int32", (about.words,)),
            **{f"owner.{n}": ("int64", (1,)) for n in ("token", "place")},
        }
        if not {"prompt", "step", "likely"} <= program.methods.keys() or not wanted.items() <= states.items():
            raise InvalidFileError("The file lacks the methods or the states of a language model.")
        self.name, self.context, self.program = about.name, about.context, program
        self.text = Text.of_metadata(program.metadata)
        self._session = Session(program, about.context, about.words)

    def tokens(self, prompt: str | Messages | Sequence[int]) -> list[int]:
        """The tokens of a prompt: a text, messages of a chat, or tokens.

        Raises:
            InvalidInputError: messages do not fit the chat template, or a number is no token.
        """
        if isinstance(prompt, str):
            found = self.text.encode(prompt)
        elif prompt and all(isinstance(p, Mapping) for p in prompt):
            found = self.text.encode(self.text.chat(prompt), special=False)  # type: ignore[arg-type]
        else:
            found = [p for p in prompt if isinstance(p, int) and 0 <= p < self._session.words]
            if len(found) != len(prompt):
                raise InvalidInputError(
                    'A prompt is a text, a list of {"role": "user", "content": text}, or a list of tokens '
                    f"(numbers from 0 to {self._session.words - 1})."
                )
        return found

    @overload
    def generate(
        self, prompt: str | Messages | Sequence[int], *, stream: Literal[False] = False, **choices: Unpack[Choices]
    ) -> Answer: ...
    @overload
    def generate(
        self, prompt: str | Messages | Sequence[int], *, stream: Literal[True], **choices: Unpack[Choices]
    ) -> AnswerStream: ...
    def generate(
        self, prompt: str | Messages | Sequence[int], *, stream: bool = False, **choices: Unpack[Choices]
    ) -> Answer | AnswerStream:
        """Writes what follows a prompt.

        Several answers may be written at once, by several threads or by streams in turn: they share the device, and an answer
        whose turn it is reads again what another one has overwritten of its tokens. What two prompts begin with alike is read once.

        Args:
            prompt: a text to go on with; messages of a chat; or tokens.
            stream: returns at once, a `AnswerStream` of pieces of text.
            max_tokens: how many tokens are written at most; None: until the cache is full.
            temperature: of the draws; 0: always the likeliest token.
            top_k: tokens are drawn from this many of the likeliest; 0: from all.
            top_p: tokens are drawn from the likeliest ones that have this probability together.
            min_p: tokens are drawn from those that are at least this much as likely as the likeliest, before the other two limits.
            repetition_penalty: logits of tokens of the prompt and the answer are divided by it where they are positive, multiplied
                where they are negative.
            stop: texts at which the answer ends; they are not part of it.
            seed: of the draws; None: another one each time.
            logprobs: how many likely tokens are listed for each token, at most 20.

        Raises:
            InvalidInputError: an option is outside of what is accepted, or the prompt leaves no room in the cache.
        """
        options = AnswerOptions.of(choices)
        tokens = self.tokens(prompt)
        if not tokens:
            # There is nothing to go on with: a text begins as the model's own do.
            tokens = [self._beginning()]
        room = self.context - len(tokens)
        if room < 0:
            raise InvalidInputError(
                f"The prompt has {len(tokens)} tokens, and the cache holds {self.context}: shorten it, or compile the model with a "
                "larger context."
            )
        # The last token needs no place: nothing is read after it.
        count = room + 1 if options.max_tokens is None else min(options.max_tokens, room + 1)
        made = AnswerStream(self, tokens, options, count)
        if stream:
            return made
        for _ in made:
            pass
        return made.answer

    def _beginning(self) -> int:
        for name in ("bos_token", "eos_token"):
            given = (self.text.special or {}).get(name)
            found = self.text.encode(given, special=False) if given else []
            if len(found) == 1:
                return found[0]
        return 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model to one file, atomically: program, weights, tokenizer and chat template.

        Raises:
            OSError: the file cannot be written.
        """
        self.program.save(path)

    def memory(self) -> MemoryInfo:
        """Device memory that the model occupies now, in bytes."""
        return self.program.memory()

    def close(self) -> None:
        """Frees the device memory."""
        self.program.close()

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, context {self.context}, on {self.program.device.name})"
