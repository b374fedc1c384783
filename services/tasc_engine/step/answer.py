"""Builds the answer of one request: its tokens, text and log-probabilities, and its outputs."""

import time

from msgspec.structs import replace

from tasc_protocol import (
    Acceptance,
    FinishReason,
    GenerationResult,
    Output,
    Request,
    Timings,
    TokenLogprob,
)
from tasc_text import IncrementalDetokenizer, TaskTokenizer


class AnswerBuilder:
    """The answer of one request while it grows.

    Attributes:
        tokens: Tokens of the answer so far, including tokens that another engine has committed.
        logprobs: Log-probabilities of the prompt's tokens, then of the answer's, if requested.
        num_sent: Number of tokens that outputs have included, or that another engine has committed.
        num_sent_logprobs: Number of log-probabilities that outputs have included.
        admitted, first_token: Times of these events; 0 until then.
    """

    def __init__(self, request: Request, tokenizer: TaskTokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._max_tokens = request.answer_limit
        stops = request.stop, request.include_stop_str_in_output, request.min_tokens
        # Incremental text is only needed to stream, and to find stop strings.
        needs_text = request.stream or request.stop
        self._writer = IncrementalDetokenizer(tokenizer, *stops) if needs_text else None
        self._num_written = 0  # tokens that the writer has; without stop strings, `output` writes
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._arrived = time.monotonic()
        self.admitted = self.first_token = 0.0
        self.logprobs: list[TokenLogprob] = []
        self.num_sent_logprobs = 0
        self.tokens: list[int] = []
        if request.committed_ids:  # another engine began the answer and sent its text
            self.append(list(request.committed_ids))
            self._write()
            if self._writer:
                self._writer.take()
        self.num_sent = len(self.tokens)

    @property
    def remaining(self) -> int:
        return self._max_tokens - len(self.tokens)

    @property
    def stopped(self) -> bool:
        """Whether the request's own stop string or stop token has ended the answer."""
        ended = self.tokens[-1] in self._request.stop_token_ids
        return ended or (self._writer is not None and self._writer.stopped)

    def append(self, tokens: list[int]) -> int:
        """Appends tokens up to a stop; returns the number of tokens that belong to the answer."""
        if ids := self._request.stop_token_ids:
            tokens = tokens[: next((n for n, id_ in enumerate(tokens, 1) if id_ in ids), None)]
        used = len(tokens)
        if self._writer and self._request.stop:
            used = self._writer.push(tokens)
            self._num_written += used
        self.tokens.extend(tokens[:used])
        return used

    def emit(self, tokens: list[int], logprobs: list[TokenLogprob]) -> int:
        """Appends tokens of one step up to a stop; returns the number of appended tokens."""
        used = self.append(tokens)
        self.logprobs += logprobs[:used]
        self.first_token = self.first_token or time.monotonic()
        return used

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Counts the tokens drafted and accepted in a step, without forced tokens."""
        self._drafted.append(drafted)
        self._accepted.append(accepted)

    def finish_reason(self) -> FinishReason | None:
        if self.stopped:
            return "stop"
        if self.tokens[-1] in self._tokenizer.eos_ids and not self._request.ignore_eos:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def output(self, reason: FinishReason | None) -> Output:
        """Returns the tokens that no output has included yet; with a reason, also the result."""
        self._write()
        tokens = tuple(self.tokens[self.num_sent :])
        logprobs = tuple(self.logprobs[self.num_sent_logprobs :])
        self.num_sent, self.num_sent_logprobs = len(self.tokens), len(self.logprobs)
        if reason is None:
            text = self._writer.take() if self._writer and self._request.stream else ""
            return Output(self._request.id, tokens, text, logprobs=logprobs)
        result = self._result(reason)
        rest = self._writer.finish(result.text) if self._writer else result.text
        return Output(self._request.id, tokens, rest, result, logprobs)

    def _write(self) -> None:
        """Decodes the tokens that `append` has left, to keep decoding out of its step."""
        if self._writer:
            self._writer.push(self.tokens[self._num_written :])
            self._num_written = len(self.tokens)

    def failed(self, error: str) -> Output:
        """Returns the last output of a request that cannot be completed.

        The output has the tokens that no output has included yet, such as tokens that the guide
        forced at the beginning.
        """
        output = self.output("error")
        return replace(output, result=output.result and replace(output.result, error=error))

    def _result(self, reason: FinishReason) -> GenerationResult:
        now = time.monotonic()
        if self._writer and self._writer.stopped:
            text = self._writer.text
        else:  # the end may be an ordinary token, whose text is not part of the answer
            eos_ids = self._tokenizer.eos_ids
            ended = not self._request.ignore_eos and set(self.tokens[-1:]) & {*eos_ids}
            text = self._tokenizer.decode(self.tokens[:-1] if ended else self.tokens)
        return GenerationResult(
            id=self._request.id,
            tokens=tuple(self.tokens),
            text=text,
            finish_reason=reason,
            prompt_tokens=len(self._request.prompt_ids),
            timings=Timings(
                queued=(self.admitted or now) - self._arrived,
                first_token=(self.first_token or now) - self._arrived,
                total=now - self._arrived,
            ),
            acceptance=Acceptance(tuple(self._drafted), tuple(self._accepted)),
            logprobs=tuple(self.logprobs),
            committed=len(self._request.committed_ids),
        )
