"""What gateway and replica say to each other: frozen values that travel between processes."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tasc_engine import GenerationResult
from tasc_serve.asked import Asked


@dataclass(frozen=True)
class Call:
    """One answer that is asked for, on its way to a replica.

    Attributes:
        id: Unique; also the request's id in the engine.
        prompt: The prompt itself as text or token ids, or with ``templated`` a row's input.
        max_tokens: Most tokens of the answer; the task's own number when unset.
        draft: Whether drafts may be used; the answer is the same.
        asked: How the answer is wanted.
        n: Answers to this prompt that are asked for, this one counted.
        max_tokens_field: The request field that ``max_tokens`` came in.
    """

    id: str
    prompt: str | tuple[int, ...]
    templated: bool
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    draft: bool = True
    stream: bool = False
    asked: Asked = field(default_factory=Asked)
    n: int = 1
    max_tokens_field: str = "max_tokens"

    @property
    def prompt_field(self) -> str:
        """The request field that the prompt came in."""
        return "messages.0.content" if self.templated else "prompt"


@dataclass(frozen=True)
class Refusal:
    """A replica's answer to a call it does not take, or cannot end.

    Attributes:
        kind: ``full``: try again later; ``invalid``: the request itself is at fault; ``failed``: it
            was taken, and broke off.
        param: The request field at fault.
    """

    kind: Literal["full", "invalid", "failed"]
    message: str
    param: str | None = None


@dataclass(frozen=True)
class TokenText:
    """A token of an answer, as who knows the tokenizer tells it to who does not.

    Attributes:
        utf8: What it adds to a text; it may be a part of a character.
        logprob: Natural logarithm of its probability.
        offset: Characters of the answer in front of it.
        top: The likeliest tokens of its place, the likeliest first.
    """

    utf8: bytes
    logprob: float
    offset: int
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        tokens: Its tokens, the end of sequence left out, where logprobs were asked for.
    """

    result: GenerationResult
    tokens: tuple[TokenText, ...] = ()


@dataclass(frozen=True)
class Piece:
    """What has been added to an answer since the last piece; the last one carries the result."""

    text: str
    tokens: tuple[TokenText, ...] = ()
    result: GenerationResult | None = None


@dataclass(frozen=True)
class TaskStatus:
    """What a replica serves: the task record's version, its model, and the index in use.

    Attributes:
        adapters: Names of those that a request may choose from.
    """

    task: str
    record_version: int
    model: str
    adapter: str | None
    fingerprint: str
    max_model_len: int
    rows: int
    index_version: int | None
    index_rows: int
    index_bytes: int
    adapters: tuple[str, ...] = ()


class Backend(Protocol):
    """The replicas, as the gateway sees them."""

    @property
    def tasks(self) -> Sequence[str]: ...

    async def complete(self, task: str, call: Call) -> Answer | Refusal:
        """The whole answer. Cancelling the awaiting task frees the row."""

    def stream(self, task: str, call: Call) -> AsyncGenerator[Piece | Refusal, None]:
        """The answer piece by piece; a refusal ends it, and comes alone unless the answer failed.

        Closing the iterator frees the row.
        """

    async def status(self, task: str) -> TaskStatus:
        """Ask one replica; raises when none answers in time."""

    async def metrics(self) -> Sequence[str]:
        """Prometheus text of every live process but this one."""

    def metrics_targets(self) -> Sequence[str]:
        """host:port of every live metrics port, this process's included."""
