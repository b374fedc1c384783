"""Prompt templates, tokenizers and incremental decoding."""

from tasc_text.detokenizer import IncrementalDetokenizer
from tasc_text.template import PromptTemplate
from tasc_text.tokenizer import TaskTokenizer, TextError, TokenizerError, resolve_folder

__all__ = [
    "IncrementalDetokenizer",
    "PromptTemplate",
    "TaskTokenizer",
    "TextError",
    "TokenizerError",
    "resolve_folder",
]
