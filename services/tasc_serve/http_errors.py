"""Maps every error of the HTTP API to a response in the OpenAI shape."""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.routing import Match

from tasc_runtime.protocol import Refusal
from tasc_runtime.sampling_options import SHOWN, UNKNOWN, UNSUPPORTED
from tasc_store import CorruptArtifact, StoreError, StoreFull, StoreReadOnly
from tasc_store.errors import (
    BatchEnded,
    BatchesFull,
    FileInUse,
    FilesFull,
    FilesNotShared,
    LinesFull,
    StoreBusy,
    UnknownBatch,
    UnknownFile,
)

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An error response.

    Attributes:
        status: HTTP code.
        param: The request field at fault, if any.
        headers: Headers of the response. A ``Retry-After`` header replaces the default value.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        usual = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        return JSONResponse(self.body, self.status, {**usual, **self.headers})


_CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
    504: "timeout",
}
_OF_STORE: Final[tuple[tuple[type[StoreError], int, str], ...]] = (
    (UnknownFile, 404, "file_not_found"),
    (UnknownBatch, 404, "batch_not_found"),
    (FileInUse, 400, "file_in_use"),
    (BatchEnded, 400, "batch_ended"),
    (FilesFull, 429, "too_many_files"),
    (BatchesFull, 429, "too_many_batches"),
    (LinesFull, 429, "too_many_batch_lines"),
    (CorruptArtifact, 500, "file_damaged"),
    (StoreBusy, 503, "service_unavailable"),
)
_METHODS = {"GET": "GET, HEAD", "POST": "POST", "DELETE": "DELETE"}  # method: text in Allow
_UNIONS = (("prompt",), ("stop",), ("response_format",), ("text", "format"))
_PROMPTS = "prompts are strings or lists of token ids, all of one kind"
_PROMPT_KINDS = {
    "string_type": "a string",
    "list_type": "a list of token ids",
    "int_type": "a token id",
}
_HALF = re.compile("[\ud800-\udfff]")
_KEY = "[key]"  # pydantic's mark of an error in a key, not in its value


def of_refusal(refusal: Refusal) -> ApiError:
    if refusal.kind == "changed":
        return ApiError(409, refusal.message, code="task_changed")
    if refusal.kind == "full":
        headers = {"Retry-After": str(math.ceil(refusal.retry_after_s or RETRY_AFTER_S))}
        return ApiError(503, refusal.message, code="service_full", headers=headers)
    if refusal.kind == "late":
        return ApiError(504, f"{refusal.message}; try again later")
    if refusal.kind == "failed":
        return ApiError(500, refusal.message, code="answer_failed")
    return ApiError(400, refusal.message, refusal.param)


def of_store(error: StoreError) -> ApiError:
    """The response to an error of the store. Details of a failing store are only logged."""
    for kind, status, code in _OF_STORE:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    if isinstance(error, FilesNotShared):
        message = "this gateway does not share uploaded files with the workers; set files_url"
        return ApiError(501, message, code="files_not_shared")
    if isinstance(error, StoreFull):
        return ApiError(503, "the store is full; delete files that you no longer need")
    if isinstance(error, StoreReadOnly):
        return ApiError(503, "the store takes no writes at the moment; try again later")
    return ApiError(503, "the store cannot be reached at the moment; try again later")


