"""The state of one request while it is answered."""

import time
from dataclasses import InitVar, dataclass, field

import numpy as np
from numpy.typing import NDArray

from tasc_draft.labels import LabelTrie
from tasc_engine.guided import Guide, LabelScorer
from tasc_engine.layout import Int32
from tasc_engine.step.answer import AnswerBuilder
from tasc_protocol import FinishReason, Request, TokenLogprob
from tasc_text import TaskTokenizer


@dataclass(eq=False)
class Sequence:
    """State of one request, owned by the engine.

    Args:
        tokenizer: The tokenizer of the answer.

    Attributes:
        answer: The answer. Its newest token, and forced tokens after it, are not in the cache yet.
        guide: Limits of the answer; None if it is not limited.
        scorer: Scores labels instead of generating an answer; None for an answer.
        max_kv_slots: Cache slots of the longest possible answer, whose last token does not enter
            the cache.
        adapter: Number of the target's adapter; 0 for none.
        row: Row of the request in the batch; -1 while waiting.
        kv_start: Cache slot of the request's first token; -1 while waiting.
        cached: Number of tokens of prompt and answer in the cache.
        num_prefix_cached: Number of prompt tokens that were copied from another prompt's prefix.
    """

    request: Request
    tokenizer: InitVar[TaskTokenizer]
    guide: Guide | None = None
    adapter: int = 0
    scorer: LabelScorer | None = None
    prompt: Int32 = field(init=False)
    answer: AnswerBuilder = field(init=False)
    max_kv_slots: int = field(init=False)
    row: int = field(default=-1, init=False)
    kv_start: int = field(default=-1, init=False)
    cached: int = field(default=0, init=False)
    num_prefix_cached: int = field(default=0, init=False)

    def __post_init__(self, tokenizer: TaskTokenizer) -> None:
        self.prompt = np.array(self.request.prompt_ids, np.int32)
        self.answer = AnswerBuilder(self.request, tokenizer)
        self.max_kv_slots = len(self.prompt) + self.request.answer_limit - 1
        if self.scorer is not None:
            self.max_kv_slots = len(self.prompt) + self.scorer.slots
        if self.guide is not None:
            if self.answer.tokens:
                self._advance_guide(self.guide, self.known_ids)
            self._begin_forced(tokenizer.eos_ids)

    def _begin_forced(self, eos_ids: tuple[int, ...]) -> None:
        """Appends the tokens that the guide forces first; they enter the cache with the prompt.

        A token that ends the answer is left to the first step. If stop strings or stop tokens might
        end the answer, all tokens are left to the first step.
        """
        request = self.request
        if self.guide is None or not self.forces or request.stop or request.stop_token_ids:
            return
        stretch = self.guide.forced(self.answer.remaining - 1)
        if len(stretch) and stretch[-1] in eos_ids:
            stretch = stretch[:-1]
        self.answer.append(stretch.tolist())
        self.guide.advance(stretch)

    @property
    def forces(self) -> bool:
        """Whether forced tokens need no forward; False if each token needs log-probabilities."""
        return self.guide is not None and self.request.logprobs is None

    @property
    def labels(self) -> LabelTrie | None:
        """The labels that drafts are limited to, if their forced tokens need no forward."""
        if self.scorer is not None:
            return self.scorer.labels.guesses
        return self.guide.labels if self.guide is not None and self.forces else None

    @property
    def drafts(self) -> bool:
        """Whether drafts are allowed and may save a forward."""
        if self.scorer is not None:  # it makes its later trees itself, and exact ones in order
            exact = self.request.scoring is not None and self.request.scoring.exact
            return self.request.draft and not exact and not self.scorer.steps
        guide = self.guide if self.forces else None
        return self.request.draft and (guide is None or guide.draftable)

    @property
    def known_ids(self) -> Int32:
        """``int32[n]``, the known tokens after the prompt."""
        return np.array(self.next_known, np.int32)

    @property
    def next_known(self) -> list[int]:
        """The tokens after the prompt, as far as they are known."""
        return self.answer.tokens if self.scorer is None else self.scorer.path.tolist()

    @property
    def num_uncached_tokens(self) -> int:
        """Number of known tokens that are not in the cache yet."""
        return len(self.prompt) + len(self.next_known) - self.cached

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next tokens are prompt tokens with requested log-probabilities."""
        return self.request.echo and self.prefilling and self.request.wants_prompt_logprobs

    def next_tokens(self, chunk: int) -> Int32:
        """The next forward's tokens before any draft: prompt tokens, then answer tokens."""
        answer, begin = self.next_known, self.cached - len(self.prompt)
        if begin >= 0:
            return np.array(answer[begin : begin + chunk], np.int32)
        tokens = self.prompt[self.cached : self.cached + chunk]
        if answer and len(tokens) < chunk and not self.wants_prompt_logprobs:
            known = np.array(answer[: chunk - len(tokens)], np.int32)
            tokens = np.concatenate((tokens, known))
        return tokens

    @property
    def guide_error(self) -> str:
        """The reason why there is no next token, if the guide or the labels are the cause."""
        if self.scorer is not None:
            return self.scorer.error
        return self.guide.error if self.guide else ""

    def emit(self, tokens: list[int], logprobs: list[TokenLogprob]) -> int:
        """Appends tokens of one step up to a stop; returns the number of appended tokens."""
        used = self.answer.emit(tokens, logprobs)
        self.cached += used - 1
        return used

    def read_labels(self, logprobs: NDArray[np.float64]) -> FinishReason | None:
        """Scores labels by one forward; returns a reason if no further forward follows."""
        assert self.scorer is not None
        self.answer.first_token = self.answer.first_token or time.monotonic()
        self.scorer.read(logprobs)
        # The next forward begins with the last token before the first tree.
        labels = self.scorer.labels
        self.cached = len(self.prompt) + int(labels.depth[self.scorer.stem]) - 1
        if self.scorer.error:
            return "error"
        return "stop" if self.scorer.done else None

    def follow_guide(self, new: int) -> None:
        """Advances the guide by the newest tokens, and appends the tokens that it forces."""
        guide, answer = self.guide, self.answer
        if guide is None or answer.stopped:
            return
        self._advance_guide(guide, np.array(answer.tokens[-new:], np.int32))
        if not self.forces:
            return
        stretch = guide.forced(answer.remaining)
        used = answer.append(stretch.tolist())
        guide.advance(stretch[:used])

    def _advance_guide(self, guide: Guide, new: Int32) -> None:
        guide.advance(new)
        if self.request.guide is None and len(self.answer.tokens) >= self.request.min_tokens:
            self.guide = None  # only `min_tokens` needed the guide, which slows the batch
