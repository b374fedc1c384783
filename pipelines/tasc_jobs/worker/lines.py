"""The lines of a batch's file: the check of the file, and the requests and answer of each line.

A line that cannot be answered has an HTTP error, which the job stores as text. `LineAnswers` runs
in the engines' processes, and returns the same answer to the same line each time.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from tasc_jobs.batch.work import Read, Row, row_request
from tasc_protocol import FieldError, Request, Whole
from tasc_runtime.data.rows import read_lines
from tasc_runtime.engine.reader import require_total
from tasc_runtime.protocol import Refusal
from tasc_runtime.sampling_options import SHOWN
from tasc_serve.http.generation import ENDPOINTS
from tasc_serve.http.parsing import GenerationBody, parsed, requests_of
from tasc_serve.http.schemas import BatchLine
from tasc_serve.http_errors import ApiError, of_refusal
from tasc_serve.settings import LimitSettings
from tasc_store import TaskRecord
from tasc_store.batches.batch_store import Batch, BatchFault
from tasc_text import is_unicode

if TYPE_CHECKING:
    from tasc_runtime.engine.builder import EngineBuilder

_MARK: Final = "http_error"
_MAX_FAULTS: Final = 20
_ENDLESS: Final = ("too_many_lines", "line_too_long")  # faults that end the check
_AROUND_BODY: Final = 4096  # maximum bytes of a line in addition to its body
_HASH_BYTES: Final = 16


def fault_of(error: ApiError) -> str:
    """Returns an HTTP error as the text that a job stores."""
    return json.dumps({_MARK: {"status_code": error.status, "body": error.body}})


def response_of(text: str) -> dict[str, Any]:
    """Returns the status code and body from a text of `fault_of`.

    Any other text is the error of an engine.
    """
    try:
        return dict(json.loads(text)[_MARK])
    except (ValueError, TypeError, LookupError):
        error = of_refusal(Refusal("failed", text))
        return {"status_code": error.status, "body": error.body}


class _FaultyLineError(Exception):
    def __init__(self, code: str, message: str, line: int, param: str | None = None) -> None:
        super().__init__(message)
        self.fault = BatchFault(code, f"line {line}: {message}", line, param)


@dataclass(frozen=True)
class Checked:
    """The number of lines that are not blank, and the faults that make the batch fail."""

    total: int
    faults: tuple[BatchFault, ...]


@dataclass(frozen=True)
class BatchLines:
    """The lines of one batch.

    Args:
        path: The batch's input file on this machine.
    """

    path: Path
    batch: Batch
    limits: LimitSettings

    def check(self) -> Checked:
        """Read all lines once.

        The batch has a fault if it has no lines or too many, or if a line is too long, is not a
        JSON object, has no unique ``custom_id`` or names a second task. Any other fault of a line
        becomes the error of that line.
        """
        total, faults = 0, list[BatchFault]()
        seen = set[bytes]()
        for number, raw in self._raw():
            total += 1
            try:
                self._require_named(number, raw, seen)
                if total > self.limits.max_batch_lines:
                    message = f"over {self.limits.max_batch_lines} lines; split the file"
                    raise _FaultyLineError("too_many_lines", message, number)
            except _FaultyLineError as error:
                faults.append(error.fault)
                if len(faults) == _MAX_FAULTS or error.fault.code in _ENDLESS:
                    break
        if not total:
            faults.append(BatchFault("empty_file", "the file has no lines; write requests in it"))
        return Checked(total, tuple(faults))

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the job; their payload is a request's body. Call `check` first."""
        for ordinal, (number, raw) in enumerate(self._raw()):
            content = json.loads(raw.decode())
            try:
                line = parsed(raw, BatchLine)
                if line.url != self.batch.endpoint:
                    message = f"url is {line.url}; this batch is for {self.batch.endpoint}"
                    raise ApiError(400, message, "url")
            except ApiError as error:
                yield Row(ordinal, content["custom_id"], "", number, refused=fault_of(error))
            else:
                yield Row(ordinal, line.custom_id, json.dumps(line.body), number)

    def _raw(self) -> Iterator[tuple[int, bytes]]:
        for number, raw in read_lines(self.path, self._max_line_bytes):
            if raw.strip():
                yield number, raw

    @property
    def _max_line_bytes(self) -> int:
        return self.limits.max_body_bytes + _AROUND_BODY

    def _require_named(self, number: int, raw: bytes, seen: set[bytes]) -> None:
        limit = self._max_line_bytes
        if len(raw) > limit:
            raise _FaultyLineError("line_too_long", f"over {limit} bytes; shorten the line", number)
        content = _object(raw, number)
        name = content.get("custom_id")
        if not isinstance(name, str) or not 1 <= len(name) <= 256 or not is_unicode(name):
            message = "custom_id must be a text of 1 to 256 characters; add one"
            raise _FaultyLineError("missing_custom_id", message, number, "custom_id")
        digest = hashlib.sha256(name.encode()).digest()[:_HASH_BYTES]
        if digest in seen:
            message = f"custom_id {name[:SHOWN]!r} is not unique; give each line its own"
            raise _FaultyLineError("duplicate_custom_id", message, number, "custom_id")
        seen.add(digest)
        body = content.get("body")
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and model != self.batch.model:
            message = (
                f"model is {model[:SHOWN]!r}, but the first line has {self.batch.model!r}; make a "
                "batch for each model"
            )
            raise _FaultyLineError("mismatched_model", message, number, "body.model")


