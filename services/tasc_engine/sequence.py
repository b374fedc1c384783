"""One request while it is being answered. Owned by the engine, mutable, never leaves it."""

import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tasc_engine.request import (
    Acceptance,
    Delta,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Timings,
)
from tasc_text import AnswerText, TaskTokenizer

Int32 = NDArray[np.int32]


@dataclass(eq=False)
class Sequence:
    """State of one row.

    Attributes:
        row: Its row of the batch; -1 while waiting.
        first: The cache place of its first token; -1 while waiting.
        prefilled: Prompt tokens in the cache.
        entered: Those of them that were there already, prefilled for another prompt.
        answer: Tokens emitted so far.
        writer: Incremental text, only for who streams or has stop strings.
    """

    request: GenerationRequest
    prompt: Int32
    writer: AnswerText | None
    arrived: float = field(default_factory=time.monotonic)
    row: int = -1
    first: int = -1
    prefilled: int = 0
    entered: int = 0
    answer: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    admitted: float = 0.0
    first_token: float = 0.0

    @classmethod
    def of(cls, request: GenerationRequest, tokenizer: TaskTokenizer) -> "Sequence":
        wants_text = request.stream or request.stop
        writer = AnswerText(tokenizer, request.stop) if wants_text else None
        return cls(request, np.array(request.prompt, np.int32), writer)

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.answer)

    @property
    def needs(self) -> int:
        """Cache places of its longest answer: the last token of it never enters, nor do drafts
        that reach beyond."""
        return len(self.prompt) + self.request.max_tokens - 1

    @property
    def cached(self) -> int:
        """Tokens in the KV cache: the newest emitted token is not there yet."""
        return self.prefilled + max(len(self.answer) - 1, 0)

    @property
    def prefilling(self) -> bool:
        return self.prefilled < len(self.prompt)

    def next_tokens(self, chunk: int) -> Int32:
        """What goes into the next forward before any draft: prompt tokens or the current one."""
        if self.prefilling:
            return self.prompt[self.prefilled : self.prefilled + chunk]
        return np.array(self.answer[-1:], np.int32)

    def emit(self, tokens: list[int], drafted: int, agreed: int) -> int:
        """Take tokens of one step, up to a stop string; return how many belong to the answer."""
        used = self.writer.push(tokens) if self.writer else len(tokens)
        self.answer.extend(tokens[:used])
        self.drafted.append(drafted)
        self.accepted.append(min(agreed, used))
        self.first_token = self.first_token or time.monotonic()
        return used

    def finish_reason(self, eos_ids: tuple[int, ...]) -> FinishReason | None:
        if (self.writer and self.writer.stopped) or self.answer[-1] in eos_ids:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def delta(self, used: int, reason: FinishReason | None, tokenizer: TaskTokenizer) -> Delta:
        tokens = tuple(self.answer[len(self.answer) - used :])
        if reason is None:
            text = self.writer.take() if self.writer and self.request.stream else ""
            return Delta(self.request.id, tokens, text)
        result = self.result(reason, tokenizer)
        rest = self.writer.finish(result.text) if self.writer else result.text
        return Delta(self.request.id, tokens, rest, result)

    def failed(self, error: str, tokenizer: TaskTokenizer) -> Delta:
        """The last delta of a request that cannot be answered to its end."""
        result = replace(self.result("error", tokenizer), error=error)
        return Delta(self.request.id, (), "", result)

    def result(self, reason: FinishReason, tokenizer: TaskTokenizer) -> GenerationResult:
        now = time.monotonic()
        if self.writer and self.writer.stopped:
            text = self.writer.text
        else:
            text = tokenizer.decode(self.answer)
        return GenerationResult(
            id=self.request.id,
            tokens=tuple(self.answer),
            text=text,
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            timings=Timings(
                queued=(self.admitted or now) - self.arrived,
                first_token=(self.first_token or now) - self.arrived,
                total=now - self.arrived,
            ),
            acceptance=Acceptance(tuple(self.drafted), tuple(self.accepted)),
        )
