"""Who takes part in a step and what each brings. It moves no tensors and makes no drafts."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts
from tasc_engine.guided import follow
from tasc_engine.layout import Feed
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.step.sequence import Sequence

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """One step before it is drafted for; n rows take part, m of them may emit.

    Attributes:
        sequences: Of the rows, ascending.
        emitting: Those of them that may emit: prompt and answer are in the cache, or will be.
        rows: ``int32[n]`` their rows of the batch.
        firsts, starts, offsets, tokens, draft_of: See `Feed`.
        prompt_tokens: Prompt tokens that enter the cache by this step's forward.
        shared_tokens: Prompt tokens of rows that begin in this step which were copied instead.
        adapters: ``int32[n]`` the number of each row's adapter, 0 for none.
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

    @classmethod
    def of(cls, sequences: list[Sequence], chunk: int) -> "Plan":
        """Each row's next tokens, at most ``chunk``."""
        tokens = [s.next_tokens(chunk) for s in sequences]
        sizes = [len(t) for t in tokens]
        emits = [n >= s.behind for s, n in zip(sequences, sizes, strict=True)]
        return cls(
            sequences=sequences,
            emitting=[s for s, may in zip(sequences, emits, strict=True) if may],
            rows=_ints(s.row for s in sequences),
            firsts=np.array([s.first for s in sequences], np.int64),
            starts=_ints(s.cached for s in sequences),
            offsets=_ints(np.cumsum([0, *sizes])),
            tokens=np.concatenate(tokens) if tokens else _ints(()),
            draft_of=np.where(emits, np.cumsum(emits) - 1, -1).astype(np.int32),
            prompt_tokens=sum(n for s, n in zip(sequences, sizes, strict=True) if s.prefilling),
            shared_tokens=sum(s.entered for s in sequences if s.cached == s.entered),
            adapters=_ints(s.adapter for s in sequences),
        )

    @property
    def emitting_rows(self) -> Int32:
        return self.rows[self.draft_of >= 0]

    @property
    def context(self) -> float:
        """Tokens in the cache, mean over the rows."""
        return float(self.starts.mean())

    @property
    def behind(self) -> Int32:
        """``int32[m]`` the first place behind the current token of each row that may emit."""
        ends: Int32 = self.starts + np.diff(self.offsets)
        return ends[self.draft_of >= 0]

    def room(self) -> Int32:
        """``int32[m]`` most tokens each row may still emit."""
        return _ints(s.remaining for s in self.emitting)

    def ends(self) -> NDArray[np.bool_]:
        """``bool[m]`` whether an end of sequence ends each row's answer."""
        return np.array([not s.request.ignore_eos for s in self.emitting], bool)

    def budget(self, most: int) -> Int32:
        """``int32[m]`` most draft tokens of each row: the bonus token needs room too."""
        asked = (s.remaining - 1 if s.request.draft else 0 for s in self.emitting)
        return np.minimum(_ints(asked), most).astype(np.int32)

    def guided(self, drafts: Drafts) -> tuple[Drafts, Allowed | None]:
        """Drafts without what guides forbid, and what they allow; None where nobody is guided."""
        guides = [s.guide for s in self.emitting]
        if not any(guides):
            return drafts, None
        found = follow(guides, drafts)
        return found.drafts, found.allowed

    def feed(self, drafts: Drafts, moves: Int64) -> Feed:
        return Feed(
            self.firsts, self.starts, self.tokens, self.offsets, self.draft_of, drafts, moves,
            self.adapters,
        )  # fmt: skip


def _ints(values: Iterable[int]) -> Int32:
    return np.fromiter(values, np.int32)
