"""`LLM`: a language model on a Vulkan device, from text to text. Needs torch only to compile."""

from __future__ import annotations

import os
import secrets
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import CompileError, InvalidFileError, InvalidInputError
from lapilli.llm.about import About, step_name, step_sizes
from lapilli.llm.about_encoder import KEY as ENCODER_KEY
from lapilli.llm.answer_options import AnswerOptions, Choices
from lapilli.llm.cache_size import CacheUse
from lapilli.llm.given import checked_tokens, text_or_list
from lapilli.llm.grammar import Grammar, Grammars
from lapilli.llm.session import Session
from lapilli.llm.stopping import Reader
from lapilli.llm.text import Messages, Text
from lapilli.llm.turn import Allowed, Given, Turn
from lapilli.player import MemoryInfo
from lapilli.runtime.closing import Closing
from lapilli.runtime.compiler_packages import require_compiler
from lapilli.runtime.host import OWN, Permission
from lapilli.runtime.load import load
from lapilli.runtime.notice import Work, working
from lapilli.runtime.program import Program

_COMPILING = Work("compiling a language model", "compiled a language model")


@contextmanager
def closed_if_refused(program: Program) -> Iterator[None]:
    """Closes a program if what is inside raises."""
    try:
        yield
    except BaseException:
        program.close()
        raise


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

    def __init__(
        self,
        model: WritingModel,
        prompt: Sequence[int],
        options: AnswerOptions,
        count: int,
        given: Given = None,
        allowed: Allowed = None,
        timed: bool = False,
    ) -> None:
        """`LLM.generate` makes it. given, allowed, timed: as for `Turn`; allowed: instead of a grammar."""
        self.answer = Answer(prompt_tokens=len(prompt))
        self._model, self._options, self._count = model, options, count
        seed = secrets.randbits(31) if options.seed is None else options.seed
        seed = (seed + 2**31) % 2**32 - 2**31
        self._session = model._session
        grammar = model._grammar(options)
        allowed = allowed if grammar is None else grammar.allowed
        self._turn = Turn(prompt, options, seed, count, model.text.ends, allowed, given, timed)
        weakref.finalize(self, self._turn.abandon)
        self._reader = Reader(model.text, options.stop)
        self._ended = self._cancelled = False

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        while not self._ended:
            piece = self._advance()
            if piece:
                return piece
        raise StopIteration

    def steadily(self) -> AnswerStream:
        """The stream itself, for a thread that reads it without pause: it keeps its memory, and where older answers need all that
        there is, it waits for them.
        """
        self._turn.steady = True
        return self

    def _begin(self) -> None:
        """Takes a slot before the first token is read, so that answers that are written together begin together."""
        self._session.enter(self.steadily()._turn)

    def _advance(self, wait: bool = True) -> str:
        """One token more: the text that is certain then. wait: as for `Session.next`."""
        try:
            piece = self._step(wait)
        finally:
            if self._ended:
                self._session.leave(self._turn)
        self.answer.text += piece
        return piece

    def cancel(self) -> None:
        """Ends the answer; may be called from another thread. What was kept back as a possible stop word is not given."""
        self._cancelled = True
        self._turn.abandon()

    def _step(self, wait: bool) -> str:
        answer = self.answer
        if self._cancelled or len(answer.tokens) >= self._count:
            self._ended = True
            answer.reason = "cancelled" if self._cancelled else "length"
            return "" if self._cancelled else self._rest()
        written = self._session.next(self._turn, wait)
        if written is None and not self._turn.over:
            return ""
        if written is None:
            self._ended, answer.reason = True, "cancelled"
            return ""
        number, logprob, likely = written
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


