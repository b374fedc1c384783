"""State of requests while they are answered, and the plan of a step: the tokens of each row."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, count

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tasc_draft import Drafts
from tasc_draft.labels import LabelTrie
from tasc_engine.guided import Guide, follow
from tasc_engine.layout import Feed
from tasc_engine.sampling.row_parameters import Allowed
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

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(eq=False)
class Sequence:
    """State of one request, owned by the engine.

    Attributes:
        row: Its row in the batch; -1 while waiting.
        first: The cache slot of its first token; -1 while waiting.
        cached: Number of tokens of prompt and answer in the cache.
        sent: Number of tokens of the answer that outputs included, or that another engine gave.
        entered: Number of prompt tokens that were copied from another prompt's prefix.
        answer: Tokens emitted so far. The newest is not in the cache yet, nor are forced ones.
        writer: Incremental text; only for requests that stream or have stop strings.
        guide: Limits of the answer; None if it is not limited.
        adapter: Number of the target's adapter; 0 for none.
        logprobs: One for each token of the prompt, then of the answer, if requested.
        num_sent_logprobs: Number of these that outputs have included.
    """

    request: Request
    prompt: Int32
    writer: IncrementalDetokenizer | None
    guide: Guide | None = None
    adapter: int = 0
    arrived: float = field(default_factory=time.monotonic)
    row: int = -1
    first: int = -1
    cached: int = 0
    entered: int = 0
    sent: int = 0
    answer: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_sent_logprobs: int = 0
    admitted: float = 0.0
    first_token: float = 0.0

    @classmethod
    def of(
        cls,
        request: Request,
        tokenizer: TaskTokenizer,
        guide: Guide | None = None,
        adapter: int = 0,
    ) -> "Sequence":
        wants_text = request.stream or request.stop
        stops = request.stop, request.include_stop_str_in_output, request.min_tokens
        writer = IncrementalDetokenizer(tokenizer, *stops) if wants_text else None
        sequence = cls(request, np.array(request.prompt_ids, np.int32), writer, guide, adapter)
        if request.committed_ids:
            sequence._go_on()
        sequence._begin_forced(tokenizer.eos_ids)
        return sequence

    def _go_on(self) -> None:
        """Continues an answer that another engine began; that part's text has been sent."""
        self._take(list(self.request.committed_ids))
        self.sent = len(self.answer)
        if self.writer:
            self.writer.take()
        if self.guide:
            self._advance_guide(self.guide, np.array(self.answer, np.int32))

    def _begin_forced(self, eos_ids: tuple[int, ...]) -> None:
        """Takes the tokens that the guide forces first; they enter the cache with the prompt.

        A token that ends the answer is left to the first step. So are all tokens if stop strings or
        stop tokens might end the answer.
        """
        request = self.request
        if self.guide is None or not self.forces or request.stop or request.stop_token_ids:
            return
        stretch = self.guide.forced(self.remaining - 1)
        if len(stretch) and stretch[-1] in eos_ids:
            stretch = stretch[:-1]
        self._take(stretch.tolist())
        self.guide.advance(stretch)

    @property
    def forces(self) -> bool:
        """Whether forced tokens need no forward; log-probabilities need one for each token."""
        return self.guide is not None and self.request.logprobs is None

    @property
    def labels(self) -> LabelTrie | None:
        """The labels that drafts are limited to, if their forced tokens need no forward."""
        return self.guide.labels if self.guide is not None and self.forces else None

    @property
    def drafts(self) -> bool:
        """Whether drafts are allowed and may save a forward."""
        guide = self.guide if self.forces else None
        return self.request.draft and (guide is None or guide.draftable)

    @property
    def answer_ids(self) -> Int32:
        """``int32[n]``, the tokens of the answer so far."""
        return np.array(self.answer, np.int32)

    @property
    def remaining(self) -> int:
        return self.request.answer_limit - len(self.answer)

    @property
    def needs(self) -> int:
        """Cache slots of its longest answer; its last token and drafts beyond never enter."""
        return len(self.prompt) + self.request.answer_limit - 1

    @property
    def behind(self) -> int:
        """Number of tokens of prompt and answer that are not in the cache yet."""
        return len(self.prompt) + len(self.answer) - self.cached

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)

    @property
    def scores(self) -> bool:
        """Whether its next tokens are of a prompt with requested log-probabilities."""
        return self.request.wants_prompt_logprobs and self.prefilling

    def next_tokens(self, chunk: int) -> Int32:
        """The next forward's tokens before any draft: prompt tokens, then emitted ones."""
        begin = self.cached - len(self.prompt)
        if begin >= 0:
            return np.array(self.answer[begin : begin + chunk], np.int32)
        tokens = self.prompt[self.cached : self.cached + chunk]
        if self.answer and len(tokens) < chunk and not self.scores:
            known = np.array(self.answer[: chunk - len(tokens)], np.int32)
            tokens = np.concatenate((tokens, known))
        return tokens

    @property
    def stuck(self) -> str:
        """The reason why there is no next token, if the guide is the cause."""
        return self.guide.error if self.guide else ""

    def emit(self, tokens: list[int], logprobs: list[TokenLogprob]) -> int:
        """Appends tokens of one step up to a stop; returns how many belong to the answer."""
        used = self._take(tokens)
        self.cached += used - 1
        self.logprobs += logprobs[:used]
        self.first_token = self.first_token or time.monotonic()
        return used

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Counts the tokens drafted and accepted in a step, without forced ones."""
        self.drafted.append(drafted)
        self.accepted.append(accepted)

    def follow_guide(self, new: int) -> None:
        """Advances the guide by the newest tokens, and appends the tokens that it forces."""
        guide = self.guide
        if guide is None or self.stopped:
            return
        self._advance_guide(guide, np.array(self.answer[-new:], np.int32))
        if not self.forces:
            return
        stretch = guide.forced(self.remaining)
        used = self._take(stretch.tolist())
        guide.advance(stretch[:used])

    def _advance_guide(self, guide: Guide, new: Int32) -> None:
        guide.advance(new)
        if self.request.guide is None and len(self.answer) >= self.request.min_tokens:
            self.guide = None  # only `min_tokens` needed it, and it slows the batch

    @property
    def stopped(self) -> bool:
        """Whether the request's own stop string or stop token has ended the answer."""
        ended = self.answer[-1] in self.request.stop_token_ids
        return ended or (self.writer is not None and self.writer.stopped)

    def _take(self, tokens: list[int]) -> int:
        if ids := self.request.stop_token_ids:
            tokens = tokens[: next((n for n, id_ in enumerate(tokens, 1) if id_ in ids), None)]
        used = self.writer.push(tokens) if self.writer else len(tokens)
        self.answer.extend(tokens[:used])
        return used

    def finish_reason(self, eos_ids: tuple[int, ...]) -> FinishReason | None:
        if self.stopped:
            return "stop"
        if self.answer[-1] in eos_ids and not self.request.ignore_eos:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def output(self, reason: FinishReason | None, tokenizer: TaskTokenizer) -> Output:
        """The tokens that no output has included yet, and the result if they end the answer."""
        tokens = tuple(self.answer[self.sent :])
        logprobs = tuple(self.logprobs[self.num_sent_logprobs :])
        self.sent, self.num_sent_logprobs = len(self.answer), len(self.logprobs)
        if reason is None:
            text = self.writer.take() if self.writer and self.request.stream else ""
            return Output(self.request.id, tokens, text, logprobs=logprobs)
        result = self.result(reason, tokenizer)
        rest = self.writer.finish(result.text) if self.writer else result.text
        return Output(self.request.id, tokens, rest, result, logprobs)

    def failed(self, error: str, tokenizer: TaskTokenizer) -> Output:
        """The last output of a request that cannot be completed.

        Its tokens are those that no output included yet, such as forced ones of the beginning.
        """
        output = self.output("error", tokenizer)
        return replace(output, result=output.result and replace(output.result, error=error))

    def result(self, reason: FinishReason, tokenizer: TaskTokenizer) -> GenerationResult:
        now = time.monotonic()
        if self.writer and self.writer.stopped:
            text = self.writer.text
        else:  # an end may be an ordinary token, but its text is not part of the answer
            ended = not self.request.ignore_eos and set(self.answer[-1:]) & {*tokenizer.eos_ids}
            text = tokenizer.decode(self.answer[:-1] if ended else self.answer)
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


