"""Prompt templates: how a row's input or a conversation becomes a prompt.

This module has format strings, which are texts with one place for the input, without escaping or
logic. Chat templates are in `chat`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tasc_text.control import MARK, ControlTokens
from tasc_text.errors import TextError
from tasc_text.tokenizer import TaskTokenizer

FIELD = "{input}"
Role = Literal["system", "developer", "user", "assistant"]
Quote: TypeAlias = Callable[[str], str]


class TemplateError(TextError):
    """A template that cannot be used, such as a format string without exactly one ``{input}``."""


class MessageError(TextError):
    """A conversation that a template cannot render.

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
        strict: Whether a format string refuses messages that it cannot use.
        add_generation_prompt: Whether the prompt ends with the head of an assistant's turn; unset:
            it does.
        variables: A JSON object with further variables of a chat template.
        reasoning_effort: A variable of chat templates, which format strings ignore.
    """

    messages: tuple[Message, ...]
    strict: bool = False
    add_generation_prompt: bool | None = None
    variables: str | None = None
    reasoning_effort: str | None = None

    def __str__(self) -> str:
        """All text that the client sent; limits of the prompt's size use its length."""
        return "".join((*(m.content + (m.name or "") for m in self.messages), self.variables or ""))

    @property
    def ignored(self) -> tuple[str, ...]:
        """The positions and roles of the messages that a format string does not use."""
        used = self._last_user
        places = ((i, m.role) for i, m in enumerate(self.messages) if i != used)
        return tuple(f"messages.{i} ({role})" for i, role in places)

    @property
    def input(self) -> str:
        """The input of a format string: the last user message.

        Raises:
            MessageError: There is no user message, or a format string does not support a field.
        """
        for name in ("add_generation_prompt", "variables"):
            if getattr(self, name) is not None:
                field = "chat_template_kwargs" if name == "variables" else name
                raise MessageError(
                    field,
                    f"{field} is for chat templates, but the task has a format string; leave "
                    f"{field} out",
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
                f"{', '.join(ignored)}; remove these messages, or the field strict_messages",
            )
        return self.messages[last].content

    @property
    def _last_user(self) -> int | None:
        users = (i for i, message in enumerate(self.messages) if message.role == "user")
        return max(users, default=None)


