"""Which draft tokens the target agrees with: compiled, over flat arrays. Chains only.

The target's token at each visited place is what plain decoding would have said there; a draft is
followed while it says the same (speculative verification with deterministic choice; Leviathan et
al. 2023, arXiv 2211.17192).
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts
from tasc_engine.stats import Counts

Int64 = NDArray[np.int64]


@numba.njit(cache=True, nogil=True)
def _accept(
    chosen: Any, draft: Any, offsets: Any, is_eos: Any, starts: Any, agreed: Any, emitted: Any
) -> None:
    at = 0
    for i in range(len(offsets) - 1):
        begin, size = offsets[i], offsets[i + 1] - offsets[i]
        starts[i] = at
        same = 0
        while same < size and draft[begin + same] == chosen[at + same]:
            same += 1
        agreed[i] = same
        emitted[i] = same + 1
        for k in range(same + 1):
            if is_eos[chosen[at + k]]:
                emitted[i] = k + 1
                break
        at += size + 1


@numba.njit(cache=True, nogil=True)
def _count(source: Any, depths: Any, offsets: Any, kept: Any, drafted: Any, accepted: Any) -> None:
    for i in range(len(offsets) - 1):
        for n in range(offsets[i], offsets[i + 1]):
            position = depths[n] - 1
            drafted[source[n], position] += 1
            if position < kept[i]:
                accepted[source[n], position] += 1


def accept(chosen: Int64, drafts: Drafts, is_eos: NDArray[np.bool_]) -> tuple[Int64, Int64, Int64]:
    """Compare chain drafts with the target's tokens.

    Args:
        chosen: ``int64[M]`` the target's token behind each row's current token and draft tokens.
        drafts: The drafts of the same rows, in the same order.
        is_eos: Whether an id ends an answer; an answer is cut behind the first.

    Returns:
        For each row: where its tokens begin in ``chosen``, how many draft tokens agree, and how
        many tokens it emits (``chosen[start : start + emitted]``).
    """
    rows = len(drafts.offsets) - 1
    starts, agreed, emitted = (np.zeros(rows, np.int64) for _ in range(3))
    _accept(chosen, drafts.tokens, drafts.offsets, is_eos, starts, agreed, emitted)
    return starts, agreed, emitted


def count(drafts: Drafts, kept: Int64, sources: int, positions: int) -> tuple[Counts, Counts]:
    """Drafted and accepted tokens, each ``[sources, max(positions, 1)]``; ``kept`` is per row."""
    positions = max(positions, 1)
    drafted, accepted = (np.zeros((sources, positions), np.int64) for _ in range(2))
    _count(drafts.source, drafts.depths, drafts.offsets, kept, drafted, accepted)
    return drafted, accepted
