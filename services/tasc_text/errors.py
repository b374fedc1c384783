"""Errors of this package."""


class TextError(ValueError):
    """Base of this package's errors."""


class TokenizerError(TextError):
    """A model folder whose tokenizer cannot be used."""