class Template(ABC):
    """Makes prompts from inputs and from conversations."""

    @property
    @abstractmethod
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens to a rendered prompt."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that differs between templates that render differently."""

    @abstractmethod
    def render(self, value: str | Conversation, quote: Quote = str) -> str:
        """Renders the prompt of a row's input, or of a conversation.

        Args:
            quote: Function applied to each text that is put into the template.

        Raises:
            MessageError: The template cannot render the conversation.
        """

    @property
    def takes_control_tokens(self) -> bool:
        """Whether texts that are put into the template may spell control tokens."""
        return False

    @property
    def own_texts(self) -> tuple[str, ...]:
        """Texts of the task that are put into the template in addition to a client's texts."""
        return ()

    @property
    def plain_prompts(self) -> tuple[str, ...]:
        """Prompts that show which tokens the template writes around texts."""
        return (self.render("a"),)

    def encode(
        self,
        tokenizer: TaskTokenizer,
        value: str | Conversation,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Returns the token ids of the prompt.

        Spellings of control tokens, such as ``<|im_end|>``, are ordinary text within the texts that
        are put into the template.

        Args:
            add_special_tokens: Whether the tokenizer adds its special tokens; None: the value of
                `adds_special_tokens`.

        Raises:
            MessageError: See `render`. Also raised if texts spell control tokens, and the template
                changes or examines these texts, so that the template's own control tokens cannot
                be determined.
        """
        prompt = self.render(value, texts := _Texts())
        ids = tokenizer.encode_prompt(prompt, False)
        if not self.takes_control_tokens:
            control, harmless = self._control(tokenizer)
            if any(map(control.may_spell, {*texts} - harmless)):
                ids = self._kept_apart(control, value, prompt, ids)
        add = self.adds_special_tokens if add_special_tokens is None else add_special_tokens
        return tokenizer.with_special_tokens(ids) if add else ids

    def encode_rows(self, tokenizer: TaskTokenizer, inputs: Sequence[str]) -> list[list[int]]:
        """Encodes many inputs, faster than single calls of `encode`."""
        noted = [_Texts() for _ in inputs]
        prompts = [self.render(value, texts) for value, texts in zip(inputs, noted, strict=True)]
        found = tokenizer.encode_outputs(prompts)
        if not self.takes_control_tokens:
            control, harmless = self._control(tokenizer)
            for at, (prompt, texts) in enumerate(zip(prompts, noted, strict=True)):
                if any(map(control.may_spell, {*texts} - harmless)):
                    found[at] = self._kept_apart(control, inputs[at], prompt, found[at])
        add = self.adds_special_tokens
        return [tokenizer.with_special_tokens(ids) for ids in found] if add else found

    def _control(self, tokenizer: TaskTokenizer) -> tuple[ControlTokens, frozenset[str]]:
        """Returns the control tokens of the template, and the task's texts that spell none."""
        known = tokenizer.controls
        if (found := known.get(self)) is None:
            find, prompts = tokenizer.spellings.find, self.plain_prompts
            written = {s.id for p in prompts for s in find(p) if not p[s.begin : s.end].isspace()}
            control = tokenizer.control(written)
            harmless = frozenset(text for text in self.own_texts if not control.find(text))
            found = known[self] = control, harmless
        return found

    def _kept_apart(
        self, control: ControlTokens, value: str | Conversation, prompt: str, ids: list[int]
    ) -> list[int]:
        """Returns ids of a prompt, in which all control tokens are the template's own.

        The prompt is rendered again with marks instead of the signs that spellings in texts need.
        This shows which parts the template wrote, even if it changes the texts. If the template
        examines these signs, only whole spellings are replaced by marks.

        Args:
            ids: Ids of the prompt, regardless of the origin of its control tokens.
        """
        spelled = control.find(prompt)
        leaks = control.beyond(ids, spelled)
        if not spelled and not leaks:
            return ids
        marked = self._marked(value, control.without_signs)
        written = control.find(marked)
        if not _same_but_marks(prompt, marked):
            wanted = [span.id for span in written]
            marked = self._marked(value, control.without_spellings)
            written = control.find(marked)
            known = _same_but_marks(prompt, marked)
            if not known or [span.id for span in written] != wanted:
                raise MessageError(
                    "messages",
                    f"the messages spell special tokens, such as {control.example(spelled)!r}, and "
                    "the task's chat template changes or examines such texts; remove these "
                    "spellings, or have the task allow them (allow_special_tokens_in_input)",
                )
        return control.encode(prompt, written) if leaks or {*spelled} - {*written} else ids

    def _marked(self, value: str | Conversation, quote: Quote) -> str:
        try:
            return self.render(value, quote)
        except MessageError:  # the template examines texts and refuses the marks
            return ""


class _Texts(list[str]):
    """A ``quote`` for `Template.render` that records the texts and does not change them."""

    def __call__(self, text: str) -> str:
        self.append(text)
        return text


def _same_but_marks(prompt: str, marked: str) -> bool:
    if len(prompt) != len(marked):
        return False
    one, other = (
        np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        for text in (prompt, marked)
    )
    return bool(((one == other) | (other == ord(MARK))).all())


@dataclass(frozen=True)
class PromptTemplate(Template):
    """Text with exactly one ``{input}``; other braces are literal.

    With the text ``{input}`` alone, an input is a whole prompt and may spell control tokens.

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

    @property
    def takes_control_tokens(self) -> bool:
        return self.text == FIELD

    def render(self, value: str | Conversation, quote: Quote = str) -> str:
        given = value if isinstance(value, str) else value.input
        before, after = self.text.split(FIELD)
        return before + quote(given) + after


@dataclass(frozen=True)
class UnquotedTemplate(Template):
    """Wraps another template so that texts may spell control tokens."""

    made: Template

    @property
    def adds_special_tokens(self) -> bool:
        return self.made.adds_special_tokens

    @property
    def identity(self) -> str:
        return f"{self.made.identity} unquoted"

    @property
    def takes_control_tokens(self) -> bool:
        return True

    def render(self, value: str | Conversation, quote: Quote = str) -> str:
        return self.made.render(value, quote)


def last_words(text: str, most: int) -> str:
    """At most the last ``most`` words, joined by blanks."""
    return " ".join(text.rsplit(maxsplit=most)[-most:]) if most else ""
