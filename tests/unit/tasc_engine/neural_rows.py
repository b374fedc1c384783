"""Rows of a neural proposer over a tiny model, and their drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neural_drafters import KINDS, drafter_of, proposer_of, vocabulary_of
from tasc_draft import Drafts
from tasc_engine.drafting.hidden_state_buffer import RowHiddenStates
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.drafting.safe_proposer import is_forest

ROWS, CAPACITY = 3, 64
TREE = NeuralSettings(depth=4, width=3, nodes=12)
PROMPTS = ([5, 9, 30, 41, 7], [8, 2], list(range(40, 60)))
every = pytest.mark.parametrize("kind", KINDS)


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def make(
    folder: Path,
    kind: str = "same",
    policy: str = "full",
    settings: NeuralSettings = TREE,
    chunk: int = 256,
    **how: Any,
) -> NeuralProposer:
    drafter, head = drafter_of(kind, folder, ROWS, CAPACITY)
    vocabulary = vocabulary_of(policy, head, ROWS, np.arange(len(head), dtype=np.int32))
    sizes = {"rows": ROWS, "capacity": CAPACITY, "eos_ids": (0,), "chunk": chunk}
    return proposer_of(drafter, vocabulary, settings, **sizes, **how)


def hidden_states(proposer: NeuralProposer, begin: int, n: int, seed: int = 0) -> RowHiddenStates:
    """Returns random hidden states in place of a target's."""
    generator = torch.Generator().manual_seed(1000 * seed + begin)
    size = proposer.backbone.decoder.embedding.shape[1]
    hidden = torch.randn(n, size, generator=generator, dtype=torch.float64)
    return RowHiddenStates(begin, hidden, torch.randint(0, 300, (n, 3), generator=generator))


def begun(proposer: NeuralProposer, row: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Starts a row, and passes it the target's hidden states and tokens one after the other."""
    proposer.start(row, ids(prompt))
    for i, token in enumerate(answer):
        begin, n = (0, len(prompt)) if i == 0 else (len(prompt) + i - 1, 1)
        proposer.observe(row, ids([token]), hidden_states(proposer, begin, n, seed=len(prompt)))


def propose(proposer: NeuralProposer, rows: Sequence[int], budget: int = 12) -> Drafts:
    drafts = proposer.propose(ids(rows), ids([budget] * len(rows)))
    assert is_forest(drafts, ids([budget] * len(rows)), 400, proposer.max_depth)
    return drafts


def tree(drafts: Drafts, place: int = 0) -> dict[tuple[int, ...], float]:
    begin, end = drafts.offsets[place : place + 2]
    paths: list[tuple[int, ...]] = []
    for at in range(begin, end):
        parent = drafts.parents[at]
        paths.append((*(paths[parent] if parent >= 0 else ()), int(drafts.tokens[at])))
    return dict(zip(paths, drafts.logp[begin:end].tolist(), strict=True))


def assert_same(found: dict[Any, float], expected: dict[Any, float]) -> None:
    assert [*found] == [*expected]
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-4)
