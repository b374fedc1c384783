"""A line's body into calls, and their answers into the body that answers it, as online.

It runs in the engines' processes, and gives the same for the same line however often it is asked.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasc_jobs.batch.work import Row
from tasc_jobs.worker.lines import fault_of
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.protocol import Answer, Call
from tasc_runtime.sampling_options import FieldError
from tasc_serve.errors import ApiError
from tasc_serve.http.bodies import parsed
from tasc_serve.http.reading import call_of
from tasc_serve.http.responses import CHAT, COMPLETION, Reply
from tasc_serve.http.schemas import ChatRequest, CompletionRequest
from tasc_serve.routing.choices import calls_of
from tasc_serve.settings import LimitSettings

_CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class LineAnswers:
    """How the lines of one batch are answered.

    Attributes:
        batch: Its id, of which the ids of its answers and their random numbers are made.
        created: When it was made, in seconds since the epoch; its answers say so too.
    """

    batch: str
    endpoint: str
    task: str
    created: int
    limits: LimitSettings

    def calls(self, row: Row, worker: EngineBuilder) -> Sequence[Call]:
        """Raises ValueError: the text of an answer that is an error."""
        try:
            _, call = self._read(row)
            _require_taken(call, worker, self.limits)
        except ApiError as error:
            raise ValueError(fault_of(error)) from error
        return calls_of(call)

    def content(self, row: Row, answers: Sequence[Answer], worker: EngineBuilder) -> dict[str, Any]:
        body, call = self._read(row)
        shape = CHAT if self._is_chat else COMPLETION
        # Times differ from run to run: they are told only to who asks for them.
        metrics = body.metrics if "metrics" in body.model_fields_set else "none"
        reply = Reply.to(body, shape, self.task, call)
        reply = dataclasses.replace(reply, created=self.created, metrics=metrics)
        return reply.whole(answers)

    @property
    def _is_chat(self) -> bool:
        return self.endpoint == _CHAT

    def _read(self, row: Row) -> tuple[ChatRequest | CompletionRequest, Call]:
        raw = row.payload.encode()
        body = parsed(raw, ChatRequest) if self._is_chat else parsed(raw, CompletionRequest)
        if body.stream:
            raise ApiError(400, "stream is set; a batch has whole answers: leave it out", "stream")
        call = call_of(body, self.limits)
        asked = call.options
        if body.seed is None:
            asked = dataclasses.replace(asked, seed=seed_of(self.batch, row.ordinal))
        return body, dataclasses.replace(call, id=line_id(self.batch, row.ordinal), options=asked)


def line_id(batch: str, ordinal: int) -> str:
    """Of a line's answer, without a prefix."""
    return _digest(batch, ordinal).hex()[:24]


def seed_of(batch: str, ordinal: int) -> int:
    """What a line that names no seed is answered with, each time."""
    return int.from_bytes(_digest(batch, ordinal)[-8:])


def _digest(batch: str, ordinal: int) -> bytes:
    return hashlib.sha256(f"{batch}:{ordinal}".encode()).digest()


def _require_taken(call: Call, worker: EngineBuilder, limits: LimitSettings) -> None:
    """Raises ApiError 400 for what a replica would refuse."""
    try:
        request = worker.request(call)
        if over := limits.over_total(call.n, request.max_tokens):
            raise FieldError("n", over)
    except FieldError as error:
        raise ApiError(400, str(error), error.field) from error
    except ValueError as error:
        raise ApiError(400, str(error), call.prompt_field) from error
