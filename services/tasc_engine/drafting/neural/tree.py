"""Grows draft trees level by level and ranks paths by probability, for all rows in tensors.

EAGLE-2 (Li et al. 2024, arXiv 2406.16858): each level expands the nodes with the likeliest paths,
and the likeliest paths of all candidates are drafted. This module does not run a model:
callers pass log-probabilities. The module does not depend on the vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_draft.drafts import NEURAL
from tasc_engine.layout import Int32


@dataclass(frozen=True)
class NeuralSettings:
    """The tree of one draft (EAGLE-2: Li et al. 2024, arXiv 2406.16858).

    Attributes:
        depth: Number of levels; each level but the last takes a forward of the drafter. MicroSpec
            uses 5, FR-Spec 6, VocabTrim 3.
        width: Number of expanded nodes of a level, and of considered children of each node.
        nodes: Maximum number of draft tokens of one row, on its likeliest paths.

    All levels but the last together may expand at most ``MAX_NODES`` nodes, and ``nodes`` may be at
    most ``MAX_NODES``, since a step has one bit for each node.
    """

    depth: int = 5
    width: int = 10
    nodes: int = 60


@dataclass(frozen=True)
class Frontier:
    """The expanded nodes of one level, W nodes of each row.

    Attributes:
        logp: ``float32[R, W]``, log-probability of the path to each node; -inf for no node.
        tokens: ``int64[R, W]``, the token of each node.
        above: ``int64[R, W]``, index of the parent in the previous level; 0 in the first level.
        candidate: ``int64[R, W]``, number of the node among the row's candidates.
        tree: ``int64[R, W]``, bits of the expanded nodes that a node sees, including itself.
    """

    logp: Tensor
    tokens: Tensor
    above: Tensor
    candidate: Tensor
    tree: Tensor


class Beam:
    """The candidates of R rows; each level needs the log-probabilities after the previous level.

    Attributes:
        frontier: The expanded nodes of the newest level.
    """

    def __init__(self, width: int) -> None:
        self._width = width  # a level has fewer nodes if the vocabulary has fewer tokens
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # logp, tokens, parents
        self.frontier: Frontier | None = None

    def grow(self, logp: Tensor, tokens: Tensor, is_eos: Tensor) -> Frontier:
        """Adds a level.

        Args:
            logp: ``float32[R, P, C]``, log-probabilities of C children of each of P nodes: the
                row's current token (P = 1), or the frontier.
            tokens: ``int64[R, P, C]``, the tokens of the children.
            is_eos: ``bool[vocab]``, whether a token ends a path.
        """
        rows, _, children = logp.shape
        self._width = min(self._width, children)
        before = sum(paths.shape[1] for paths, _, _ in self._levels)
        if self.frontier is None:
            parents = torch.full((rows, children), -1, dtype=torch.long, device=logp.device)
            paths = logp.flatten(1)
        else:
            above = self.frontier
            dead = torch.isneginf(above.logp) | is_eos[above.tokens]
            paths = (above.logp.masked_fill(dead, -torch.inf)[..., None] + logp).flatten(1)
            parents = above.candidate.repeat_interleave(children, 1)
        flat = tokens.flatten(1)
        self._levels.append((paths, flat, parents))
        best, at = paths.topk(min(self._width, paths.shape[1]), 1)
        above_at = at // children
        bits = self._width * (len(self._levels) - 1)  # bits of previous levels
        own = torch.ones_like(at) << (torch.arange(at.shape[1], device=at.device) + bits)
        if self.frontier is not None:
            own |= self.frontier.tree.gather(1, above_at)
        self.frontier = Frontier(best, flat.gather(1, at), above_at, before + at, own)
        return self.frontier

    def drafts(self, nodes: int, budget: Int32, min_probs: NDArray[np.float32] | None) -> Drafts:
        """Drafts of the likeliest paths, at most ``nodes`` and ``budget[i]`` tokens for row i.

        Args:
            min_probs: See `tasc_draft.Proposer.propose`.
        """
        depths = np.concatenate(
            [np.full(level[0].shape[1], i + 1, np.int16) for i, level in enumerate(self._levels)]
        )
        logp, tokens, parents = (torch.cat(parts, 1) for parts in zip(*self._levels, strict=True))
        # The sort is stable: of equally likely nodes, shallower ones are first, so parents precede
        # children.
        best, at = logp.sort(dim=1, descending=True, stable=True)
        best, at = best[:, :nodes], at[:, :nodes]
        copied = torch.stack((at, tokens.gather(1, at), parents.gather(1, at))).cpu().numpy()
        paths = best.float().cpu().numpy()
        return ranked(paths, copied[0], copied[1], copied[2], depths, budget, min_probs)


def ranked(
    logp: NDArray[np.float32],
    numbers: NDArray[np.int64],
    tokens: NDArray[np.int64],
    parents: NDArray[np.int64],
    depths: NDArray[np.int16],
    budget: Int32,
    min_probs: NDArray[np.float32] | None,
) -> Drafts:
    """Makes drafts of candidates sorted by the probability of their paths, parents first.

    Args:
        logp: ``float32[R, n]``, in descending order.
        numbers: ``int64[R, n]``, the number of each candidate.
        parents: ``int64[R, n]``, their parents' numbers; -1 for the row's current token.
        depths: ``int16[candidates]``, the depth of each candidate.
    """
    rows, n = logp.shape
    kept = (np.arange(n) < budget[:, None]) & np.isfinite(logp)
    if min_probs is not None:
        kept &= _worth(logp, depths[numbers], kept, min_probs)
    place = np.zeros((rows, len(depths) + 1), np.int32)
    np.put_along_axis(place, numbers, np.broadcast_to(np.arange(n, dtype=np.int32), (rows, n)), 1)
    place[:, -1] = -1
    above = np.take_along_axis(place, parents, 1)
    sizes = kept.sum(1)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return Drafts(
        tokens[kept].astype(np.int32),
        above[kept],
        depths[numbers][kept],
        offsets,
        logp[kept],
        np.full(offsets[-1], NEURAL, np.int8),
    )


def _worth(
    logp: NDArray[np.float32],
    depths: NDArray[np.int16],
    kept: NDArray[np.bool_],
    min_probs: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """Selects the likeliest tokens of all rows that precede the first one not worth its cost."""
    # Sorted by logarithms: rounded probabilities would make ties that change the order in a row.
    order = np.lexsort((depths.ravel(), -np.where(kept, logp, -np.inf).ravel()))
    first = order[: min(len(min_probs), int(kept.sum()))]
    short = np.exp(logp.ravel()[first]) < min_probs[: len(first)]
    taken = first[: int(short.argmax())] if short.any() else first
    found = np.zeros(logp.size, bool)
    found[taken] = True
    return found.reshape(logp.shape)