def of_validation(error: ValidationError, body: bytes) -> ApiError:
    """Returns the error of an invalid body, which names the field at fault.

    Pydantic rejects a lone surrogate as invalid JSON; the error then names the field that has it.
    """
    fault = _nearest(error.errors(include_url=False, include_input=False))
    if fault["type"] == "json_invalid":
        return _no_json(fault, body)
    place = fault["loc"]
    if union := next((union for union in _UNIONS if place[: len(union)] == union), None):
        place = (*union, *place[len(union) + 1 :])  # drop pydantic's branch name
    context = fault.get("ctx", {})
    if fault["type"] in (UNKNOWN, UNSUPPORTED):
        place = (*place, context["field"])
    param = ".".join(_shown(part) for part in place if part != _KEY) or None
    if fault["type"] == UNKNOWN:
        nearest = context["nearest"]
        way_out = f"did you mean {nearest}?" if nearest else "remove it"
        return ApiError(400, f"unknown field {param}; {way_out}", param, "unknown_parameter")
    if fault["type"] == UNSUPPORTED:
        neutral = " or ".join(json.dumps(value) for value in context["neutral"])
        way_out = f"remove {context.get('whole', 'it')}" + (neutral and f", or send {neutral}")
        message = f"{param} is not supported here; {way_out}"
        return ApiError(400, message, param, "unsupported_parameter")
    return ApiError(400, f"{param or 'body'}: {_in_words(fault)}", param)


def _in_words(fault: ErrorDetails) -> str:
    """Describes the accepted values of a field, if pydantic's message does not."""
    place, kind = fault["loc"], fault["type"]
    if place[0:1] == ("logit_bias",) and _KEY in place:
        return "each key must be a token id, an integer of at least 0"
    if place[0:1] == ("prompt",) and kind in _PROMPT_KINDS:
        return f"is not {_PROMPT_KINDS[kind]}; {_PROMPTS}"
    return fault["msg"]


def _shown(part: int | str) -> str:
    """Formats a part of a field's path for messages. Clients may send any text as a name."""
    name = str(part)
    if not name:
        return '""'
    return (name if name.isprintable() else ascii(name[:SHOWN]))[:SHOWN]


def _no_json(fault: ErrorDetails, body: bytes) -> ApiError:
    field = _cut_field(body)
    if field is None:
        return ApiError(400, f"the body is not valid JSON: {fault['msg']}")
    name = _shown(field)
    message = f"{name} has half of a character (a lone surrogate); cut texts between characters"
    return ApiError(400, message, name)


def _cut_field(body: bytes) -> str | None:
    """Returns the first field with a lone surrogate, which pydantic rejects as invalid JSON."""
    try:
        content = json.loads(body)  # json.loads accepts lone surrogates, pydantic does not
        fields = content.items() if isinstance(content, dict) else ()
        return next((name for name, value in fields if _is_cut([name, value])), None)
    except (ValueError, RecursionError):
        return None


def _is_cut(value: object) -> bool:
    return _HALF.search(json.dumps(value, ensure_ascii=False)) is not None


def of_unexpected(error: Exception, where: str) -> ApiError:
    """Logs an unexpected error; the response does not include its details."""
    log.error("%s failed", where, exc_info=error)
    return ApiError(500, "internal error; the gateway's log has the details")


def response_to(request: Request, error: Exception) -> Response:
    """The response to a request that raised an error, in the OpenAI shape."""
    if isinstance(error, StoreError):
        error = of_store(error)
    if isinstance(error, HTTPException):
        wrong = error.status_code == 405
        headers = {"Allow": _allowed(request)} if wrong else error.headers
        if wrong and request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        message = f"{request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=headers).response()
    known = error if isinstance(error, ApiError) else of_unexpected(error, request.url.path)
    return known.response()


def _allowed(request: Request) -> str:
    """Returns the methods of all routes of a path; the 405 exception has those of one route."""
    asked = {name: request.scope.get(name, "") for name in ("type", "path", "root_path")}
    return ", ".join(
        shown
        for method, shown in _METHODS.items()
        if any(r.matches({**asked, "method": method})[0] is Match.FULL for r in request.app.routes)
    )


def install(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return response_to(request, error)

    for kind in (ApiError, StoreError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _nearest(faults: Sequence[ErrorDetails]) -> ErrorDetails:
    """Returns the most specific error of the first field at fault.

    A field with a union type has errors for each type of the union. The error with the longest path
    is returned. If several paths are equally long, errors about a wrong type come last.
    """
    same = [f for f in faults if f["loc"][:1] == faults[0]["loc"][:1]]
    return max(same, key=lambda f: (len(f["loc"]), not f["type"].endswith("_type")))
