"""Values that gateways and replicas exchange, and the interfaces between their parts."""

import codecs
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec.structs import replace

from tasc_protocol import Output, Request, TokenLogprob, TokenText
from tasc_text import TaskTokenizer


@dataclass(frozen=True)
class Refusal:
    """A replica's reply to a request that it does not accept or cannot complete.

    Attributes:
        kind: ``full``: try again later; ``invalid``: the request itself is at fault; ``failed``:
            the request was accepted, but the answer broke off; ``changed``: the answer was begun
            with another version of the task's record; ``late``: the time limit has passed.
        param: The request field at fault.
        retry_after_s: Seconds until a place is likely to be free, if known.
    """

    kind: Literal["full", "invalid", "failed", "changed", "late"]
    message: str
    param: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True)
class TaskStatus:
    """The task of a replica: version of the task record, model, and the index in use.

    Attributes:
        index_rows: Number of corpus rows that the index was built from; None: unknown.
        adapters: Names of the adapters that a request may choose from.
        older_record_versions: Older versions whose unfinished answers the replica can complete.
        chat: Whether the task's template accepts whole conversations.
    """

    task: str
    record_version: int
    model: str
    adapter: str | None
    fingerprint: str
    max_model_len: int
    rows: int
    index_version: int | None
    index_rows: int | None
    index_bytes: int
    adapters: tuple[str, ...] = ()
    older_record_versions: tuple[int, ...] = ()
    chat: bool = False


@dataclass(frozen=True)
class ReplicaState:
    """The state of a replica, which each gateway requests about once a second.

    Attributes:
        outstanding: Number of requests that the replica holds, running or waiting.
        stalled_s: Seconds since the engine loop last completed a round.
    """

    status: TaskStatus
    outstanding: int
    stalled_s: float


class Router(Protocol):
    """Sends the requests of one task to its replicas."""

    async def complete(self, request: Request) -> Output | Refusal:
        """Returns the last output, with the whole answer. Cancelling this call frees the row."""

    def stream(self, request: Request) -> AsyncGenerator[Output | Refusal, None]:
        """Yields the outputs of the answer.

        If the request is refused, the only item is a refusal. If the answer breaks off, the last
        item is a refusal. Closing the iterator frees the row.
        """


class Backend(Protocol):
    """The interface through which a gateway uses the replicas."""

    @property
    def tasks(self) -> Sequence[str]: ...

    def router(self, task: str) -> Router: ...

    @property
    def store_fault(self) -> str | None:
        """Why the store accepts no writes or does not answer; None if it accepts writes."""

    async def settled(self) -> None:
        """Waits until each task has a status, or some seconds have passed since the first call."""

    def status(self, task: str) -> TaskStatus | None:
        """The last reported status of a replica; None if no replica has reported recently."""

    async def metrics(self) -> Sequence[str]:
        """Prometheus text of every live process except this one."""

    def metrics_targets(self) -> Sequence[str]:
        """The last known host:port of every live metrics port, including this process's."""


class TokenTexts:
    """Makes the `TokenText` of one answer's tokens, in order.

    Args:
        ends: Ids that end the answer and are not part of it.
        sent: The first tokens of the answer, which another replica has already sent.
        written: The text that the answer begins with, if decoding its tokens may give another text.
    """

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        ends: Sequence[int],
        sent: Sequence[int] = (),
        written: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # characters so far that no later byte can change
        self._begun, self._written = False, written
        self.of([TokenLogprob(token, 0.0) for token in sent])

    def of(self, logprobs: Sequence[TokenLogprob]) -> tuple[TokenText, ...]:
        """Returns the next tokens of the answer."""
        return tuple(self._text(one) for one in logprobs if one.token not in self._ends)

    def _text(self, one: TokenLogprob) -> TokenText:
        shown = self._shown(one.token)
        offset = self._length + self._is_cut_by(shown)
        self._length += len(self._decoder.decode(shown))
        name = self._tokenizer.token_bytes
        top = tuple((name(token), logprob) for token, logprob in one.top)
        return TokenText(name(one.token), one.logprob, offset, top)

    def _is_cut_by(self, shown: bytes) -> bool:
        """Whether ``shown`` follows an incomplete character, and does not continue it."""
        begun = bool(self._decoder.getstate()[0])
        return begun and bool(shown) and not 0x80 <= shown[0] < 0xC0

    def _shown(self, token: int) -> bytes:
        """The bytes that a token adds; a special token or a leading blank may add nothing."""
        utf8, at = self._tokenizer.token_bytes(token), self._length
        if token in self._tokenizer.special_ids:
            return utf8 if self._written.startswith(utf8.decode(), at) else b""
        first, self._begun = not self._begun, True
        if at < len(self._written):
            dropped = utf8[:1] == b" " and not self._written[at].isspace()
        else:
            dropped = first and self._tokenizer.drops_blank(token)
        return utf8[1:] if dropped else utf8


class AnswerTexts:
    """One answer as its client receives it; with ``echo``, the prompt precedes the answer.

    Args:
        asked: The request as its client sent it.
        request: The same request with the task's values, as the engine gets it.
    """

    def __init__(self, tokenizer: TaskTokenizer, asked: Request, request: Request) -> None:
        self._record_version = request.record_version
        echo, committed = asked.echo, request.committed_ids
        ends = () if request.ignore_eos or echo else tokenizer.eos_ids
        prompt = request.prompt_ids
        sent = (*prompt, *committed) if echo and committed else committed
        text = isinstance(asked.prompt, str) and not asked.truncate_prompt_tokens
        written = str(asked.prompt) if echo and text else ""
        self._texts = TokenTexts(tokenizer, ends, sent, written)
        self._streams, self._is_empty = request.stream, asked.max_tokens == 0
        self._scored = prompt[:1] if request.wants_prompt_logprobs else ()
        self._prompt = ""
        if echo and not committed:
            self._prompt = written or tokenizer.decode(prompt)
        self._tokenizer = tokenizer
        self._joins = echo and self._first(prompt) is not None
        self._joins = self._joins and self._first(committed) is None

    def output(self, made: Output, index_version: int | None) -> Output:
        """Converts the engine's next output; without streaming, this output is the whole answer."""
        result, text, ids = made.result, made.text, made.tokens
        logprobs = result.logprobs if result and not self._streams else made.logprobs
        if self._is_empty:  # the engine makes one token that was not requested
            text, ids, logprobs = "", (), logprobs[:-1]
            if result:
                result = replace(result, text="", tokens=(), finish_reason="length")
        first = self._texts.of([TokenLogprob(id_, 0.0) for id_ in self._scored])
        texts = (*(replace(t, logprob=None) for t in first), *self._texts.of(logprobs))
        front = self._prompt
        if self._joins:
            sent = self._first(result.tokens if result and not self._streams else ids)
            if sent is not None:  # decoding the answer alone may drop its leading blank
                front += " " * self._tokenizer.drops_blank(sent)
                self._joins = False
        if result:  # log-probabilities are sent in `token_texts`
            whole = front + result.text
            result = replace(result, text=whole, logprobs=(), index_version=index_version)
        text, self._prompt, self._scored = front + text, "", ()
        version = self._record_version
        return Output(made.id, ids, text, result, token_texts=texts, record_version=version)

    def _first(self, tokens: Sequence[int]) -> int | None:
        """The first token that has a text in answers."""
        special = self._tokenizer.special_ids
        return next((token for token in tokens if token not in special), None)
