"""What a client says to make a batch, and what a line of its file says. It answers nothing."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from tasc_serve.formats import Body

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
WINDOW_S: Final = 24 * 3600
SHORTEST_S: Final = 3600
LONGEST_S: Final = 2_592_000

_Name = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=SHORTEST_S, le=LONGEST_S)]


class BatchRequest(Body):
    """The body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Name, _Value], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchLine(Body):
    """One line of a batch's file. Its body is read by whoever answers it, as if it came alone."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]
