"""Prompt templates, tokenising and back, tokenizer fingerprints. Needs `tokenizers` only."""

from tasc_text.answer import AnswerText
from tasc_text.errors import TextError, TokenizerError
from tasc_text.hub import resolve_folder
from tasc_text.template import PromptTemplate
from tasc_text.tokenizer import TaskTokenizer

__all__ = [
    "AnswerText",
    "PromptTemplate",
    "TaskTokenizer",
    "TextError",
    "TokenizerError",
    "resolve_folder",
]
