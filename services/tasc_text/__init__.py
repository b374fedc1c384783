"""Prompt and chat templates, tokenizers and incremental decoding."""

from tasc_text.chat import ChatTemplate, is_unicode
from tasc_text.detokenizer import IncrementalDetokenizer
from tasc_text.errors import TextError, TokenizerError
from tasc_text.template import Conversation, Message, MessageError, PromptTemplate, Template
from tasc_text.tokenizer import TaskTokenizer, open_tokenizer, resolve_folder

__all__ = [
    "ChatTemplate",
    "Conversation",
    "IncrementalDetokenizer",
    "Message",
    "MessageError",
    "PromptTemplate",
    "TaskTokenizer",
    "Template",
    "TextError",
    "TokenizerError",
    "is_unicode",
    "open_tokenizer",
    "resolve_folder",
]
