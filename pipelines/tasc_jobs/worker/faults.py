"""Answers that are errors, as texts on their way through a job, which keeps a text of each."""

import json
from typing import Any

from tasc_serve.calls import Refusal
from tasc_serve.http_errors import ApiError, of_refusal

_MARK = "http_error"


def fault_of(error: ApiError) -> str:
    return json.dumps({_MARK: {"status_code": error.status, "body": error.body}})


def told(text: str) -> dict[str, Any]:
    """The error's code and body; those of a failure of the engine, if it says something else."""
    try:
        return dict(json.loads(text)[_MARK])
    except (ValueError, TypeError, LookupError):
        error = of_refusal(Refusal("failed", text))
        return {"status_code": error.status, "body": error.body}
