"""Request bodies in the OpenAI shape. Responses are in `responses`.

Unknown fields are refused, never dropped; null means a field's default.
"""

import difflib
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tasc_engine.request import MOST_LOGPROBS
from tasc_engine.sampling.parameters import MOST_BIASES
from tasc_serve.errors import SHOWN, UNKNOWN

_MOST_PARTS = 1024
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Body(BaseModel):
    """A JSON object whose fields are all known and of the very type they say."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        """Stops at the first unknown field, of a million; null leaves a field to its default."""
        if not isinstance(body, dict):
            return body
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        for name in body:
            if name not in fields:
                near = difflib.get_close_matches(name[:SHOWN], fields, 1)
                context = {"field": name, "nearest": near[0] if near else ""}
                raise PydanticCustomError(UNKNOWN, "unknown field", context)
        return {k: v for k, v in body.items() if v is not None or fields[k].is_required()}


def _whole(text: str) -> str:
    if _REPLACEMENT in text:
        raise PydanticCustomError(
            "cut_text",
            "has a replacement character (U+FFFD), which no answer contains: it was cut inside a "
            "character; cut it between two",
        )
    return text


def _few(biases: Any) -> Any:
    """Counted before they are looked at: a million wrong ones must not become a million errors."""
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise PydanticCustomError(
            "too_many",
            "has {found} tokens; at most {most}",
            {"found": len(biases), "most": MOST_BIASES},
        )
    return biases


StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIdText = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Biases = Annotated[dict[_TokenIdText, _Bias], BeforeValidator(_few)]
Number = Annotated[float, Field(allow_inf_nan=False)]


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


class TextFormat(Body):
    """Whatever the task says."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    name: str = Field(max_length=256)
    schema_: dict[str, Any] = Field(alias="schema", description="what the answer always fits")
    strict: bool | None = Field(None, description="the schema is kept to either way")
    description: str | None = None


class JsonSchemaFormat(Body):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


MetricsLevel = Literal["none", "summary", "detailed"]
Top = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
_DEFAULT = "unset: the task's own, else {0}"


class StreamOptions(Body):
    include_usage: bool = False


class _Generation(Body):
    model: str = Field(max_length=256, description="the task's name")
    max_tokens: int | None = Field(None, ge=1, description="unset: the task's own")
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = Field(
        None,
        description=_DEFAULT.format("0: most tasks are classifications")
        + "; 0 takes the likeliest token, the first of equal ones",
    )
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        None, description=_DEFAULT.format("1")
    )
    n: Annotated[int, Field(ge=1)] | None = Field(
        None, description="answers to the prompt; with temperature 0 they are equal"
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None, description="same seed, same answers; unset: a drawn one"
    )
    logit_bias: Biases | None = Field(None, description="token ids and what their logits get")
    presence_penalty: Penalty | None = Field(None, description=_DEFAULT.format("0"))
    frequency_penalty: Penalty | None = Field(None, description=_DEFAULT.format("0"))
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, max_length=256)
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description=f"extension; 0 or -1: all tokens; {_DEFAULT.format('0')}"
    )
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(
        None, description=f"extension; {_DEFAULT.format('0')}"
    )
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = Field(
        None, description=f"extension; {_DEFAULT.format('1')}"
    )
    ignore_eos: bool = Field(False, description="extension: go on behind an end of sequence")
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="extension: the answer is one of these"
    )
    guided_regex: str | None = Field(None, description="extension: the whole answer matches it")
    guided_json: dict[str, Any] | None = Field(
        None, description="extension: a JSON schema that the answer fits"
    )
    guided_grammar: str | None = Field(None, description="extension: a grammar in Lark's syntax")
    adapter: str | None = Field(
        None,
        max_length=64,
        description="extension: which of the task's adapters answers; unset: its first",
    )
    timeout: Annotated[Number, Field(gt=0)] | None = Field(
        None, description="extension: seconds until the answer is given up, the service's at most"
    )
    draft: bool = Field(True, description="extension: whether to draft; the answer is the same")
    metrics: MetricsLevel = Field(
        "summary",
        description="extension: how much of time and drafts is reported; nothing for n > 1",
    )

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Generation):
    """``prompt`` is sent to the model as it is, without the task's template."""

    # One fault is enough: a million wrong ids must not become a million errors.
    prompt: str | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    logprobs: Top | None = Field(
        None, description="so many of the likeliest tokens of each place, and the chosen one"
    )

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
