"""Reads bodies and queries of HTTP requests within limits, and makes the requests to replicas.

Limits that do not depend on a task's record are checked here, such as a prompt's bytes. The replica
checks the others, such as a prompt's tokens (`tasc_runtime.engine.reader`).
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias, TypeVar

from fastapi import Request as HttpRequest
from msgspec.structs import replace
from pydantic import BaseModel, ValidationError

from tasc_protocol import FieldError, Request
from tasc_protocol.request import MOST_CHOICE_BYTES
from tasc_runtime.sampling_options import SHOWN
from tasc_serve.http.classify_api import ClassifyRequest
from tasc_serve.http.decisions_api import DecisionsRequest
from tasc_serve.http.proxy_guard import first_fields
from tasc_serve.http.responses_api import ResponsesRequest
from tasc_serve.http.schemas import ChatRequest, CompletionRequest
from tasc_serve.http_errors import ApiError, of_validation
from tasc_serve.routing import choices
from tasc_serve.settings import LimitSettings

GenerationBody: TypeAlias = (
    CompletionRequest | ChatRequest | ResponsesRequest | ClassifyRequest | DecisionsRequest
)
CLIENT_CLOSED_REQUEST: Final = 499  # nginx's code for a client that disconnected
_BYTES_PER_TOKEN = 4  # approximate size of a token's text
_Model = TypeVar("_Model", bound=BaseModel)


async def read_body(request: HttpRequest, limits: LimitSettings) -> bytes:
    """Reads a whole body, compressed by gzip or not.

    Raises:
        ApiError: See `arriving` and `chunks`; 400: the body is not valid gzip; 415: the body has
            another encoding, or a web page's script could send it without a preflight request.
    """
    headers = first_fields(request.scope)
    kind = _field(headers, b"content-type").partition(";")[0].rstrip()
    if b"origin" in headers and kind != "application/json":
        message = f"Content-Type is {kind[:SHOWN]!r}; web pages must send application/json"
        raise ApiError(415, message)
    most = limits.max_body_bytes
    async with arriving(limits.request_timeout_s):
        raw = b"".join([chunk async for chunk in chunks(request, most)])
    packing = _field(headers, b"content-encoding") or "identity"
    if packing == "identity":
        return raw
    if packing not in ("gzip", "x-gzip"):
        raise ApiError(415, f"Content-Encoding is {packing[:SHOWN]!r}; send gzip, or none")
    reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        unpacked = reader.decompress(raw, most + 1)
    except zlib.error as error:
        raise ApiError(400, f"the body is not gzip: {error}; correct Content-Encoding") from error
    if len(unpacked) > most:
        raise _too_large(most)
    if not reader.eof or reader.unused_data:
        raise ApiError(400, "the gzip body is cut off, or other data follows it; send it again")
    return unpacked


@asynccontextmanager
async def arriving(timeout_s: float) -> AsyncGenerator[None, None]:
    """Limits the time of a block that reads a body; raises ApiError 408 if it takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time; send it faster") from error


async def chunks(request: HttpRequest, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yields parts of a body; raises ApiError 413, or 499 if the client disconnected."""
    size, more = 0, True
    while more:
        part = await request.receive()
        if part["type"] == "http.disconnect":
            message = "the client went away before its body had arrived"
            raise ApiError(CLIENT_CLOSED_REQUEST, message)
        chunk, more = part.get("body", b""), part.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if chunk:
            yield chunk


def _field(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").strip().lower()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes; split it")


def parsed(raw: bytes, model: type[_Model]) -> _Model:
    """Parses a JSON body; raises ApiError 400, which names the field at fault."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise of_validation(error, raw) from error


def query_of(request: HttpRequest, known: Sequence[str]) -> Mapping[str, str]:
    """Returns the query's parameters; raises ApiError 400 for an unknown parameter."""
    for name in request.query_params:
        if name not in known:
            message = f"unknown parameter {name[:SHOWN]!r}; known are {', '.join(known)}"
            raise ApiError(400, message, name[:SHOWN])
    return request.query_params


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Returns ``limit`` of a query; raises ApiError 400 if it is not from 1 to ``most``."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
        raise ApiError(400, f"limit is {text[:SHOWN]!r}; it goes from 1 to {most}", "limit")
    return int(text)


def requests_of(
    body: GenerationBody,
    limits: LimitSettings,
    id: str,
    seed: int | None = None,
    record_version: int | None = None,
) -> tuple[Request, ...]:
    """Makes the requests for the answers to a body.

    Args:
        id: Id of the response.
        seed: Seed if the body has none; unset: a random seed.
        record_version: Version of the task's record, used if there is more than one answer.

    Raises:
        ApiError: 400: a field is over its limit, or fields contradict each other.
    """
    try:
        prompts = [tuple(p) if isinstance(p, list) else p for p in body.prompts]
        n, count, limit = body.n or 1, len(prompts), body.limit or 0
        answers = n * count
        name = {ClassifyRequest: "input", DecisionsRequest: "questions"}.get(type(body), "prompt")
        found = f"has {count} prompts"
        _require_at_most(name, found, count, "max_prompts", limits.max_prompts)
        _require_at_most("n", f"is {n} answers", n, "max_choices", limits.max_choices)
        if count > 1:
            found = f"is {n} answers to each of {count} prompts"
            _require_at_most("n", found, n, "max_prompts", limits.max_prompts // count)
        found = f"is {limit} tokens"
        _require_at_most(body.limit_field, found, limit, "max_tokens", limits.max_tokens)
        request = replace(
            body.request(body.logprob_count, seed),
            id=id,
            prompt=prompts[0],
            templated=not isinstance(body, CompletionRequest),
            echo=isinstance(body, CompletionRequest) and body.echo,
            max_tokens=body.limit,
            stream=body.stream,
            n=n,
            record_version=record_version if answers > 1 else None,
            timeout_s=min(body.timeout or limits.request_timeout_s, limits.request_timeout_s),
        )
        if (guide := request.guide) and guide.choices:
            size = guide.size_bytes
            most = MOST_CHOICE_BYTES * limits.max_choices // answers  # each request includes it
            found = f"has {size} bytes for each of {answers} answers"
            _require_at_most(guide.field, found, size, "max_choices", most)
        requests = (request,) if answers == 1 else choices.spread(request, prompts)
        total, most = 0, limits.max_prompt_bytes
        for one in requests[::n]:
            if isinstance(one.prompt, tuple):
                each, unit, size = _BYTES_PER_TOKEN, "token ids", len(one.prompt)
            else:
                each, unit, size = 1, "bytes", len(str(one.prompt).encode())
            found = f"has {size} {unit}"
            _require_at_most(one.prompt_field, found, size, "max_prompt_bytes", most // each)
            total += size * each
        if n > 1:  # each answer's request includes the prompt
            found = f"is {n} answers to {total} bytes of prompts, {n * total} together"
            _require_at_most("n", found, n * total, "max_prompt_bytes", most * limits.max_choices)
        if isinstance(body, DecisionsRequest):  # each question's request includes the input
            found = f"has {count} prompts of {total} bytes together"
            _require_at_most(name, found, total, "max_prompt_bytes", most * limits.max_choices)
            return tuple(replace(requests[at], guide=own) for at, own in enumerate(body.guides))
        return requests
    except FieldError as error:
        raise ApiError(400, str(error), error.field) from error


def _require_at_most(field: str, found: str, size: int, setting: str, limit: int) -> None:
    if size > limit:
        raise FieldError(field, f"{field} {found}; at most {limit} are taken (limits.{setting})")
