"""Server-sent events of one answer, or of several side by side."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from tasc_engine import GenerationResult
from tasc_runtime.protocol import Refusal, TokenText
from tasc_serve.errors import ApiError, of_refusal
from tasc_serve.http.responses import Reply
from tasc_serve.routing.choices import Numbered

DONE = "data: [DONE]\n\n"


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def failure(error: ApiError) -> str:
    """The end of a stream that cannot go on: the status line is long gone."""
    return event(error.body) + DONE


async def events(
    reply: Reply, first: Numbered, rest: AsyncIterator[Numbered]
) -> AsyncIterator[str]:
    """One event for each piece that has text or ends its choice, and the end mark.

    Log-probabilities of tokens whose text is held back come with the next event of their choice.

    Raises:
        ApiError: An answer failed, or was refused behind the first piece.
    """
    begun: set[int] = set()
    held: defaultdict[int, tuple[TokenText, ...]] = defaultdict(tuple)
    results: list[GenerationResult] = []
    numbered: Numbered | None = first
    while numbered is not None:
        index, piece = numbered
        if isinstance(piece, Refusal):
            raise of_refusal(piece)
        held[index] += piece.tokens
        if piece.text or piece.result:
            whole = dataclasses.replace(piece, tokens=held.pop(index))
            yield event(reply.chunk(index, whole, first=index not in begun))
            begun.add(index)
        if piece.result:
            results.append(piece.result)
        numbered = await anext(rest, None)
    if reply.wants_usage:
        yield event(reply.last(results))
    yield DONE
