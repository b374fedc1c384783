"""Response bodies in the OpenAI shape: what both endpoints write, whole or in chunks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasc_engine import GenerationResult
from tasc_serve.calls import Answer, Call, Piece, TokenText
from tasc_serve.logprobs import chat_logprobs, completion_logprobs
from tasc_serve.request_metrics import metrics_of
from tasc_serve.schemas import ChatRequest, CompletionRequest, MetricsLevel


def usage(results: Sequence[GenerationResult]) -> dict[str, int]:
    """Of all answers to one prompt, which counts once."""
    prompt = max((r.prompt_tokens for r in results), default=0)
    answers = sum(len(r.tokens) for r in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
    }


def _whole_text(text: str) -> dict[str, Any]:
    return {"text": text}


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


def _text(text: str, first: bool) -> dict[str, Any]:
    return _whole_text(text)


def _delta(text: str, first: bool) -> dict[str, Any]:
    return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}


@dataclass(frozen=True)
class Shape:
    """How one endpoint writes its answers."""

    prefix: str
    object: str
    chunk_object: str
    content: Callable[[str], dict[str, Any]]
    chunk: Callable[[str, bool], dict[str, Any]]
    logprobs: Callable[[Sequence[TokenText]], dict[str, Any]]


COMPLETION = Shape(
    "cmpl", "text_completion", "text_completion", _whole_text, _text, completion_logprobs
)
CHAT = Shape(
    "chatcmpl", "chat.completion", "chat.completion.chunk", _message, _delta, chat_logprobs
)


@dataclass(frozen=True)
class Reply:
    """How one request is to be answered."""

    shape: Shape
    task: str
    id: str
    n: int
    logprobs: bool
    wants_usage: bool
    metrics: MetricsLevel
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def to(
        cls, body: CompletionRequest | ChatRequest, shape: Shape, task: str, call: Call
    ) -> "Reply":
        told = call.asked.logprobs is not None
        return cls(shape, task, call.id, call.n, told, body.wants_usage, body.metrics)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body that answers at once: one choice for each answer, in their order."""
        results = [answer.result for answer in answers]
        choices = [
            self._choice(i, self.shape.content(a.result.text), a.result, self._logprobs(a.tokens))
            for i, a in enumerate(answers)
        ]
        body = self._body(self.shape.object, choices)
        return {**body, "usage": usage(results), **self.told(results)}

    def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        """A part of one choice; ``first`` of its parts or not."""
        content = self.shape.chunk(piece.text, first)
        logprobs = self._logprobs(piece.tokens) if piece.tokens else None
        choice = self._choice(index, content, piece.result, logprobs)
        body = self._body(self.shape.chunk_object, [choice])
        if piece.result and self.n == 1 and not self.wants_usage:
            body |= self.told([piece.result])  # no later chunk will say it
        if self.wants_usage:
            body["usage"] = None  # as OpenAI has it: the last chunk says it
        return body

    def last(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The chunk behind all choices, for who wants usage."""
        body = self._body(self.shape.chunk_object, [])
        return {**body, "usage": usage(results), **self.told(results)}

    def told(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The metrics, if they are wanted: null for several answers, whose times overlap."""
        if self.metrics == "none":
            return {}
        alone = metrics_of(results[0], self.metrics == "detailed") if len(results) == 1 else None
        return {"metrics": alone}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        return self.shape.logprobs(tokens) if self.logprobs else None

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        result: GenerationResult | None,
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        reason = result.finish_reason if result else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.shape.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.task,
            "choices": choices,
        }