@dataclass(frozen=True)
class Plan:
    """A step before drafts are made; n rows take part, and m of them may emit tokens.

    Attributes:
        sequences: Sequences that take part, by row.
        emitting: Those of them that may emit, because prompt and answer are, or will be, cached.
        rows: ``int32[n]``, their rows in the batch.
        firsts, starts, offsets, tokens, draft_of: See `Feed`.
        prompt_tokens: Number of prompt tokens that enter the cache by this step's forward.
        shared_tokens: Number of prompt tokens that were copied for rows that begin in this step.
        adapters: ``int32[n]``, the number of each row's adapter, 0 for none.
        admitted: Sequences that got their row for this step.
        scored: ``int32[n]``, number of each row's tokens, from the first on, whose logits give the
            probability of the prompt's next token; None if no row has such tokens.
    """

    sequences: list[Sequence]
    emitting: list[Sequence]
    rows: Int32
    firsts: Int64
    starts: Int32
    offsets: Int32
    tokens: Int32
    draft_of: Int32
    prompt_tokens: int
    shared_tokens: int
    adapters: Int32
    admitted: list[Sequence]
    scored: Int32 | None = None

    @classmethod
    def of(
        cls,
        sequences: list[Sequence],
        chunk: int,
        admitted: list[Sequence] | None = None,
        most_scored: int = 1,
    ) -> "Plan":
        """Plans each row's next tokens, at most ``chunk``.

        Args:
            most_scored: Maximum number of scored tokens of all prompts; at least one of each is
                scored.
        """
        scoring = sum(s.scores for s in sequences)
        fewer = min(chunk, max(most_scored // scoring, 1)) if scoring else chunk
        tokens = [s.next_tokens(fewer if s.scores else chunk) for s in sequences]
        sizes = [len(t) for t in tokens]
        scored = (
            min(n, len(s.prompt) - 1 - s.cached) if s.scores else 0
            for s, n in zip(sequences, sizes, strict=True)
        )
        emits = [n >= s.behind for s, n in zip(sequences, sizes, strict=True)]
        places = count()
        return cls(
            sequences=sequences,
            emitting=[s for s, may in zip(sequences, emits, strict=True) if may],
            rows=_ints(s.row for s in sequences),
            firsts=np.array([s.first for s in sequences], np.int64),
            starts=_ints(s.cached for s in sequences),
            offsets=_ints(accumulate(sizes, initial=0)),
            tokens=np.concatenate(tokens) if tokens else _ints(()),
            draft_of=_ints(next(places) if may else -1 for may in emits),
            prompt_tokens=sum(
                min(n, len(s.prompt) - s.cached)
                for s, n in zip(sequences, sizes, strict=True)
                if s.prefilling
            ),
            shared_tokens=sum(s.entered for s in sequences if s.cached == s.entered),
            adapters=_ints(s.adapter for s in sequences),
            admitted=admitted or [],
            scored=_ints(scored) if scoring else None,
        )

    @property
    def emitting_rows(self) -> Int32:
        return self.rows[self.draft_of >= 0]

    @property
    def sizes(self) -> Int32:
        """``int32[n]``, the number of tokens of each row; faster than `numpy.diff`."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def reads(self) -> bool:
        """Whether the step reads tokens of a prompt, or of an answer that another engine began."""
        return self.prompt_tokens > 0 or len(self.emitting) < len(self.sequences)

    @property
    def context(self) -> float:
        """Mean number of cached tokens over the rows."""
        return sum(self.starts.tolist()) / len(self.starts)

    @property
    def behind(self) -> Int32:
        """``int32[m]``, the first slot after the current token of each row that may emit."""
        ends: Int32 = self.starts + self.sizes
        return ends[self.draft_of >= 0]

    def room(self) -> Int32:
        """``int32[m]``, the maximum number of tokens that each row may still emit."""
        return _ints(s.remaining for s in self.emitting)

    def ends(self) -> NDArray[np.bool_]:
        """``bool[m]``, whether an end of sequence ends each row's answer."""
        return np.array([not s.request.ignore_eos for s in self.emitting], bool)

    def budget(self, most: int) -> Int32:
        """``int32[m]``, maximum draft tokens of each row, with room for the bonus token."""
        asked = (s.remaining - 1 if s.drafts else 0 for s in self.emitting)
        return np.minimum(_ints(asked), most).astype(np.int32)

    def guided(self, drafts: Drafts, price: float) -> tuple[Drafts, Allowed | None]:
        """Removes draft tokens that guides forbid or force; returns drafts and allowed tokens.

        Args:
            price: See `follow`.
        """
        guides = [s.guide for s in self.emitting]
        if not any(guides):
            return drafts, None
        found = follow(guides, drafts, [s.forces for s in self.emitting], price)
        return found.drafts, found.allowed

    def feed(self, drafts: Drafts, moves: Int64, known: NDArray[np.bool_] | None = None) -> Feed:
        return Feed(
            firsts=self.firsts,
            starts=self.starts,
            tokens=self.tokens,
            offsets=self.offsets,
            draft_of=self.draft_of,
            drafts=drafts,
            moves=moves,
            adapters=self.adapters,
            scored=self.scored,
            known=known,
        )


def _ints(values: Iterable[int]) -> Int32:
    return np.fromiter(values, np.int32)
