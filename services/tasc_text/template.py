"""Prompt templates: how a row's input or a conversation becomes a prompt.

Here are format strings, text with one place for the input, without escaping or logic. Chat
templates are in `chat`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tasc_text.control import Quotes
from tasc_text.errors import TextError
from tasc_text.tokenizer import TaskTokenizer

FIELD = "{input}"
Role = Literal["system", "developer", "user", "assistant"]
Quote: TypeAlias = Callable[[str], str]


class TemplateError(TextError):
    """A template that cannot be used, such as a format string without exactly one ``{input}``."""


class MessageError(TextError):
    """A conversation that a template makes no prompt of.

    Attributes:
        field: The request field at fault.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str
    name: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages as a client sends them.

    Attributes:
        messages: At least one.
        strict: Whether a format string refuses messages that it has no place for.
        add_generation_prompt: Whether the prompt ends with the head of an assistant's turn; unset:
            it does.
        variables: A JSON object with further variables of a chat template.
        reasoning_effort: Another such variable, which format strings need not refuse.
    """

    messages: tuple[Message, ...]
    strict: bool = False
    add_generation_prompt: bool | None = None
    variables: str | None = None
    reasoning_effort: str | None = None

    def __str__(self) -> str:
        """All that a client sent; its length is that of what a template is given."""
        return "".join((*(m.content + (m.name or "") for m in self.messages), self.variables or ""))

    @property
    def ignored(self) -> tuple[str, ...]:
        """The places of the messages that a format string has no place for, with their roles."""
        used = self._last_user
        places = ((i, m.role) for i, m in enumerate(self.messages) if i != used)
        return tuple(f"messages.{i} ({role})" for i, role in places)

    @property
    def input(self) -> str:
        """What a format string takes: the last user message.

        Raises:
            MessageError: There is none, or something is there that a format string cannot do.
        """
        for name in ("add_generation_prompt", "variables"):
            if getattr(self, name) is not None:
                field = "chat_template_kwargs" if name == "variables" else name
                raise MessageError(
                    field, f"{field} is for chat templates; the task has a format string: remove it"
                )
        if (last := self._last_user) is None:
            raise MessageError(
                "messages",
                "messages has no message with the role user, which is the input of the task's "
                "format string; add one",
            )
        if self.strict and (ignored := self.ignored):
            raise MessageError(
                ignored[0].split()[0],
                f"the task's format string takes the last user message only, not "
                f"{', '.join(ignored)}; remove them, or strict_messages",
            )
        return self.messages[last].content

    @property
    def _last_user(self) -> int | None:
        users = (i for i, message in enumerate(self.messages) if message.role == "user")
        return max(users, default=None)


class Template(ABC):
    """Makes prompts of inputs and of conversations."""

    @property
    @abstractmethod
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens to a rendered prompt."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that differs from that of templates that render otherwise."""

    @abstractmethod
    def render(self, value: str | Conversation, quote: Quote = str) -> str:
        """The prompt of a row's input, or of a conversation.

        Args:
            quote: What is done to each text that is put into the template.

        Raises:
            MessageError: The conversation has no prompt by this template.
        """

    def encode(
        self,
        tokenizer: TaskTokenizer,
        value: str | Conversation,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Token ids of the prompt; raises what `render` does.

        Spellings of control tokens, such as ``<|im_end|>``, are ordinary text in what is put into
        the template.

        Args:
            add_special_tokens: None: as `adds_special_tokens` says.
        """
        quotes = Quotes(tokenizer.control)
        prompt = self.render(value, quotes)
        if quotes.found:
            ids = tokenizer.control.encode(prompt)
        else:
            ids = tokenizer.encode_prompt(prompt, add_special_tokens=False)
        add = self.adds_special_tokens if add_special_tokens is None else add_special_tokens
        return tokenizer.with_special_tokens(ids) if add else ids

    def encode_rows(self, tokenizer: TaskTokenizer, inputs: Sequence[str]) -> list[list[int]]:
        """`encode` of many inputs, in less time."""
        quotes = [Quotes(tokenizer.control) for _ in inputs]
        prompts = [self.render(each, own) for each, own in zip(inputs, quotes, strict=True)]
        found = [
            tokenizer.control.encode(prompt) if own.found else ids
            for prompt, own, ids in zip(
                prompts, quotes, tokenizer.encode_prompts(prompts, False), strict=True
            )
        ]
        add = self.adds_special_tokens
        return [tokenizer.with_special_tokens(ids) for ids in found] if add else found


@dataclass(frozen=True)
class PromptTemplate(Template):
    """Text with exactly one ``{input}``; other braces are literal.

    The text ``{input}`` alone is no template: an input is then a whole prompt, and may spell
    control tokens.

    Raises:
        TemplateError: ``{input}`` is missing or occurs more than once.
    """

    adds_special_tokens = True

    text: str

    def __post_init__(self) -> None:
        if (found := self.text.count(FIELD)) != 1:
            raise TemplateError(
                f"template {self.text!r} has {FIELD} {found} times; put it in exactly once"
            )

    @property
    def identity(self) -> str:
        return self.text

    def render(self, value: str | Conversation, quote: Quote = str) -> str:
        given = value if isinstance(value, str) else value.input
        if self.text == FIELD:
            return given
        before, after = self.text.split(FIELD)
        return before + quote(given) + after


@dataclass(frozen=True)
class UnquotedTemplate(Template):
    """Another template, with texts that may spell control tokens."""

    made: Template

    @property
    def adds_special_tokens(self) -> bool:
        return self.made.adds_special_tokens

    @property
    def identity(self) -> str:
        return f"{self.made.identity} unquoted"

    def render(self, value: str | Conversation, quote: Quote = str) -> str:
        return self.made.render(value)


def last_words(text: str, most: int) -> str:
    """The last ``most`` words at most, joined by blanks."""
    return " ".join(text.rsplit(maxsplit=most)[-most:]) if most else ""
