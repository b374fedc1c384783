"""The HTTP surface in the OpenAI shape: what is read, what is written.

Unknown fields are refused, never dropped.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from tasc_engine import GenerationResult

Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Only greedy decoding is offered, so only its own values pass; others would be ignored silently.
_GREEDY = "decoding is greedy: only {0} is accepted"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    include_usage: bool = False


class _Generation(_Body):
    model: str = Field(max_length=256, description="the task's name")
    max_tokens: int | None = Field(None, ge=1)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=0)] | None = Field(
        None, description=_GREEDY.format("0")
    )
    top_p: Annotated[float, Field(ge=1, le=1)] | None = Field(None, description=_GREEDY.format("1"))
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(None, description=_GREEDY.format("1"))
    user: str | None = Field(None, max_length=256)
    draft: bool = Field(True, description="extension: whether to draft; the answer is the same")

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Generation):
    """``prompt`` is sent to the model as it is, without the task's template."""

    # One fault is enough: a million wrong ids must not become a million errors.
    prompt: str | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class ChatMessage(_Body):
    role: Literal["user"] = Field(description="tasks have one turn: the row's input")
    content: str
    name: str | None = None


class ChatRequest(_Generation):
    """The one user message is the row's input and goes into the task's template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("send max_tokens or max_completion_tokens, not both")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def usage(result: GenerationResult) -> dict[str, int]:
    answer = len(result.tokens)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": answer,
        "total_tokens": result.prompt_tokens + answer,
    }


def completion_choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def chat_choice(text: str, reason: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


def chat_chunk(text: str, reason: str | None, first: bool) -> dict[str, Any]:
    delta = {"role": "assistant", "content": text} if first else {"content": text}
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def completion_chunk(text: str, reason: str | None, first: bool) -> dict[str, Any]:
    return completion_choice(text, reason)