class WritingModel(Closing):
    """What models that write have in common, with an encoder or without.

    Attributes:
        name: what the model is called.
        context: how many tokens prompt and answer have together at most.
        sequences: how many answers are written in one step.
        text: tokenizer and chat template.
        program: the program that runs.
    """

    @classmethod
    @abstractmethod
    def _compiled(cls, path: Path, **options: Any) -> bytes:
        """The program of a source."""

    @classmethod
    def _opened(
        cls,
        source: str | os.PathLike[str] | memoryview,
        device: str | int | None,
        options: Mapping[str, Any],
        usual: Mapping[str, Any],
        talk: Mapping[str, Any],
    ) -> Program:
        """Loads a program, or compiles a source with options, whose usual values are all that a compiled file takes, and talk."""
        path = None if isinstance(source, memoryview) else Path(source)
        if path is not None and not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        if path is not None and path.suffix != ".lap":
            require_compiler()
            # From the import of torch to the program on the device: of either alone, nothing would be said.
            with nullcontext() if talk["progress"] else working(_COMPILING):
                return Program(cls._compiled(path, **options, **talk), device, permission=OWN)
        if dict(options) != dict(usual):
            *names, last = options
            raise CompileError(f"{', '.join(names)} and {last} are chosen when a model is compiled; this file has been")
        if isinstance(source, memoryview):
            return Program(source, device, permission=Permission.of(False))
        return load(source, device, allow_host=False)

    def _of_methods(self, program: Program, about: About, more: set[str]) -> None:
        """Takes a program. more: the methods that it has beyond those of all models that write."""
        states = {s.name: (s.dtype, s.shape) for s in program.description.states}
        lines, words = about.cache.lines, about.words
        wanted = {
            "owner.token": ("int64", (lines,)),
            "owner.seen": ("int32", (lines * words,)),
            "owner.allowed": ("int32", (lines, -(-words // 32))),
            "owner.logits": ("float32", (lines, words)),
        }
        methods = {"prompt", "likely", "remember", "allow", *(step_name(n) for n in step_sizes(about.sequences))} | more
        if about.cache.is_paged:
            methods |= {"lay", "copy"}
        if not methods <= program.methods.keys() or not wanted.items() <= states.items():
            raise InvalidFileError("The file lacks the methods or the states of a language model.")
        self.name, self.context, self.program = about.name, about.context, program
        self.sequences = about.sequences
        self.text = Text.of_metadata(program.metadata)
        self._session = Session(program, about)
        self._grammars: Grammars | None = None  # made when the first one is asked for

    def _grammar(self, options: AnswerOptions) -> Grammar | None:
        if options.json_schema is None and options.grammar is None:
            return None
        if self._grammars is None:
            self._grammars = Grammars(self.text, self._session.about.words)
        if options.json_schema is not None:
            return self._grammars.of_schema(options.json_schema)
        return self._grammars.of_rules(options.grammar or "")

    def _written(self, streams: Sequence[AnswerStream]) -> list[Answer]:
        """All of their answers: as many at a time as have seats, which threads share out."""
        seats, waiting, active = self._session.seats, deque(streams), list[AnswerStream]()
        try:
            while waiting or active:
                while waiting and seats.acquire(blocking=not active):
                    active.append(waiting.popleft())
                    active[-1]._begin()
                for stream in active[:]:
                    stream._advance(wait=stream is active[0])  # the oldest, which waits for none of the others
                    if stream._ended:
                        active.remove(stream)
                        seats.release()
        finally:
            for stream in active:
                stream.cancel()
                seats.release()
        return [stream.answer for stream in streams]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model to one file, atomically: program, weights, tokenizer and chat template.

        Raises:
            OSError: the file cannot be written.
        """
        self.program.save(path)

    def memory(self) -> MemoryInfo:
        """Device memory that the model occupies now, in bytes."""
        return self.program.memory()

    def cache(self) -> CacheUse:
        """How much of the memory for keys and values is taken, in tokens."""
        return self._session.use()

    def check(self) -> None:
        """Raises DeviceLostError if the device does not work any more: runs a method that changes nothing."""
        self._session.check()

    def close(self) -> None:
        """Frees the device memory."""
        self.program.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, context {self.context}, on {self.program.device.name})"


Prompt = str | Messages | Sequence[int]


_READING = Work("reading a text", "read a text")
_ACCEPTED = 'a text, a list of {"role": "user", "content": text}, or a list of tokens'


def _several(prompt: str | list[Any]) -> bool:
    """Whether this is a list of prompts: its elements are neither tokens nor messages."""
    return not isinstance(prompt, str) and any(not isinstance(p, int | Mapping) for p in prompt)


class LLM(WritingModel):
    """A language model, ready to write. It holds device memory until it is closed or leaves its `with` block.

    lm = lapilli.LLM("model.gguf")
    print(lm.generate("Once upon a time", max_tokens=50).text)
    for piece in lm.generate([{"role": "user", "content": "Why is the sky blue?"}], stream=True):
        print(piece, end="")
    lm.save("model.lap")  # one file, which loads without the source, torch or a compiler

    Attributes:
        name: what the model is called.
        context: how many tokens prompt and answer have together at most.
        sequences: how many answers are written in one step.
        text: tokenizer and chat template.
        program: the program that runs.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | memoryview,
        *,
        device: str | int | None = None,
        context: int | None = None,
        precision: Literal["fp32", "fp16"] = "fp32",
        quantize: Literal["int8", "int4"] | None = None,
        sequences: int = 1,
        cache: int | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Loads a program, or compiles a model and loads it.

        Args:
            source: a file that `save` wrote, or its content; a GGUF file; or a folder with config.json, *.safetensors and
                tokenizer.json. The latter two are compiled, which needs `pip install lapilli[compile,llm]`.
            device: as for `lapilli.load`.
            context: how many tokens prompt and answer have together at most; None: as many as the model was made for, at most 4096.
            precision: as for `lapilli.compile`; packed weights, and those of float16, stay as they are in both.
            quantize: weights that are no codes yet become codes of 8 or 4 bits, with a scale for 32.
            sequences: how many answers are written in one step. More take turns.
            cache: how many tokens of all sequences together there is memory for, in pages of 64, at least `context`; None:
            sequences x
                context. Prompts that begin alike have their pages once. When pages run out, the youngest answers wait.
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
        options = {"context": context, "precision": precision, "quantize": quantize, "sequences": sequences}
        options |= {"cache": cache}
        usual = {"context": None, "precision": "fp32", "quantize": None, "sequences": 1, "cache": None}
        self._of(self._opened(source, device, options, usual, {"progress": progress, "say": say}))

    @classmethod
    def _compiled(cls, path: Path, **options: Any) -> bytes:
        from lapilli.llm.from_source import compile_source

        return compile_source(path, **options)

    def _of(self, program: Program) -> None:
        with closed_if_refused(program):
            about = About.of_metadata(program.metadata)
            if ENCODER_KEY in program.metadata:
                raise InvalidFileError(
                    f"{about.name} has an encoder: lapilli.SequenceToSequence or lapilli.Transcriber loads it."
                )
            self._of_methods(program, about, {"embed"})

    def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt: a text, messages of a chat, or tokens.

        Raises:
            InvalidInputError: it is something else, messages do not fit the chat template, or a number is no token.
        """
        return self._tokens(prompt, "The prompt")

    def _tokens(self, prompt: Any, what: str) -> list[int]:
        """what: is given, for messages."""
        words = self._session.about.words
        accepted = f"{_ACCEPTED} (numbers from 0 to {words - 1})"
        given = text_or_list(prompt, what, accepted)
        if isinstance(given, str):
            return self.text.encode(given)
        if given and all(isinstance(p, Mapping) for p in given):
            return self.text.encode(self.text.chat(given), special=False)
        return checked_tokens(given, words, what, accepted)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = False, **choices: Unpack[Choices]) -> Answer: ...
    @overload
    def generate(
        self, prompt: list[Prompt], *, stream: Literal[False] = False, **choices: Unpack[Choices]
    ) -> list[Answer]: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **choices: Unpack[Choices]) -> AnswerStream: ...
    def generate(
        self, prompt: Any, *, stream: bool = False, **choices: Unpack[Choices]
    ) -> Answer | list[Answer] | AnswerStream:
        """Writes what follows a prompt, or each of several prompts.

        As many answers as the model has `sequences` are written in one step: those of a list, those of several threads, and streams
        that are read in turn. Of more streams, one whose turn it is reads again what another one has overwritten of its tokens.
        What two prompts begin with alike is read once. An answer depends on its prompt and its options alone.

        Args:
            prompt: a text to go on with; messages of a chat; or tokens. Or a list, or an iterator, of those.
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
            json_schema: the answer is JSON of this schema, if it comes to its end; {"type": "object"}: any object. Needs
                `pip install lapilli[grammar]`, as does the next one.
            grammar: the answer is a text of these rules, in llama.cpp's GBNF or in Lark's form.

        Raises:
            InvalidInputError: an option is outside of what is accepted, or a prompt leaves no room in the cache.
            MissingExtraError: a grammar is given, and its package is not installed.
        """
        options = AnswerOptions.of(choices)
        given = text_or_list(prompt, "The prompt", f"{_ACCEPTED}; or a list of those")
        if given == [] and not stream:
            return []
        if not _several(given):
            made = self._stream(given, options)
            return made if stream else self._written([made])[0]
        if stream:
            raise InvalidInputError(
                "Several prompts have no stream: give one prompt, and read several streams in turn."
            )
        return self._written([self._stream(p, options, f"Prompt {k} of the list") for k, p in enumerate(given)])

    def _stream(self, prompt: Any, options: AnswerOptions, what: str = "The prompt") -> AnswerStream:
        tokens = self._tokens(prompt, what)
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
        return AnswerStream(self, tokens, options, count)

    def score(self, text: str | Sequence[int], *, window: int | None = None) -> NDArray[np.float64]:
        """How likely the model finds a text: the logarithm of each token's probability after those before it.

        The text is read in windows; each one's first token has nothing before it, so it is not in the result.

        Args:
            text: a text, or tokens.
            window: how many tokens are read together; None: as many as the cache holds.

        Returns:
            [tokens - windows].

        Raises:
            InvalidInputError: the window is longer than the cache, or shorter than 2; or the text has fewer than 2 tokens; or the
                file was compiled by a version before this method.
        """
        tokens = self._tokens(text, "The text")
        length = self.context if window is None else window
        if isinstance(length, bool) or not isinstance(length, int) or not 2 <= length <= self.context:
            raise InvalidInputError(f"window is {window!r}; it can be 2 to {self.context}, which the cache holds.")
        if len(tokens) < 2:
            raise InvalidInputError(f"The text has {len(tokens)} tokens; the likelihood of a second one can be told.")
        if "score" not in self.program.methods:
            raise InvalidInputError(f"{self.name} was compiled by a version before `score`: compile it again.")
        cut = [tokens[k : k + length] for k in range(0, len(tokens), length)]
        found = list[NDArray[np.float32]]()
        with working(_READING):
            for part in cut:
                if len(part) > 1:
                    with self._session.seats:
                        found.append(self._session.scores(part))
        return np.concatenate(found, dtype=np.float64)

    def perplexity(self, text: str | Sequence[int], *, window: int | None = None) -> float:
        """How surprised the model is by a text: e to the power of minus the mean of what `score` gives; arguments and errors as
        there.
        """
        return float(np.exp(-self.score(text, window=window).mean()))

    def embed(self, texts: str | Sequence[str | Sequence[int]]) -> NDArray[np.float32]:
        """Embeddings of texts, or of lists of tokens: what the model's head would read of the last token, or the mean over all
        tokens if the model's file asks for it, divided by its length.

        Args:
            texts: one, or several.

        Returns:
            [texts, width], of one text, too.

        Raises:
            InvalidInputError: there is no text, one has no tokens, or one has more than the cache holds.
        """
        given = text_or_list(texts, "What is embedded", "a text, or a list of texts or of lists of tokens")
        tokens = [self._tokens(t, f"Text {k}") for k, t in enumerate([given] if isinstance(given, str) else given)]
        for k, found in enumerate(tokens):
            if not 0 < len(found) <= self.context:
                raise InvalidInputError(
                    f"Text {k} has {len(found)} tokens; an embedding is made of 1 to {self.context}."
                )
        if not tokens:
            raise InvalidInputError("There is no text to embed.")
        with working(_READING):
            return np.stack([self._session.embedding(t) for t in tokens])

    def _beginning(self) -> int:
        for name in ("bos_token", "eos_token"):
            given = (self.text.special or {}).get(name)
            found = self.text.encode(given, special=False) if given else []
            if len(found) == 1:
                return found[0]
        return 0