def _object(raw: bytes, number: int) -> dict[str, Any]:
    try:
        content = json.loads(raw.decode())  # `json.loads` also accepts UTF-16
    except (ValueError, RecursionError) as error:
        raise _FaultyLineError("invalid_json_line", f"not JSON: {error}", number) from error
    if not isinstance(content, dict):
        raise _FaultyLineError("invalid_json_line", "not a JSON object", number)
    return content


@dataclass(frozen=True)
class LineAnswers:
    """The strategy that answers the lines of one batch.

    Attributes:
        batch: Id of the batch; the ids and the seeds of its answers are derived from it.
        created: Creation time of the batch and of its answers, in seconds since the epoch.
    """

    batch: str
    endpoint: str
    task: str
    created: int
    limits: LimitSettings

    def requests(self, row: Row, builder: "EngineBuilder") -> Sequence[Read]:
        """Returns the requests of a line.

        Raises:
            ValueError: The line cannot be answered; the message is a text of `fault_of`.
        """
        try:
            _, requests = self._parsed(row)
            return [self._read(row_request(r, row, i), builder) for i, r in enumerate(requests)]
        except ApiError as error:
            raise ValueError(fault_of(ENDPOINTS[self.endpoint].reworded(error))) from error

    def content(self, row: Row, answers: Sequence[Whole], record: TaskRecord) -> dict[str, Any]:
        body, requests = self._parsed(row)
        # Times differ between runs, so they are included only if the line requests them.
        if "metrics" not in body.model_fields_set:
            body = body.model_copy(update={"metrics": "none"})
        reply = ENDPOINTS[self.endpoint].reply(body, self.task, requests, self.created)
        return reply.whole(answers)

    def is_repeatable(self, record: TaskRecord) -> bool:
        return False  # each line has an id and a seed of its own

    def _parsed(self, row: Row) -> tuple[GenerationBody, Sequence[Request]]:
        body: GenerationBody = parsed(row.payload.encode(), ENDPOINTS[self.endpoint].body)
        if body.stream:
            raise ApiError(400, "stream is set; a batch has whole answers: leave it out", "stream")
        id, seed = line_id(self.batch, row.ordinal), seed_of(self.batch, row.ordinal)
        asked = requests_of(body, self.limits, id, seed)
        # Drafts choose which unlikely labels are scored; equal lines get equal answers.
        return body, [structs.replace(r, draft=r.draft and r.scoring is None) for r in asked]

    def _read(self, asked: Request, builder: "EngineBuilder") -> Read:
        """Raises ApiError 400 for a request that a replica would refuse."""
        try:
            request = builder.reader.request(asked)
            require_total(request, self.limits.max_total_tokens)
        except FieldError as error:
            raise ApiError(400, str(error), error.field) from error
        except ValueError as error:
            reason = str(error).removeprefix(f"request {asked.id}: ")
            message = f"{asked.prompt_field}: {reason}"
            raise ApiError(400, message, asked.prompt_field) from error
        return asked, request


def line_id(batch: str, ordinal: int) -> str:
    """Returns the id of a line's answer, without a prefix."""
    return _digest(batch, ordinal).hex()[:24]


def seed_of(batch: str, ordinal: int) -> int:
    """Returns the seed for a line that gives no seed; the result is the same each time."""
    return int.from_bytes(_digest(batch, ordinal)[-8:])


def _digest(batch: str, ordinal: int) -> bytes:
    return hashlib.sha256(f"{batch}:{ordinal}".encode()).digest()
