"""Prompt templates: one place for a row's input, the rest verbatim. No escaping, no logic."""

from dataclasses import dataclass

from tasc_text.errors import TemplateError

FIELD = "{input}"


@dataclass(frozen=True)
class PromptTemplate:
    """Text with exactly one ``{input}``; other braces mean themselves.

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
