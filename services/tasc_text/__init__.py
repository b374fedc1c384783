"""Prompt templates, tokenizers and incremental decoding."""

from tasc_text.answer import AnswerText
from tasc_text.template import PromptTemplate
from tasc_text.tokenizer import TaskTokenizer, TextError, TokenizerError, resolve_folder

__all__ = [
    "AnswerText",
    "PromptTemplate",
    "TaskTokenizer",
    "TextError",
    "TokenizerError",
    "resolve_folder",
]
