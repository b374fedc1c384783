"""One request while it is being answered. Owned by the engine, mutable, never leaves it."""

import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tasc_engine.guided import Guide
from tasc_engine.request import (
    Acceptance,
    Delta,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Timings,
)
from tasc_engine.sampling.parameters import TokenLogprob
from tasc_text import AnswerText, TaskTokenizer

Int32 = NDArray[np.int32]


@dataclass(eq=False)
class Sequence:
    """State of one row.

    Attributes:
        row: Its row of the batch; -1 while waiting.
        first: The cache place of its first token; -1 while waiting.
        cached: Tokens of prompt and answer in the cache.
        entered: Those of the prompt that were there already, prefilled for another.
        answer: Tokens emitted so far. The newest is not in the cache yet, nor are forced ones.
        writer: Incremental text, only for who streams or has stop strings.
        guide: What the answer may be.
        adapter: Number of the target's adapter; 0 for none.
        logprobs: One of each token of the answer, where they are asked for.
    """

    request: GenerationRequest
    prompt: Int32
    writer: AnswerText | None
    guide: Guide | None = None
    adapter: int = 0
    arrived: float = field(default_factory=time.monotonic)
    row: int = -1
    first: int = -1
    cached: int = 0
    entered: int = 0
    answer: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    admitted: float = 0.0
    first_token: float = 0.0

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        tokenizer: TaskTokenizer,
        guide: Guide | None = None,
        adapter: int = 0,
    ) -> "Sequence":
        wants_text = request.stream or request.stop
        writer = AnswerText(tokenizer, request.stop) if wants_text else None
        sequence = cls(request, np.array(request.prompt, np.int32), writer, guide, adapter)
        if request.committed_ids:
            sequence._go_on()
        return sequence

    def _go_on(self) -> None:
        """Be where whoever said the beginning was: its text has been sent, its guide followed."""
        self._take(list(self.request.committed_ids))
        if self.writer:
            self.writer.take()
        if self.guide:
            self.guide.advance(self.committed_ids)

    @property
    def committed_ids(self) -> Int32:
        """Tokens of the answer that another engine gave."""
        return np.array(self.request.committed_ids, np.int32)

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.answer)

    @property
    def needs(self) -> int:
        """Cache places of its longest answer: the last token of it never enters, nor do drafts
        that reach beyond."""
        return len(self.prompt) + self.request.max_tokens - 1

    @property
    def behind(self) -> int:
        """Tokens of prompt and answer that are not in the cache yet."""
        return len(self.prompt) + len(self.answer) - self.cached

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)

    def next_tokens(self, chunk: int) -> Int32:
        """What goes into the next forward before any draft: prompt tokens, or what was emitted."""
        if self.prefilling:
            return self.prompt[self.cached : self.cached + chunk]
        begin = self.cached - len(self.prompt)
        return np.array(self.answer[begin : begin + chunk], np.int32)

    @property
    def stuck(self) -> str:
        """Why there is no next token, where that is the guide's doing."""
        return self.guide.error if self.guide else ""

    def emit(
        self, tokens: list[int], drafted: int, agreed: int, logprobs: list[TokenLogprob]
    ) -> int:
        """Take tokens of one step, up to a stop string; return how many belong to the answer."""
        used = self._take(tokens)
        self.cached += used - 1
        self.drafted.append(drafted)
        self.accepted.append(min(agreed, used))
        self.logprobs += logprobs[:used]
        self.first_token = self.first_token or time.monotonic()
        return used

    def follow_guide(self, new: int) -> int:
        """Tell the guide of the newest tokens, and take those it forces; return how many."""
        if self.guide is None or (self.writer and self.writer.stopped):
            return 0
        self.guide.advance(np.array(self.answer[-new:], np.int32))
        if self.request.logprobs is not None:  # each token needs a forward that says how likely
            return 0
        stretch = self.guide.forced(self.remaining)
        used = self._take(stretch.tolist())
        self.guide.advance(stretch[:used])
        return used

    def _take(self, tokens: list[int]) -> int:
        used = self.writer.push(tokens) if self.writer else len(tokens)
        self.answer.extend(tokens[:used])
        return used

    def finish_reason(self, eos_ids: tuple[int, ...]) -> FinishReason | None:
        if self.writer and self.writer.stopped:
            return "stop"
        if self.answer[-1] in eos_ids and not self.request.ignore_eos:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def delta(self, used: int, reason: FinishReason | None, tokenizer: TaskTokenizer) -> Delta:
        """What the step's ``used`` tokens add, and the result where they end the answer."""
        new = slice(len(self.answer) - used, None)
        tokens, logprobs = tuple(self.answer[new]), tuple(self.logprobs[-used:])
        if reason is None:
            text = self.writer.take() if self.writer and self.request.stream else ""
            return Delta(self.request.id, tokens, text, logprobs=logprobs)
        result = self.result(reason, tokenizer)
        rest = self.writer.finish(result.text) if self.writer else result.text
        return Delta(self.request.id, tokens, rest, result, logprobs)

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
            logprobs=tuple(self.logprobs),
            committed=len(self.request.committed_ids),
        )
