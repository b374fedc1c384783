"""What a target thought at the tokens that entered its cache, for proposers that learn from it.

It collects by row what several steps bring, and computes nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.accept import Accepted
from tasc_engine.neural.wants import Thoughts
from tasc_engine.plan import Plan


@dataclass(frozen=True)
class Seen:
    """Of tokens of one row that lie together.

    Attributes:
        begin: Position of the first of them.
        hidden: ``[k, D]``, see `Thoughts`.
        top: ``int64[k, K]``.
    """

    begin: int
    hidden: Tensor | None
    top: Tensor | None


class Watch:
    """Keeps, by row, what a proposer has not been told yet."""

    def __init__(self) -> None:
        self._held: dict[int, list[Seen]] = {}

    def forget(self) -> None:
        self._held.clear()

    def drop(self, row: int) -> None:
        self._held.pop(row, None)

    def take(self, row: int) -> Seen | None:
        """What was seen of a row since this was last asked; None where that is nothing."""
        parts = self._held.pop(row, [])
        if len(parts) < 2:
            return parts[0] if parts else None
        return Seen(parts[0].begin, _joined([p.hidden for p in parts]),
                    _joined([p.top for p in parts]))  # fmt: skip

    def see(self, plan: Plan, drafts: Drafts, accepted: Accepted, thoughts: Thoughts) -> None:
        """Take in a step: of each row what it fed, and the nodes of its draft that were accepted.

        Call it before a row's sequence goes on: where it stands in the cache is read of the plan.
        A step that kept nothing leaves a gap: what was held in front of it is dropped.
        """
        if thoughts.hidden is None and thoughts.top is None:
            for row in plan.rows.tolist():
                self.drop(row)
            return
        sizes = np.diff(plan.offsets)
        nodes = np.zeros(len(sizes), np.int64)
        nodes[plan.draft_of >= 0] = np.diff(drafts.offsets)
        begins = np.cumsum(sizes + nodes) - sizes - nodes
        for i, row in enumerate(plan.rows.tolist()):
            own = np.arange(begins[i], begins[i] + sizes[i])
            if (draft := int(plan.draft_of[i])) >= 0:
                path = accepted.path[draft, : accepted.followed[draft]]
                own = np.concatenate((own, begins[i] + sizes[i] + path))
            seen = Seen(int(plan.starts[i]), _at(thoughts.hidden, own), _at(thoughts.top, own))
            held = self._held.setdefault(row, [])
            while held and held[-1].begin >= seen.begin:
                held.pop()  # the step is done again: what came behind its forward failed
            held.append(seen)


def _at(of_all: Tensor | None, places: NDArray[np.int64]) -> Tensor | None:
    if of_all is None:
        return None
    return of_all[torch.from_numpy(places).to(of_all.device, non_blocking=True)]


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
