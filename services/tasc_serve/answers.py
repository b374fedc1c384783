"""From request bodies to calls, from results to response bodies and server-sent events."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from tasc_engine import Delta, GenerationResult
from tasc_serve.calls import Call, Refusal
from tasc_serve.http_errors import ApiError, of_refusal
from tasc_serve.schemas import (
    ChatRequest,
    CompletionRequest,
    chat_choice,
    chat_chunk,
    completion_choice,
    completion_chunk,
    usage,
)
from tasc_serve.settings import LimitSettings

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Shape:
    """How one endpoint writes its answers."""

    prefix: str
    object: str
    chunk_object: str
    choice: Callable[[str, str | None], dict[str, Any]]
    chunk: Callable[[str, str | None, bool], dict[str, Any]]

    def body(
        self, kind: str, task: str, call_id: str, created: int, choices: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{call_id}",
            "object": kind,
            "created": created,
            "model": task,
            "choices": choices,
        }

    @staticmethod
    def failure(error: ApiError) -> str:
        """The end of a stream that cannot go on: the status line is long gone."""
        return event(error.body) + DONE


COMPLETION = Shape(
    "cmpl", "text_completion", "text_completion", completion_choice, completion_chunk
)
CHAT = Shape("chatcmpl", "chat.completion", "chat.completion.chunk", chat_choice, chat_chunk)


def call_of(body: CompletionRequest | ChatRequest, limits: LimitSettings) -> Call:
    """Raises ApiError 400 for a prompt or an answer over its limit."""
    prompt = body.messages[0].content if isinstance(body, ChatRequest) else body.prompt
    call = Call(
        id=uuid.uuid4().hex,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        templated=isinstance(body, ChatRequest),
        max_tokens=body.limit,
        stop=body.stops,
        draft=body.draft,
        stream=body.stream,
    )
    size = len(prompt.encode()) if isinstance(prompt, str) else 0
    _check(call.prompt_field, "has", size, "bytes", limits.max_prompt_bytes)
    field = "max_tokens" if body.limit == body.max_tokens else "max_completion_tokens"
    _check(field, "is", body.limit or 0, "tokens", limits.max_tokens)
    return call


def _check(field: str, verb: str, size: int, unit: str, limit: int) -> None:
    if size > limit:
        raise ApiError(400, f"{field} {verb} {size} {unit}; at most {limit} are taken", field)


def whole(shape: Shape, task: str, result: GenerationResult) -> dict[str, Any]:
    choice = shape.choice(result.text, result.finish_reason)
    body = shape.body(shape.object, task, result.id, int(time.time()), [choice])
    return {**body, "usage": usage(result)}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def events(
    shape: Shape,
    task: str,
    call_id: str,
    first: Delta,
    rest: AsyncIterator[Delta | Refusal],
    wants_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events of one answer, one for each delta that has text or ends it."""
    piece: Delta | Refusal | None = first
    created, begun = int(time.time()), False
    while piece is not None:
        if isinstance(piece, Refusal):
            raise of_refusal(piece)
        result = piece.result
        if piece.text or result:
            choice = shape.chunk(piece.text, result.finish_reason if result else None, not begun)
            begun = True
            yield event(shape.body(shape.chunk_object, task, call_id, created, [choice]))
        if result and wants_usage:
            tail = shape.body(shape.chunk_object, task, call_id, created, [])
            yield event({**tail, "usage": usage(result)})
        piece = await anext(rest, None)
    yield DONE
