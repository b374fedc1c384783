"""Request bodies in the OpenAI shape. `responses` has the response bodies.

Unsupported fields that would change the answer are refused, and so are unknown fields. A null value
means the field's default.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag

from tasc_protocol import FieldError, Request
from tasc_runtime.sampling_options import (
    Body,
    ChatFields,
    GenerationFields,
    Number,
    RuleFields,
    TokenId,
    Top,
)
from tasc_text import Conversation

MetricsLevel = Literal["none", "summary", "detailed"]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="not used: nothing is added to events")
    continuous_usage_stats: bool = Field(False, description="not used: the last event has usage")


Label = Annotated[str, StringConstraints(max_length=256)]
_Object = Annotated[dict[str, Any], Field(max_length=16)]


class HarmlessFields(Body):
    """Fields that clients send and that do not change answers: accepted, but not used."""

    user: Label | None = None
    store: bool | None = None
    metadata: _Object | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: _Object | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    verbosity: Label | None = None
    prediction: _Object | None = None
    access_programs: _Object | None = None
    priority: int | None = None
    request_id: Label | None = None
    guided_decoding_backend: Label | None = None


# Fields of OpenAI's API, then of vLLM's, with the values that have no effect.
UNSUPPORTED_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),  # prompts share a cache
    "early_stopping": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}


class RequestFields(HarmlessFields, RuleFields):
    model: str = Field(max_length=256, description="the task's name")
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: Annotated[Number, Field(gt=0)] | None = Field(
        None, description="extension: maximum seconds for the answer, up to the service's limit"
    )
    metrics: MetricsLevel = Field(
        "summary",
        description="extension: detail of the reported times and drafts; null for several answers",
    )

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class _Generation(RequestFields, GenerationFields):
    best_of: Annotated[int, Field(ge=1)] | None = Field(None, description="at most n")

    def request(self, logprobs: int | None, seed: int | None = None) -> Request:
        if self.best_of is not None and self.best_of > (self.n or 1):
            message = f"best_of is {self.best_of} and n is {self.n or 1}"
            way_out = "best_of may not be greater: set both to the same number"
            raise FieldError("best_of", f"{message}; {way_out}")
        return super().request(logprobs, seed)


def _kind(prompt: Any) -> str | None:
    """The kind of the prompts in a value, judged by the first element."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else None
    if isinstance(first, str):
        return "texts"
    return "id_lists" if isinstance(first, list) else "ids"


# One error is enough: a million wrong ids must not give a million errors.
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
    """Each prompt is sent to the model unchanged, without the task's template."""

    unsupported: ClassVar = UNSUPPORTED_FIELDS

    prompt: _Prompts = Field(description="one or several, as text or as token ids")
    max_tokens: int | None = Field(
        None, ge=0, description="unset: the task's own; 0 (no answer) only with echo"
    )
    echo: bool = Field(
        False, description="return the prompt before the answer; logprobs then include its tokens"
    )
    logprobs: Top | None = Field(
        None, description="number of likeliest tokens per position, besides the chosen one"
    )

    def request(self, logprobs: int | None, seed: int | None = None) -> Request:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "max_tokens is 0 without echo; send 1 or more, or echo")
        return super().request(logprobs, seed)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("Sequence[str | list[int]]", [self.prompt] if one else self.prompt)

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens"

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs


class ChatRequest(ChatFields, _Generation):
    """Messages for the task's template; a format string uses only the last user message."""

    unsupported: ClassVar = {**UNSUPPORTED_FIELDS, "echo": (False,)}

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Top | None = Field(None, description="needs logprobs")

    def request(self, logprobs: int | None, seed: int | None = None) -> Request:
        if self.top_logprobs is not None and not self.logprobs:
            message = "top_logprobs comes without logprobs; set logprobs to true"
            raise FieldError("top_logprobs", message)
        if self.max_completion_tokens is not None and self.max_tokens not in (
            None,
            self.max_completion_tokens,
        ):
            message = "max_tokens and max_completion_tokens are one limit; send one of them"
            raise FieldError("max_completion_tokens", message)
        return super().request(logprobs, seed)

    @property
    def prompts(self) -> Sequence[str | Conversation]:
        return [self.conversation]

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


# In seconds: the maximum time of a batch, and the minimum and maximum lifetime of files.
WINDOW_S: Final = 24 * 3600
SHORTEST_S: Final = 3600
LONGEST_S: Final = 2_592_000

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/classify"]
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
    """One line of a batch's file. The worker reads ``body`` like the body of a single request."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """Describes the body of an endpoint for the OpenAPI document."""
    schema = {"schema": model.model_json_schema()}
    return {"requestBody": {"content": {"application/json": schema}, "required": True}}
