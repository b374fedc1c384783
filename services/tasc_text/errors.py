"""Errors of this package."""


class TextError(ValueError):
    """Base of this package's errors."""


class TokenizerError(TextError):
    """The tokenizer of a model folder cannot be used."""
