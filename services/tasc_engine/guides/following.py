"""Guides and drafts of one step: what the rows may say at each place, without forbidden nodes.

It knows no logits and chooses no token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from tasc_draft import Drafts
from tasc_engine.allowed import Allowed
from tasc_engine.guides.guide import Guide


@dataclass(frozen=True)
class Guided:
    """Drafts that guides leave, and what is allowed at their places.

    Attributes:
        drafts: Without nodes that a guide forbids and those below them.
        allowed: A mask for each place of rows with a guide; masks that no place names hold
            anything. Row i's places begin at ``drafts.offsets[i] + i``: its current token, then
            its nodes.
    """

    drafts: Drafts
    allowed: Allowed


def follow(guides: Sequence[Guide | None], drafts: Drafts) -> Guided:
    """Ask each row's guide about its draft. A guide that cannot go on allows nothing, and says why.

    Args:
        guides: One for each row of the drafts; None where a row may say anything.
    """
    n, rows = len(drafts.tokens), len(guides)
    mask_at = np.full(rows, -1, np.int32)
    words = next((guide.words for guide in guides if guide is not None), 0)
    offsets = drafts.offsets.tolist()
    used = 0
    for i, guide in enumerate(guides):
        if guide is not None:
            mask_at[i] = used
            used += offsets[i + 1] - offsets[i] + 1
    masks, kept = np.empty((used, words), np.uint32), np.ones(n, bool)
    for i, guide in enumerate(guides):
        if guide is not None:
            begin, end = offsets[i], offsets[i + 1]
            at = int(mask_at[i])
            guide.look(
                drafts.tokens[begin:end], drafts.parents[begin:end], kept[begin:end],
                masks[at : at + 1 + end - begin],
            )  # fmt: skip
    return _without(drafts, kept, mask_at, masks)


def warm_up() -> None:
    """Compile, or load what is compiled, before the first request waits for it."""
    follow([None], Drafts.empty(1))


def _without(drafts: Drafts, kept: Any, mask_at: Any, masks: Any) -> Guided:
    n, rows = int(np.count_nonzero(kept)), len(mask_at)
    taken, parents, mask_of = (np.empty(k, np.int32) for k in (n, n, n + rows))
    offsets = np.zeros(rows + 1, np.int32)
    scratch = np.empty(len(kept), np.int32)
    _leave_out(
        drafts.parents, drafts.offsets, kept, mask_at, taken, parents, offsets, mask_of, scratch
    )
    allowed = Allowed(masks, mask_of)
    if n == len(kept):
        return Guided(drafts, allowed)
    left = Drafts(
        drafts.tokens[taken], parents, drafts.depths[taken], offsets,
        drafts.logp[taken], drafts.source[taken],
    )  # fmt: skip
    return Guided(left, allowed)


@numba.njit(cache=True, nogil=True)
def _leave_out(
    parents: Any, offsets: Any, kept: Any, mask_at: Any,
    taken: Any, new_parents: Any, new_offsets: Any, mask_of: Any, new_place: Any,
) -> None:  # fmt: skip
    n = place = 0
    for i in range(len(mask_at)):
        begin, first = offsets[i], n
        mask_of[place] = mask_at[i]
        place += 1
        for x in range(begin, offsets[i + 1]):
            if kept[x]:
                above = parents[x]
                new_place[x] = n - first
                taken[n] = x
                new_parents[n] = new_place[begin + above] if above >= 0 else -1
                mask_of[place] = mask_at[i] + 1 + x - begin if mask_at[i] >= 0 else -1
                n += 1
                place += 1
        new_offsets[i + 1] = n
