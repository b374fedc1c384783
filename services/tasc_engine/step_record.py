"""What one step did, put together for those who count. It measures nothing and keeps nothing."""

import numpy as np
from numpy.typing import NDArray

from tasc_draft import SOURCES, Drafts
from tasc_engine.accept import Accepted, count
from tasc_engine.plan import Plan
from tasc_engine.stats import StepRecord


def record_of(
    plan: Plan,
    drafts: Drafts,
    accepted: Accepted,
    used: NDArray[np.int32],
    forced: int,
    seconds: tuple[float, float, float],
    *,
    positions: int,
    cached_tokens: int,
    paused: bool,
    draft_failures: int,
) -> StepRecord:
    """A step's record.

    Args:
        used: ``int32[m]`` tokens that each answer took.
        forced: Tokens that guides forced besides.
        seconds: Spent proposing, asking guides, and in the target's forward.
        positions: The deepest a draft may be.
    """
    drafted, reached, kept = count(drafts, accepted, used, len(SOURCES), positions)
    return StepRecord(
        row_steps=len(plan.emitting),
        drafts=int((np.diff(drafts.offsets) > 0).sum()),
        drafted=drafted,
        reached=reached,
        accepted=kept,
        bonus_tokens=int(used.sum()) - int(kept.sum()),
        prompt_tokens=plan.prompt_tokens,
        shared_tokens=plan.shared_tokens,
        cached_tokens=cached_tokens,
        draft_seconds=seconds[0],
        guide_seconds=seconds[1],
        verify_seconds=seconds[2],
        paused=paused,
        draft_failures=draft_failures,
        forced_tokens=forced,
        requests=tuple(sequence.request.id for sequence in plan.sequences),
    )
