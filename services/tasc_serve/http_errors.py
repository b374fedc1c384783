"""Every error of the HTTP surface, in the OpenAI shape, mapped in this one place."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tasc_serve.calls import Refusal

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP code.
        param: The request field at fault, if it is one.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status)

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


_CODES = {
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_full",
    504: "timeout",
}


def of_refusal(refusal: Refusal) -> ApiError:
    return ApiError(503 if refusal.kind == "full" else 400, refusal.message, refusal.param)


def of_validation(error: ValidationError) -> ApiError:
    """Name the first field at fault; a body that is no JSON has no field."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # A union's branches are part of pydantic's location, not of the request.
    place = [str(p) for p in fault["loc"] if not str(p).startswith(("constrained", "list[", "str"))]
    param = ".".join(place) or None
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {fault['msg']}")
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {param}; remove it", param)
    return ApiError(400, f"{param or 'body'}: {fault['msg']}", param)


def install(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def _known(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(Exception)
    async def _unknown(request: Request, error: Exception) -> JSONResponse:
        log.exception("%s failed", request.url.path, exc_info=error)
        return ApiError(500, "internal error; it is in the gateway's log").response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, f"{request.url.path}: {error.detail}").response()
