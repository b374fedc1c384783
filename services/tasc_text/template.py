"""Prompt templates: how a row's input or a conversation becomes a prompt.

Here are format strings, text with one place for the input, without escaping or logic. Chat
templates are in `chat`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from tasc_text.errors import TextError
from tasc_text.tokenizer import TaskTokenizer

FIELD = "{input}"
Role = Literal["system", "developer", "user", "assistant"]


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
    """Makes prompts of inputs and of conversations.

    Attributes:
        adds_special_tokens: Whether the tokenizer adds its special tokens to a rendered prompt.
    """

    adds_special_tokens: ClassVar[bool]

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that differs from that of templates that render otherwise."""

    @abstractmethod
    def render(self, value: str | Conversation) -> str:
        """The prompt of a row's input, or of a conversation.

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

        Args:
            add_special_tokens: None: as `adds_special_tokens` says.
        """
        add = self.adds_special_tokens if add_special_tokens is None else add_special_tokens
        return tokenizer.encode_prompt(self.render(value), add)


@dataclass(frozen=True)
class PromptTemplate(Template):
    """Text with exactly one ``{input}``; other braces are literal.

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

    def render(self, value: str | Conversation) -> str:
        before, after = self.text.split(FIELD)
        return before + (value if isinstance(value, str) else value.input) + after


def last_words(text: str, most: int) -> str:
    """The last ``most`` words at most, joined by blanks."""
    return " ".join(text.rsplit(maxsplit=most)[-most:]) if most else ""
