"""Chat templates: a model's own Jinja template, which turns a conversation into a prompt."""

import json
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any

from tasc_text.renderer import shared_renderer
from tasc_text.template import Conversation, Message, MessageError, Quote, Template, TemplateError

MOST_TEMPLATE_BYTES = 256 * 1024
MOST_TURNS_BYTES = 256 * 1024  # maximum size of system prompt and few-shot examples together
_TALK = (Message("user", "a"), Message("assistant", "a"), Message("user", "a"))
# Variables that the renderer itself passes.
_RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "conversations", "chat_template"),
    *("return_assistant_tokens_mask", "continue_final_message"),
)


@dataclass(frozen=True)
class ChatTemplate(Template):
    """A Jinja template, and the turns that each conversation begins with.

    Prompts equal the results of ``tokenizer.apply_chat_template``, except that clients' messages
    can spell neither special tokens nor other tokens that the template writes around messages.

    Attributes:
        source: The Jinja template.
        tokens: Special tokens by their names in templates, such as ``bos_token``.
        system: System prompt of conversations that do not begin with one.
        shots: Few-shot examples: inputs and answers, inserted before the first message that is not
            a system prompt.

    Raises:
        TemplateError: A value is of the wrong kind, empty or too long.
    """

    adds_special_tokens = False  # the template writes them

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    system: str | None = None
    shots: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_text("chat_template", self.source, MOST_TEMPLATE_BYTES)
        for name, pairs in (("chat_tokens", self.tokens), ("few_shot", self.shots)):
            if not isinstance(pairs, tuple) or not all(map(_is_pair, pairs)):
                raise TemplateError(f"{name} is {pairs!r:.200}; it must be pairs of texts")
        turns = [text for pair in self.shots for text in pair]
        if self.system is not None:
            _check_text("system_prompt", self.system, MOST_TURNS_BYTES)
            turns.append(self.system)
        _check_text("few_shot", "".join(turns) or "-", MOST_TURNS_BYTES)

    @property
    def identity(self) -> str:
        return json.dumps(astuple(self))

    @property
    def own_texts(self) -> tuple[str, ...]:
        turns = (text for pair in self.shots for text in pair)
        return (*turns, *([] if self.system is None else [self.system]))

    @property
    def plain_prompts(self) -> tuple[str, ...]:
        """Prompts without the head of the next answer, since a head may have a reasoning mark."""
        bare, found = replace(self, system=None, shots=()), list[str]()
        for talk in (_TALK, (Message("system", "a"), *_TALK)):
            with suppress(MessageError):  # a template may not support system prompts
                found.append(bare.render(Conversation(talk, add_generation_prompt=False)))
        return tuple(found)

    def render(self, value: str | Conversation, quote: Quote = str) -> str:
        """Renders the prompt of a row's input, or of a conversation.

        Args:
            quote: Function applied to the texts of all turns, and to the client's variables.

        Raises:
            MessageError: The template refuses the conversation, fails, or exceeds a limit.
            RuntimeError: The rendering process cannot run.
        """
        asked = Conversation((Message("user", value),)) if isinstance(value, str) else value
        effort = {"reasoning_effort": asked.reasoning_effort} if asked.reasoning_effort else {}
        own = {**effort, **_variables(asked)}
        wanted = {
            "source": self.source,
            "messages": self._turns(asked.messages, quote),
            "add_generation_prompt": asked.add_generation_prompt is not False,
            "variables": {**dict(self.tokens), **{k: _quoted(v, quote) for k, v in own.items()}},
        }
        answer = shared_renderer().ask(wanted)
        if (text := answer.get("text")) is None:
            raise MessageError("messages", f"the task's chat template {answer['error']}")
        return str(text)

    def _turns(self, messages: tuple[Message, ...], quote: Quote) -> list[dict[str, str]]:
        begins = messages[0].role in ("system", "developer") if messages else False
        system = messages[:1] if begins else ()
        if not begins and self.system is not None:
            system = (Message("system", self.system),)
        shots = [
            turn
            for asked, answered in self.shots
            for turn in (Message("user", asked), Message("assistant", answered))
        ]
        return [self._turn(m, quote) for m in (*system, *shots, *messages[begins:])]

    def _turn(self, message: Message, quote: Quote) -> dict[str, str]:
        # Only recent templates know the role ``developer``; others get a system prompt instead.
        known = message.role != "developer" or "developer" in self.source
        turn = {"role": message.role if known else "system", "content": quote(message.content)}
        return turn if message.name is None else {**turn, "name": quote(message.name)}


def _variables(asked: Conversation) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asked.variables) if asked.variables else {}
    if taken := [name for name in found if name in _RESERVED]:
        raise MessageError(
            "chat_template_kwargs",
            f"chat_template_kwargs has {taken[0]}, which clients may not set; remove it",
        )
    return found


def _quoted(value: Any, quote: Quote) -> Any:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return [_quoted(each, quote) for each in value]
    if isinstance(value, dict):
        return {quote(name): _quoted(each, quote) for name, each in value.items()}
    return value


def _is_pair(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(isinstance(text, str) for text in value)


def _check_text(name: str, text: object, most: int) -> None:
    if not isinstance(text, str) or not text:
        raise TemplateError(f"{name} is {text!r:.80}; it must be a non-empty string")
    if not is_unicode(text):
        raise TemplateError(f"{name} has a lone surrogate; write UTF-8")
    if (size := len(text.encode())) > most:
        raise TemplateError(f"{name} has {size} bytes; at most {most}")


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
