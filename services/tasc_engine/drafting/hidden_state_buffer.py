"""Keeps the target's hidden states of cached tokens by row, for proposers."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.model.hidden_states import HiddenStates
from tasc_engine.sampling.accept import Accepted
from tasc_engine.step.plan import Plan


@dataclass(frozen=True)
class RowHiddenStates:
    """Hidden states of adjacent tokens of one row.

    Attributes:
        begin: Position of the first token.
        hidden: ``[k, D]``, see `HiddenStates`.
        top: ``int64[k, K]``, the K likeliest next tokens.
    """

    begin: int
    hidden: Tensor | None
    top: Tensor | None


class HiddenStateBuffer:
    """Keeps, by row, the hidden states of steps that a proposer has not read yet."""

    def __init__(self) -> None:
        self._held: dict[int, list[RowHiddenStates]] = {}

    def forget(self) -> None:
        self._held.clear()

    def drop(self, row: int) -> None:
        self._held.pop(row, None)

    def take(self, row: int) -> RowHiddenStates | None:
        """Returns a row's hidden states since the last call; None if there are none."""
        parts = self._held.pop(row, [])
        if len(parts) < 2:
            return parts[0] if parts else None
        return RowHiddenStates(
            parts[0].begin, _joined([p.hidden for p in parts]), _joined([p.top for p in parts])
        )

    @torch.inference_mode()
    def keep(
        self, plan: Plan, drafts: Drafts, accepted: Accepted, hidden_states: HiddenStates
    ) -> None:
        """Keeps the hidden states of a step: of each row's own tokens and accepted draft nodes.

        A step without hidden states leaves a gap, and the states before the gap are dropped.
        """
        if hidden_states.hidden is None:
            for row in plan.rows.tolist():
                self.drop(row)
            return
        kept = _kept(plan, drafts, accepted)
        places = torch.from_numpy(np.concatenate(kept))
        places = places.to(hidden_states.hidden.device, non_blocking=True)
        sizes = [len(own) for own in kept]
        hidden, top = (
            [None] * len(kept) if of_all is None else of_all.split(sizes)
            for of_all in hidden_states.at(places)
        )
        for i, row in enumerate(plan.rows.tolist()):
            states = RowHiddenStates(int(plan.context_lens[i]), hidden[i], top[i])
            self._held.setdefault(row, []).append(states)


def _kept(plan: Plan, drafts: Drafts, accepted: Accepted) -> list[NDArray[np.int64]]:
    """Indices of the forward's tokens to keep, by row: the row's own tokens and accepted nodes."""
    sizes = plan.sizes
    nodes = np.zeros(len(sizes), np.int64)
    nodes[plan.draft_of >= 0] = drafts.sizes
    begins = np.cumsum(sizes + nodes) - sizes - nodes
    found = []
    for begin, size, draft in zip(begins, sizes, plan.draft_of, strict=True):
        own = np.arange(begin, begin + size)
        if draft >= 0:
            path = accepted.path[draft, : accepted.followed[draft]]
            own = np.concatenate((own, begin + size + path))
        found.append(own)
    return found


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
