"""`Transcriber`: a Whisper model on a Vulkan device, from sound to text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from lapilli.errors import InvalidInputError
from lapilli.llm.answer_options import AnswerOptions, Choices
from lapilli.llm.beams import Beams
from lapilli.llm.language_model import Answer, AnswerStream
from lapilli.llm.sequence_to_sequence import EncodingModel, beams_of
from lapilli.llm.sound import HOP, RATE, checked, log_mel, read_wav, windows
from lapilli.llm.times import STEP, Times
from lapilli.llm.turn import Given, Turn, bits_of
from lapilli.llm.words import Word, ends_of_tokens, words_of

Audio = str | os.PathLike[str] | NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Phrase:
    """A phrase, as the model cuts them.

    Attributes:
        start: where it begins, in seconds of the recording, to 0.02.
        end: where it ends.
        text: what was said.
    """

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Passage:
    """What was said in a part of a recording, of 30 seconds at most.

    Attributes:
        start: where the part begins, in seconds.
        end: where it ends.
        text: what was said.
        language: that of the model's answer, such as "en"; None: the model knows one alone.
        answer: the text with its tokens.
        phrases: those in it, with their times; empty unless times are asked for.
        words: the words in it, with their times; empty unless they are asked for.
    """

    start: float
    end: float
    text: str
    language: str | None
    answer: Answer
    phrases: tuple[Phrase, ...] = ()
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Transcription:
    """What was said in a recording.

    Attributes:
        text: all of it.
        passages: its parts.
    """

    text: str
    passages: tuple[Passage, ...]

    @property
    def language(self) -> str | None:
        """That of the first part."""
        return self.passages[0].language if self.passages else None


@dataclass(frozen=True)
class Manner:
    """How a recording is written down."""

    language: str | None
    task: str
    options: AnswerOptions
    beams: Beams | None
    times: Times | None
    words: bool


class Transcriber(EncodingModel):
    """A Whisper model, ready to listen. It holds device memory until it is closed or leaves its `with` block.

    model = lapilli.Transcriber("whisper-tiny.en")
    print(model.transcribe("speech.wav").text)
    model.save("whisper.lap")  # one file, which loads without the folder, torch or a compiler

    Attributes:
        name: what the model is called.
        context: how many tokens an answer has at most, those that begin it included.
        languages: the codes of those that it knows, such as "en"; empty: it knows one alone.
        tasks: "transcribe" and "translate" (to English); empty: the former alone.
        seconds: how long the parts are that it reads at once.
        text: tokenizer.
        program: the program that runs; its method `encode` reads a spectrum.
    """

    _reads = "a spectrum"

    def __init__(
        self,
        source: str | os.PathLike[str] | memoryview,
        *,
        device: str | int | None = None,
        precision: Literal["fp32", "fp16"] = "fp32",
        quantize: Literal["int8", "int4"] | None = None,
        sequences: int = 1,
        progress: Callable[[str, int, int], None] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Loads a program, or compiles a model and loads it.

        Args:
            source: a file that `save` wrote, or its content; or a folder, as Hugging Face has it (config.json, *.safetensors,
                tokenizer.json) or CTranslate2 (config.json, model.bin, tokenizer.json). Those are compiled, which needs
                `pip install lapilli[compile,llm]`.
            device: as for `lapilli.load`.
            precision: as for `lapilli.compile`; weights of float16 stay as they are in both.
            quantize: as for `LLM`.
            sequences: how many parts of a recording, or beams of one, are written in one step; each has caches of its own.
            progress: as for `lapilli.compile`.
            say: is told what is converted, in a sentence.

        Raises:
            CompileError: the model is no Whisper, or an argument is not accepted.
            InvalidFileError: a file is damaged, or holds no such model.
            LapilliError: a package is missing; the message says what to install.
            NoDriverError: there is no Vulkan driver.
            NoDeviceError: there is no such device.
            OSError: a file cannot be read.
        """
        options = {"precision": precision, "quantize": quantize, "sequences": sequences}
        usual = {"precision": "fp32", "quantize": None, "sequences": 1}
        self._of(self._opened(source, device, options, usual, {"progress": progress, "say": say}))
        self.languages, self.tasks = tuple(self._encoder.languages), tuple(self._encoder.tasks)
        self.seconds = 2 * self.places * HOP / RATE

    @classmethod
    def _compiled(cls, path: Path, **options: Any) -> bytes:
        from lapilli.llm.from_encoder_decoder import compile_speech_folder

        return compile_speech_folder(path, **options)

    def transcribe(
        self,
        audio: Audio,
        *,
        rate: int | None = None,
        language: str | None = None,
        task: str = "transcribe",
        times: bool = False,
        words: bool = False,
        beams: int | Beams | None = None,
        **choices: Unpack[Choices],
    ) -> Transcription:
        """Writes what was said in a recording. Long ones are read in parts, which end where it is quietest near their end.

        Args:
            audio: the path of a WAV file, or floats [n] from -1 to 1.
            rate: how many numbers a second an array has; files say it themselves.
            language: a code of `languages`; None: the likeliest one of each part.
            task: one of `tasks`.
            times: the model writes when each phrase begins and ends: `Passage.phrases`.
            words: the model is asked where it heard each token: `Passage.words`. That is a second reading of the answer.
            beams: each part's answer is searched for, as `SequenceToSequence.generate` does it.
            **choices: as for `LLM.generate`, for each part.

        Raises:
            InvalidInputError: an argument is not one of those.
            InvalidFileError: the file is no WAV file, or of a format that is not taken.
            OSError: the file cannot be read.
        """
        found = tuple(
            self.passages(
                audio, rate=rate, language=language, task=task, times=times, words=words, beams=beams, **choices
            )
        )
        return Transcription("".join(p.answer.text for p in found).strip(), found)

    def passages(
        self,
        audio: Audio,
        *,
        rate: int | None = None,
        language: str | None = None,
        task: str = "transcribe",
        times: bool = False,
        words: bool = False,
        beams: int | Beams | None = None,
        **choices: Unpack[Choices],
    ) -> Iterator[Passage]:
        """The same, while it is written: a part at a time, or as many as the model has `sequences`.

        What `transcribe` raises comes before the first part.
        """
        options = AnswerOptions.of(choices)
        self._check(language, task)
        if words and "align" not in self.program.methods:
            raise InvalidInputError(
                f"{self.name} does not say which heads know when a word was said: leave `words` out."
            )
        timed = self._times(options) if times else None
        manner = Manner(language, task, options, beams_of(beams), timed, words)
        if isinstance(audio, str | os.PathLike):
            if rate is not None:
                raise InvalidInputError(f"rate is {rate!r}, and the file says its own: give it with arrays alone.")
            sound = checked(*read_wav(audio))
        else:
            sound = checked(audio, rate)
        return self._passages(sound, manner)

    def _passages(self, sound: NDArray[np.float32], manner: Manner) -> Iterator[Passage]:
        frames = 2 * self.places
        parts = list(windows(sound, frames * HOP)) if len(sound) else []
        together = 1 if manner.beams else self.sequences
        for k in range(0, len(parts), together):
            group = parts[k : k + together]
            heard = [(log_mel(sound[start:end], frames, self._encoder.bins),) for start, end in group]
            spoken = [self._language(given) if manner.language is None else manner.language for given in heard]
            answers = self._answers(heard, spoken, manner)
            for (start, end), language, answer, given in zip(group, spoken, answers, heard, strict=True):
                begin = self._begin(language, manner.task, manner.times is not None)
                words = self._words(answer, begin, given, language, start, end) if manner.words else ()
                phrases = self._phrases(answer, manner.times, start / RATE, end / RATE) if manner.times else ()
                yield Passage(start / RATE, end / RATE, answer.text.strip(), language, answer, phrases, words)

    def _answers(self, heard: Sequence[Given], spoken: Sequence[str | None], manner: Manner) -> list[Answer]:
        """To several parts, in the languages spoken in them."""
        options, times = manner.options, manner.times
        allowed, timed = (None, False) if times is None else (times.allowed, True)
        begins = [self._begin(language, manner.task, timed) for language in spoken]
        if manner.beams is not None:
            return [
                self._searched(begin, options, manner.beams, given, allowed, timed)
                for begin, given in zip(begins, heard, strict=True)
            ]
        return self._written(
            [
                AnswerStream(self, begin, options, self._room(begin, options), given, allowed, timed)
                for begin, given in zip(begins, heard, strict=True)
            ]
        )

    def _phrases(self, answer: Answer, times: Times, start: float, end: float) -> tuple[Phrase, ...]:
        """Of a part from start to end. Takes the times out of the answer's text."""
        written = [t.id for t in answer.tokens if t.id not in self.text.ends]
        answer.text = self.text.decode([t for t in written if t < times.first])
        return tuple(
            Phrase(min(start + a, end), min(start + b, end), self.text.decode(tokens).strip())
            for a, b, tokens in times.phrases(written, end - start)
        )

    def _words(
        self, answer: Answer, begin: list[int], given: Given, language: str | None, start: int, end: int
    ) -> tuple[Word, ...]:
        """Of a part that is these samples of the recording."""
        written = [t.id for t in answer.tokens if t.id not in self.text.ends][: self.context - len(begin)]
        if not written or len(begin) + len(written) < 2:
            return ()
        attention = self._session.alignment(given, [*begin, *written])[
            :, len(begin) :, : max((end - start) // HOP // 2, 1)
        ]
        places = [0, *ends_of_tokens(attention).tolist()]
        spans = [(start / RATE + a * STEP, start / RATE + b * STEP) for a, b in pairwise(places)]
        last = self._encoder.untimed if self._encoder.untimed is not None else self._session.about.words
        of_text = [k for k, t in enumerate(written) if t < last]
        chosen = [written[k] for k in of_text], [spans[k] for k in of_text]
        return tuple(words_of(*chosen, self.text.decode, language))

    def _times(self, options: AnswerOptions) -> Times:
        untimed, words = self._encoder.untimed, self._session.about.words
        if untimed is None or untimed + 1 >= words:
            raise InvalidInputError(f"{self.name} has no tokens for times: leave `times` out.")
        if options.stop or options.json_schema is not None or options.grammar is not None:
            raise InvalidInputError("An answer with times has neither stop words nor a grammar: leave those out.")
        return Times(untimed, min(self.text.ends, default=0), words, self._encoder.latest)

    def _check(self, language: str | None, task: str) -> None:
        if language is not None and language not in self._encoder.languages:
            known = ", ".join(self.languages) or "none: the model knows one language alone"
            raise InvalidInputError(f"language is {language!r}; it can be None, or one of: {known}.")
        tasks = self.tasks or ("transcribe",)
        if task not in tasks:
            raise InvalidInputError(f"task is {task!r}; {self.name} can do: {', '.join(tasks)}.")

    def _begin(self, language: str | None, task: str, timed: bool) -> list[int]:
        """The tokens that an answer begins with."""
        about = self._encoder
        rest = (about.languages.get(language or ""), about.tasks.get(task), None if timed else about.untimed)
        return [about.start, *(t for t in rest if t is not None)]

    def _language(self, given: Given) -> str | None:
        """The likeliest language of a part: the likeliest of their tokens after the first one."""
        known = {number: name for name, number in self._encoder.languages.items()}
        if not known:
            return None
        words = bits_of(list(known), self._session.about.words)
        turn = Turn([self._encoder.start], AnswerOptions(), 0, 1, (), lambda _: words, given)
        try:
            written = self._session.next(turn)
        finally:
            self._session.leave(turn)
        assert written is not None  # nobody abandons it
        return known[written[0]]
