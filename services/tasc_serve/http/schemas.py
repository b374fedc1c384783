"""Request bodies in the OpenAI shape. Responses are in `responses`.

Unknown fields are refused, never dropped; null means a field's default.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from tasc_runtime.sampling_options import Body, GenerationFields, Number, TokenId, Top

_MOST_PARTS = 1024


def _joined(content: Any) -> Any:
    """One text of OpenAI's parts."""
    if isinstance(content, str):
        return content
    few = isinstance(content, list) and len(content) <= _MOST_PARTS
    if few and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    raise PydanticCustomError(
        "no_text",
        'is a string or a list of at most {most} parts {{"type": "text", "text": ...}}',
        {"most": _MOST_PARTS},
    )


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


Content = Annotated[
    str, BeforeValidator(_joined, json_schema_input_type=str | list[dict[str, str]])
]


MetricsLevel = Literal["none", "summary", "detailed"]


class StreamOptions(Body):
    include_usage: bool = False


class _Generation(GenerationFields):
    model: str = Field(max_length=256, description="the task's name")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    timeout: Annotated[Number, Field(gt=0)] | None = Field(
        None, description="extension: seconds until the answer is given up, the service's at most"
    )
    metrics: MetricsLevel = Field(
        "summary",
        description="extension: how much of time and drafts is reported; nothing for n > 1",
    )

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _kind(prompt: Any) -> str | None:
    """Which kind of prompts a value is meant as, by its first one."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else None
    if isinstance(first, str):
        return "texts"
    return "id_lists" if isinstance(first, list) else "ids"


# One fault is enough: a million wrong ids must not become a million errors.
_Some = Field(min_length=1, fail_fast=True)
_TokenIds = Annotated[list[TokenId], _Some]
_Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], _Some, Tag("texts")]
    | Annotated[_TokenIds, Tag("ids")]
    | Annotated[list[_TokenIds], _Some, Tag("id_lists")],
    Discriminator(
        _kind,
        custom_error_type="no_prompt",
        custom_error_message="is a string, a list of token ids, or a list of either",
    ),
]


class CompletionRequest(_Generation):
    """Each prompt is sent to the model as it is, without the task's template."""

    prompt: _Prompts = Field(description="one or several, as text or as token ids")
    logprobs: Top | None = Field(
        None, description="so many of the likeliest tokens of each place, and the chosen one"
    )

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("Sequence[str | list[int]]", [self.prompt] if one else self.prompt)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens"

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs


class ChatMessage(Body):
    role: Literal["user"] = Field(description="tasks have one turn: the row's input")
    content: Content
    name: str | None = None


class ChatRequest(_Generation):
    """The one user message is the row's input and goes into the task's template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Top | None = Field(None, description="needs logprobs")

    @property
    def prompts(self) -> Sequence[str]:
        return [self.messages[0].content]

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# Seconds: the time a batch may take, and how long files may be kept.
WINDOW_S: Final = 24 * 3600
SHORTEST_S: Final = 3600
LONGEST_S: Final = 2_592_000

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
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
