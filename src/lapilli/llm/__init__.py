"""Language models: GGUF files and Hugging Face folders, compiled to one program that writes text."""

from lapilli.llm.answer_options import Choices
from lapilli.llm.beams import Beams
from lapilli.llm.cache_size import CacheUse
from lapilli.llm.language_model import LLM, Answer, AnswerStream, Token
from lapilli.llm.sequence_to_sequence import SequenceToSequence
from lapilli.llm.transcriber import Passage, Phrase, Transcriber, Transcription
from lapilli.llm.words import Word

__all__ = [
    "LLM",
    "Answer",
    "AnswerStream",
    "Beams",
    "CacheUse",
    "Choices",
    "Passage",
    "Phrase",
    "SequenceToSequence",
    "Token",
    "Transcriber",
    "Transcription",
    "Word",
]
