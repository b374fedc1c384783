"""Prompt templates: text with one place for a row's input, without escaping or logic."""

from dataclasses import dataclass

from tasc_text.tokenizer import TextError

FIELD = "{input}"


class TemplateError(TextError):
    """A prompt template without exactly one ``{input}``."""


@dataclass(frozen=True)
class PromptTemplate:
    """Text with exactly one ``{input}``; other braces are literal.

    Raises:
        TemplateError: ``{input}`` is missing or occurs more than once.
    """

    text: str

    def __post_init__(self) -> None:
        if (found := self.text.count(FIELD)) != 1:
            raise TemplateError(
                f"template {self.text!r} has {FIELD} {found} times; put it in exactly once"
            )

    def render(self, value: str) -> str:
        before, after = self.text.split(FIELD)
        return before + value + after


def last_words(text: str, most: int) -> str:
    """The last ``most`` words at most, joined by blanks."""
    return " ".join(text.rsplit(maxsplit=most)[-most:]) if most else ""
