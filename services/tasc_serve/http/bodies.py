"""Request bodies and queries, read within bounds. It knows fields by name only, and no endpoint."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from tasc_serve.errors import SHOWN, ApiError, of_validation
from tasc_serve.settings import LimitSettings

Body = TypeVar("Body", bound=BaseModel)
GONE: Final = 499  # the client went away, as nginx counts it


async def read_body(request: Request, limits: LimitSettings) -> bytes:
    """The body, with a bound in bytes and in time."""
    raw = bytearray()

    async def take(part: bytes) -> None:
        raw.extend(part)

    await take_body(request, limits.max_body_bytes, limits.request_timeout_s, take)
    return bytes(raw)


async def take_body(
    request: Request, most_bytes: int, timeout_s: float, take: Callable[[bytes], Awaitable[None]]
) -> None:
    """Hand the body on as it comes, with a bound in bytes and in time, the taker's own counted.

    Raises:
        ApiError: 413, 408, or 499 where the client went away.
    """
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most_bytes:
                    raise ApiError(413, f"the body is larger than {most_bytes} bytes; split it")
                await take(chunk)
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time; send it faster") from error
    except ClientDisconnect as error:
        raise ApiError(GONE, "the client went away before its body had arrived") from error


def parsed(raw: bytes, model: type[Body]) -> Body:
    """Raises ApiError 400: that is no such body; it names the field at fault."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise of_validation(error, raw) from error


def query_of(request: Request, known: Sequence[str]) -> Mapping[str, str]:
    """The query's parameters. Raises ApiError 400 for one that is unknown."""
    for name in request.query_params:
        if name not in known:
            message = f"unknown parameter {name[:SHOWN]!r}; there are {', '.join(known)}"
            raise ApiError(400, message, name[:SHOWN])
    return request.query_params


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """``limit`` of a query. Raises ApiError 400: it is no number from 1 to ``most``."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
        raise ApiError(400, f"limit is {text[:SHOWN]!r}; it goes from 1 to {most}", "limit")
    return int(text)
