"""What can go wrong with text. Every message names the value and the way out."""


class TextError(ValueError):
    """Root of this package's errors."""


class TemplateError(TextError):
    """A prompt template without exactly one ``{input}``."""


class TokenizerError(TextError):
    """A model folder whose tokenizer cannot be used."""
