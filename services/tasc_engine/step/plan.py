"""The plan of a step: the tokens of each row before drafts are made."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts
from tasc_draft.drafts import FORCED
from tasc_engine.guided import follow
from tasc_engine.layout import ForwardBatch, Int32, Int64
from tasc_engine.sampling.accept import EmitLimits
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.step.sequence import Sequence


@dataclass(frozen=True)
class Plan:
    """A step before drafts are made; n rows take part, and m of them may emit tokens.

    Attributes:
        sequences: Sequences that take part, by row.
        emitting: Sequences that may emit, because this step's forward includes the last token of
            their prompt and answer.
        rows: ``int32[n]``, the rows of ``sequences`` in the batch.
        kv_starts, context_lens, query_offsets, tokens, draft_of: See `ForwardBatch`.
        prompt_tokens: Number of prompt tokens that this step's forward writes to the cache.
        shared_tokens: Number of prompt tokens that were copied for rows that begin in this step.
        adapters: ``int32[n]``, the number of each row's adapter, 0 for none.
        admitted: Sequences that got their row for this step.
        scored: ``int32[n]``, number of each row's tokens, from the first on, whose logits give the
            probability of the prompt's next token; None if no row has such tokens.
    """

    sequences: list[Sequence]
    emitting: list[Sequence]
    rows: Int32
    kv_starts: Int64
    context_lens: Int32
    query_offsets: Int32
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
            most_scored: Maximum number of scored tokens of all prompts; each prompt gets at least
                one.
        """
        scoring = sum(s.wants_prompt_logprobs for s in sequences)
        fewer = min(chunk, max(most_scored // scoring, 1)) if scoring else chunk
        emitting, parts, states, scored = list[Sequence](), list[Int32](), [], []
        prompt_tokens = shared_tokens = 0
        for s in sequences:
            scores, cached = bool(scoring) and s.wants_prompt_logprobs, s.cached
            own = s.next_tokens(fewer if scores else chunk)
            n, of_prompt, draft = len(own), len(s.prompt) - cached, -1
            if s.scorer is None or not s.scorer.steps:  # later forwards read a token again
                prompt_tokens += max(min(n, of_prompt), 0)
                shared_tokens += cached if cached == s.num_prefix_cached else 0
            if n == of_prompt + len(s.next_known):
                draft = len(emitting)
                emitting.append(s)
            parts.append(own)
            states.append((s.row, s.kv_start, cached, n, draft, s.adapter))
            scored.append(min(n, of_prompt - 1) if scores else 0)
        columns = np.ascontiguousarray(np.array(states, np.int32).reshape(-1, 6).T)
        rows, kv_starts, context_lens, sizes, draft_of, adapters = columns
        query_offsets = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(sizes, out=query_offsets[1:])
        return cls(
            sequences=sequences,
            emitting=emitting,
            rows=rows,
            kv_starts=kv_starts.astype(np.int64),
            context_lens=context_lens,
            query_offsets=query_offsets,
            tokens=np.concatenate(parts) if parts else _ints(()),
            draft_of=draft_of,
            prompt_tokens=prompt_tokens,
            shared_tokens=shared_tokens,
            adapters=adapters,
            admitted=admitted or [],
            scored=_ints(scored) if scoring else None,
        )

    @cached_property
    def emitting_rows(self) -> Int32:
        return self.rows[self.draft_of >= 0]

    @cached_property
    def sizes(self) -> Int32:
        """``int32[n]``, the number of tokens of each row; faster than `numpy.diff`."""
        return self.query_offsets[1:] - self.query_offsets[:-1]

    @property
    def largest(self) -> Sequence:
        """The sequence with the most tokens in this step; among equals, the most in the cache."""
        longest = int(self.context_lens.max()) + 1
        return self.sequences[int((self.sizes + self.context_lens / longest).argmax())]

    @property
    def reads(self) -> bool:
        """Whether the step reads tokens of a prompt, or of an answer that another engine began."""
        return self.prompt_tokens > 0 or len(self.emitting) < len(self.sequences)

    @cached_property
    def context(self) -> float:
        """Mean number of cached tokens over the rows."""
        return sum(self.context_lens.tolist()) / len(self.context_lens)

    @property
    def next_slots(self) -> Int32:
        """``int32[m]``, the first slot after the current token of each row that may emit."""
        ends: Int32 = self.context_lens + self.sizes
        return ends[self.draft_of >= 0]

    def limits(self, is_eos: NDArray[np.bool_]) -> EmitLimits:
        """Returns the limits of the tokens of each row that may emit."""
        ends = np.array([not s.request.ignore_eos for s in self.emitting], bool)
        return EmitLimits(_ints(s.answer.remaining for s in self.emitting), ends, is_eos)

    def budget(self, max_tokens: int) -> Int32:
        """Returns ``int32[m]``, each row's maximum draft tokens, with room for the bonus token."""
        asked = (s.answer.remaining - 1 if s.drafts else 0 for s in self.emitting)
        return np.minimum(_ints(asked), max_tokens).astype(np.int32)

    def with_labels(self, drafts: Drafts) -> Drafts:
        """Replaces the drafts of rows that score labels by parts of their tries."""
        if all(s.scorer is None for s in self.emitting):
            return drafts
        parts, offsets = list[tuple[Any, ...]](), np.zeros(len(self.emitting) + 1, np.int32)
        for i, s in enumerate(self.emitting):
            own = slice(*drafts.offsets[i : i + 2].tolist())
            tokens, parents = drafts.tokens[own], drafts.parents[own]
            depths, logp, source = drafts.depths[own], drafts.logp[own], drafts.source[own]
            if s.scorer is not None:
                tokens, parents, new_depths = s.scorer.grow(tokens, parents, logp)
                depths, logp = new_depths.astype(np.int16), np.zeros(len(tokens), np.float32)
                source = np.full(len(tokens), FORCED, np.int8)
            parts.append((tokens, parents, depths, logp, source))
            offsets[i + 1] = offsets[i] + len(tokens)
        tokens, parents, depths, logp, source = map(np.concatenate, zip(*parts, strict=True))
        return Drafts(tokens, parents, depths, offsets, logp, source)

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

    def batch(self, drafts: Drafts, known: NDArray[np.bool_] | None = None) -> ForwardBatch:
        return ForwardBatch(
            kv_starts=self.kv_starts,
            context_lens=self.context_lens,
            tokens=self.tokens,
            query_offsets=self.query_offsets,
            draft_of=self.draft_of,
            drafts=drafts,
            adapters=self.adapters,
            scored=self.scored,
            known=known,
        )


def _ints(values: Iterable[int]) -> Int32:
    return np.fromiter(values, np.int32)
