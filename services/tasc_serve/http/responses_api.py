"""``POST /v1/responses``: OpenAI's newer format of conversations, answered like chats.

Nothing is stored: a request contains its whole conversation, and the answer is one text message.
"""

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from tasc_protocol import GenerationResult, Request, TokenText, Whole
from tasc_runtime.protocol import Refusal
from tasc_runtime.sampling_options import (
    MOST_MESSAGES,
    UNSUPPORTED,
    AnyFormat,
    Body,
    ChatMessage,
    JsonObjectFormat,
    JsonSchema,
    TemplateFields,
    TextFormat,
    Top,
)
from tasc_serve.http.responses import chat_logprobs, json_of, metrics_of
from tasc_serve.http.schemas import UNSUPPORTED_FIELDS, Label, RequestFields, StreamOptions
from tasc_serve.http_errors import ApiError, of_refusal
from tasc_serve.routing.choices import Numbered
from tasc_text import Conversation

_LOGPROBS: Final = "message.output_text.logprobs"
_Included = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class _InputMessage(ChatMessage):
    type: Literal["message"] = "message"
    id: Label | None = Field(None, description="not used")
    status: Label | None = Field(None, description="not used")
    phase: Label | None = Field(None, description="not used")

    @model_validator(mode="before")
    @classmethod
    def _is_message(cls, item: Any) -> Any:
        """Checks the type before the fields, as items of other types have unknown fields."""
        if isinstance(item, dict) and item.get("type", "message") != "message":
            raise PydanticCustomError(
                UNSUPPORTED, "is not supported", {"field": "type", "neutral": ("message",)}
            )
        return item


class _SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class _Text(Body):
    format: Annotated[
        TextFormat | JsonObjectFormat | _SchemaFormat, Field(discriminator="type")
    ] = TextFormat(type="text")
    verbosity: Label | None = Field(None, description="not used")


def _messages(sent: Any) -> Any:
    if not isinstance(sent, str | list):
        raise PydanticCustomError("no_input", "is a string or a list of messages")
    return [{"role": "user", "content": sent}] if isinstance(sent, str) else sent


class ResponsesRequest(TemplateFields, RequestFields):
    """Instructions and input, which form one conversation."""

    unsupported: ClassVar = {
        **UNSUPPORTED_FIELDS,
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tokens": (),  # else the message for an unknown field would propose min_tokens
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled",),
    }
    format_field: ClassVar = "text.format"
    n: ClassVar = None
    limit_field: ClassVar = "max_output_tokens"

    input: Annotated[
        list[_InputMessage],
        Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
        BeforeValidator(_messages, json_schema_input_type=str | list[_InputMessage]),
    ]
    instructions: str | None = Field(None, description="a system message in front of the input")
    stream_options: StreamOptions | None = Field(None, description="not used")
    max_output_tokens: int | None = Field(None, ge=1, description="unset: the task's own")
    text: _Text = Field(_Text(), description="its format is text, json_object or json_schema")
    include: Annotated[list[_Included], Field(max_length=16)] = Field(
        [], description=f"{_LOGPROBS}; others are not used"
    )
    top_logprobs: Top | None = None

    @property
    def format(self) -> AnyFormat | None:
        return self.text.format if "format" in self.text.model_fields_set else None

    @property
    def prompts(self) -> Sequence[str | Conversation]:
        if not self.instructions:
            return [self.conversation_of(self.input)]
        instructions = ChatMessage(role="system", content=self.instructions)
        return [self.conversation_of([instructions, *self.input])]

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def logprob_count(self) -> int | None:
        return self.top_logprobs or (0 if _LOGPROBS in self.include else None)


def in_its_words(error: ApiError) -> ApiError:
    """Converts an error about ``messages`` to one about ``input``, as this endpoint names them."""
    place = error.param or ""
    if place.partition(".")[0] != "messages":
        return error
    message = error.message.replace(place, "input", 1)
    return ApiError(error.status, message, "input", error.code, error.headers)


@dataclass(frozen=True)
class ResponsesReply:
    """Formats the answer to one request."""

    body: ResponsesRequest
    task: str
    requests: Sequence[Request]
    created: int = field(default_factory=lambda: int(time.time()))
    _numbers: Iterator[int] = field(default_factory=itertools.count)  # numbers of the events

    def whole(self, answers: Sequence[Whole]) -> dict[str, Any]:
        ((result, texts),) = answers
        return self._response(result, [self._message(result, [self._part(result.text, texts)])])

    async def events(
        self, first: Awaitable[Numbered], rest: AsyncIterator[Numbered]
    ) -> AsyncIterator[str]:
        """Yields the events of OpenAI's API, with a delta for each output that has text.

        Raises:
            ApiError: The answer failed or was refused.
        """
        event = self._event
        item: dict[str, Any] = {"output_index": 0}
        place = {**item, "item_id": self._message()["id"], "content_index": 0}
        begun = self._response()
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        yield event("response.output_item.added", **item, item=self._message())
        yield event("response.content_part.added", **place, part=self._part("", ()))
        texts, tokens, num_sent = list[str](), list[TokenText](), 0
        result: GenerationResult | None = None
        numbered: Numbered | None = await first
        while numbered is not None:
            _, output = numbered
            if isinstance(output, Refusal):
                raise of_refusal(output)
            tokens += output.token_texts
            result = output.result or result
            if output.text:
                logprobs, num_sent = self._logprobs(tokens[num_sent:]), len(tokens)
                delta = {**place, "delta": output.text, "logprobs": logprobs}
                yield event("response.output_text.delta", **delta)
                texts.append(output.text)
            numbered = await anext(rest, None)
        part = self._part("".join(texts), tokens)
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        message = self._message(result, [part])
        yield event("response.output_text.done", **place, **done)
        yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", **item, item=message)
        response = self._response(result, [message])
        yield event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> str:
        """The event that ends a failed stream.

        OpenAI's clients look for a field ``error``, which OpenAI's own event does not have.
        """
        body = in_its_words(error).body
        fields = {name: body["error"][name] for name in ("code", "message", "param")}
        return self._event("error", **fields, **body)

    def _event(self, kind: str, **content: Any) -> str:
        content = {"type": kind, "sequence_number": next(self._numbers), **content}
        return f"event: {kind}\ndata: {json_of(content).decode()}\n\n"

    def _response(
        self, result: GenerationResult | None = None, output: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """The current response; without a result, it is in progress."""
        status, body = _status(result), self.body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {
            "id": f"resp_{self.requests[0].response_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self.task,
            "output": output,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "max_output_tokens": body.max_output_tokens,
            **{name: getattr(body, name) for name in ("temperature", "top_p")},
            "usage": result and _usage(result),
        }
        if result and body.metrics != "none":
            response["metrics"] = metrics_of(result, body.metrics)
        return response

    def _message(
        self, result: GenerationResult | None = None, content: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.requests[0].response_id}",
            "type": "message",
            "role": "assistant",
            "status": _status(result),
            "content": content,
        }

    def _part(self, text: str, tokens: Sequence[TokenText]) -> dict[str, Any]:
        logprobs = self._logprobs(tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
        logprobs: list[dict[str, Any]] = chat_logprobs(tokens)["content"]
        return logprobs


def _status(result: GenerationResult | None) -> str:
    if result is None:
        return "in_progress"
    return "incomplete" if result.finish_reason == "length" else "completed"


def _usage(result: GenerationResult) -> dict[str, Any]:
    prompt, answer = result.prompt_tokens, len(result.tokens)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }
