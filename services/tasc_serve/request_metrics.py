"""What one request cost, in the shape of vLLM's ``metrics`` object, which benchmark clients read.

Names and meanings are those of its per-request metrics and acceptance metrics; added is the draft
index. It measures nothing.
"""

from collections import Counter
from typing import Any

from tasc_engine import Acceptance, GenerationResult


def metrics_of(result: GenerationResult, detailed: bool) -> dict[str, Any]:
    """Times in milliseconds; None where one token or no time leaves nothing to divide by.

    Of an answer that another replica began, all tell of its rest.
    """
    times, tokens = result.timings, len(result.tokens) - result.said
    decoding, inference = times.total - times.first_token, times.total - times.queued
    return {
        "time_to_first_token_ms": _ms(times.first_token - times.queued),
        "generation_time_ms": _ms(decoding),
        "queue_time_ms": _ms(times.queued),
        "mean_itl_ms": _ms(decoding / (tokens - 1)) if tokens > 1 else None,
        "tokens_per_second": round(tokens / inference, 3) if inference > 0 else None,
        "speculative_decoding": _drafting(result.acceptance, detailed),
        "draft_index_version": result.index_version,
    }


def _drafting(acceptance: Acceptance, detailed: bool) -> dict[str, Any]:
    """Of steps that had a draft: as there, the others are left out."""
    pairs = zip(acceptance.drafted, acceptance.accepted, strict=True)
    steps = [(drafted, accepted) for drafted, accepted in pairs if drafted]
    drafted, accepted = ([pair[side] for pair in steps] for side in (0, 1))
    longest = max(drafted, default=0)
    told = {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(steps), 1),
        "draft_acceptance_rate": sum(accepted) / max(sum(drafted), 1),
        "acceptance_histogram": _histogram(accepted, longest),
        "acceptance_histogram_by_draft_length": {
            str(size): _histogram([a for d, a in steps if d == size], size)
            for size in sorted(set(drafted))
        },
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": longest,
    }
    ordered = {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return {**told, **ordered} if detailed else told


def _histogram(accepted: list[int], most: int) -> list[int]:
    """How many steps kept 0, 1, ... ``most`` draft tokens."""
    steps = Counter(accepted)
    return [steps[kept] for kept in range(most + 1)]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
