"""Language models: GGUF files and Hugging Face folders, compiled to one program that writes text."""

from lapilli.llm.model import LLM, Answer, Stream, Token

__all__ = ["LLM", "Answer", "Stream", "Token"]
