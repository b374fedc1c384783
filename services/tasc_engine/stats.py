"""Plain counts of the engine's work, without a metrics library."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class StepRecord:
    """The counts of one step, which is one verify forward for a batch.

    Attributes:
        row_steps: Number of rows that could emit in this step: decoding rows and last prefill
            chunks.
        drafts: Number of rows with a non-empty draft.
        drafted: ``[sources, positions]``, proposed draft tokens by source and draft position.
        reached: Same shape: drafts that reach a position, by the source of their likeliest token at
            this position.
        accepted: Same shape: emitted draft tokens, without bonus tokens.
        bonus_tokens: Number of emitted tokens that the target chose itself.
        prompt_tokens: Number of prompt tokens that a forward wrote to the cache.
        shared_tokens: Number of prompt tokens that were copied from another prompt's prefix.
        cached_tokens: Number of tokens in the KV cache after the step, over all rows.
        draft_seconds: Time to make drafts.
        verify_seconds: Time of the target's forward, until its tokens were read. On a GPU, it
            includes the host's other work if that work took longer than the forward.
        draft_failures: Number of proposer calls that raised, and of drafts that were not trees.
        guide_seconds: Time that guides took to compute allowed and forced tokens.
        forced_tokens: Number of tokens that were emitted without a forward, because a guide allowed
            no other token.
        carried_tokens: Number of forced tokens within drafts. They are verified with the drafts,
            and count neither as drafted nor as accepted.
        carried_kept: Number of ``carried_tokens`` that were emitted; ``forced_tokens`` includes
            them.
        paused: Whether the step had no drafts because earlier drafts did not pay.
        cost_error: Mean difference between the times of earlier steps and their costs: 0.1 is 10 %.
            0 if costs are unknown.
        requests: Ids of the requests that took part.
        emitted: Number of new tokens by request, for requests that could emit.
    """

    row_steps: int
    drafts: int
    drafted: Counts
    reached: Counts
    accepted: Counts
    bonus_tokens: int
    prompt_tokens: int
    cached_tokens: int
    draft_seconds: float
    verify_seconds: float
    paused: bool = False
    cost_error: float = 0.0
    shared_tokens: int = 0
    draft_failures: int = 0
    forced_tokens: int = 0
    carried_tokens: int = 0
    carried_kept: int = 0
    guide_seconds: float = 0.0
    requests: tuple[str, ...] = ()
    emitted: Mapping[str, int] = field(default_factory=dict)

    @property
    def emitted_tokens(self) -> int:
        return int(self.accepted.sum()) + self.bonus_tokens + self.forced_tokens


class EngineTotals:
    """Sums of step records; attributes other than ``steps`` are named like the records' fields."""

    def __init__(self, sources: int, positions: int) -> None:
        self.row_steps = self.drafts = self.bonus_tokens = 0
        self.prompt_tokens = self.shared_tokens = self.forced_tokens = 0
        self.draft_seconds = self.verify_seconds = 0.0
        none = np.zeros((sources, max(positions, 1)), np.int64)
        self.drafted = self.reached = self.accepted = none
        self._summed = tuple(vars(self))
        self.steps = 0

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        for name in self._summed:
            setattr(self, name, getattr(self, name) + getattr(record, name))

    @property
    def emitted_tokens(self) -> int:
        return int(self.accepted.sum()) + self.bonus_tokens + self.forced_tokens

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens, including ends of sequence, per target forward of a row that can emit."""
        return self.emitted_tokens / self.row_steps if self.row_steps else 0.0

    def acceptance_by_position(self) -> list[float]:
        """Accepted tokens at position i per draft that reaches it, up to the deepest draft."""
        reached, accepted = self.reached.sum(0), self.accepted.sum(0)
        return [float(accepted[i] / n) for i, n in enumerate(reached) if n]


class StepClock:
    """Times the parts of one step.

    Attributes:
        draft: Seconds in which drafts were made.
        guide: Seconds in which guides computed allowed and forced tokens.
        verify: Seconds of the target's forward, until its tokens were read.
        late: Whether the forward had ended before the host waited for it, so that ``verify`` is
            longer than the forward.
    """

    def __init__(self) -> None:
        self.late = False
        self.draft = self.guide = self.verify = 0.0
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
