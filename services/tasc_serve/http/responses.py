"""Responses in the OpenAI shape: JSON bodies, and server-sent events of one or several answers.

The ``metrics`` object of a response, which benchmark clients read, has the names and meanings of
vLLM's per-request and acceptance metrics; the draft index is added.
"""

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from tasc_protocol import Acceptance, GenerationResult, Output, Request, TokenText, Whole
from tasc_protocol.output import LEAST_LOGPROB, finite, token_name
from tasc_runtime.protocol import Refusal
from tasc_serve.http.schemas import ChatRequest, CompletionRequest, MetricsLevel
from tasc_serve.http_errors import ApiError, of_refusal
from tasc_serve.routing.choices import Numbered

json_of = msgspec.json.Encoder().encode


def completion_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Columns with one entry for each token. The likeliest tokens include the chosen token."""
    has_top = any(token.top for token in tokens)
    return {
        "tokens": [token_name(token.utf8) for token in tokens],
        "token_logprobs": [None if t.logprob is None else finite(t.logprob) for t in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens] if has_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Rows, one for each token."""
    return {"content": [token.as_json for token in tokens]}


def _likeliest(token: TokenText) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for utf8, logprob in (*token.top, (token.utf8, token.logprob)):
        name = token_name(utf8)  # if two tokens have the same text, the likelier counts
        found[name] = max(finite(logprob), found.get(name, LEAST_LOGPROB))
    return found


def metrics_of(result: GenerationResult, level: MetricsLevel) -> dict[str, Any]:
    """The ``metrics`` of an answer. Times are in milliseconds; None where a divisor would be 0.

    If another replica began the answer, all values describe the rest of the answer.
    """
    times, tokens = result.timings, len(result.tokens) - result.committed
    decoding, inference = times.total - times.first_token, times.total - times.queued
    return {
        "time_to_first_token_ms": _ms(times.first_token - times.queued),
        "generation_time_ms": _ms(decoding),
        "queue_time_ms": _ms(times.queued),
        "mean_itl_ms": _ms(decoding / (tokens - 1)) if tokens > 1 else None,
        "tokens_per_second": round(tokens / inference, 3) if inference > 0 else None,
        "speculative_decoding": _drafting(result.acceptance, level == "detailed"),
        "draft_index_version": result.index_version,
    }


def _drafting(acceptance: Acceptance, detailed: bool) -> dict[str, Any]:
    """Drafting metrics of steps that had a draft; as in vLLM, other steps are left out."""
    pairs = zip(acceptance.drafted, acceptance.accepted, strict=True)
    steps = [pair for pair in pairs if pair[0]]
    drafted, accepted = [step[0] for step in steps], [step[1] for step in steps]
    longest, kept, proposed = max(drafted, default=0), sum(accepted), sum(drafted)
    # The number of steps that kept 0, 1, ... draft tokens.
    histogram = [0] * (longest + 1)
    by_length = {size: [0] * (size + 1) for size in sorted(set(drafted))}
    for size, count in steps:
        histogram[count] += 1
        by_length[size][count] += 1
    summary = {
        "mean_acceptance_length": 1 + kept / max(len(steps), 1),
        "draft_acceptance_rate": kept / max(proposed, 1),
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(n): by_length[n] for n in by_length},
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": kept,
        "num_draft_tokens": proposed,
        "num_spec_tokens": longest,
    }
    ordered = {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return {**summary, **ordered} if detailed else summary


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


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
    """The response format of one endpoint."""

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
    """Formats the answers to one request."""

    shape: Shape
    body: CompletionRequest | ChatRequest
    task: str
    requests: Sequence[Request]
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Whole]) -> dict[str, Any]:
        """The body of a whole response, with one choice for each answer, in order."""
        choices = [
            {
                "index": index,
                **self.shape.content(result.text),
                "logprobs": self._logprobs(texts),
                "finish_reason": result.finish_reason,
            }
            for index, (result, texts) in enumerate(answers)
        ]
        return self._response(self.shape.object, choices, [result for result, _ in answers])

    def chunk(self, index: int, output: Output, first: bool) -> dict[str, Any]:
        """A part of one choice; ``first`` marks its first part."""
        result = output.result
        choice = {
            "index": index,
            **self.shape.chunk(output.text, first),
            "logprobs": self._logprobs(output.token_texts) if output.token_texts else None,
            "finish_reason": result.finish_reason if result else None,
        }
        chunk = self._response(self.shape.chunk_object, [choice])
        if self.body.includes_usage:
            chunk["usage"] = None  # as in OpenAI's API: only the last chunk has usage
        elif result and len(self.requests) == 1 and self.body.metrics != "none":
            chunk["metrics"] = metrics_of(result, self.body.metrics)  # the last chunk
        return chunk

    def _response(
        self,
        kind: str,
        choices: list[dict[str, Any]],
        results: Sequence[GenerationResult] = (),
    ) -> dict[str, Any]:
        """A response or a chunk; ``results`` add their token usage and metrics."""
        response: dict[str, Any] = {
            "id": f"{self.shape.prefix}-{self.requests[0].response_id}",
            "object": kind,
            "created": self.created,
            "model": self.task,
            "choices": choices,
        }
        if results:
            # A prompt counts once, however many answers it has.
            prompts = sum(result.prompt_tokens for result in results[:: self.requests[0].n])
            tokens = sum(len(result.tokens) for result in results)
            response["usage"] = {
                "prompt_tokens": prompts,
                "completion_tokens": tokens,
                "total_tokens": prompts + tokens,
            }
            if self.body.metrics != "none":  # null for several answers, as their times overlap
                alone = len(results) == 1
                response["metrics"] = metrics_of(results[0], self.body.metrics) if alone else None
        return response

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        return None if self.body.logprob_count is None else self.shape.logprobs(tokens)

    async def events(
        self, first: Awaitable[Numbered], rest: AsyncIterator[Numbered]
    ) -> AsyncIterator[str]:
        """Yields one event for each output that has text or ends its choice, and the end mark.

        Log-probabilities of tokens whose text is held back come with the next event of their
        choice.

        Raises:
            ApiError: An answer failed or was refused.
        """
        begun: set[int] = set()
        held: defaultdict[int, tuple[TokenText, ...]] = defaultdict(tuple)
        results: dict[int, GenerationResult] = {}
        numbered: Numbered | None = await first
        while numbered is not None:
            index, output = numbered
            if isinstance(output, Refusal):
                raise of_refusal(output)
            held[index] += output.token_texts
            if output.text or output.result:
                whole = replace(output, token_texts=held.pop(index))
                yield _event(self.chunk(index, whole, first=index not in begun))
                begun.add(index)
            if output.result:
                results[index] = output.result
            numbered = await anext(rest, None)
        if self.body.includes_usage:
            ended = [results[i] for i in sorted(results)]
            yield _event(self._response(self.shape.chunk_object, [], ended))
        yield _DONE

    def failure(self, error: ApiError) -> str:
        """The end of a stream that fails after its status line was sent."""
        return _event(error.body) + _DONE


_DONE = "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json_of(content).decode()}\n\n"
