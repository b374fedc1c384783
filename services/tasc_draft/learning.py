"""Learns a task's evidence weights on rows that are not in the index."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.index.draft_index import DraftIndex, build_index
from tasc_draft.index.weights import Weights
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.settings import DraftSettings
from tasc_draft.tokens import Int32, Tokens

EPOCHS = 6
RATE = 0.1
LEAST_ROWS = 200  # smaller corpora get no learnt weights
ANSWER_TOKENS = 512  # maximum number of used tokens of one answer
_SHARE, _MIN_ROWS, _MAX_ROWS = 12, 100, 600


def held_out(rows: int, seed: int = 1) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split row numbers into those to index and those to learn from.

    A twelfth is held out, but between 100 and 600 rows and at most half of them.
    """
    count = min(max(rows // _SHARE, _MIN_ROWS), _MAX_ROWS, rows // 2)
    out = np.zeros(rows, bool)
    out[np.random.default_rng(seed).choice(rows, count, replace=False)] = True
    return np.flatnonzero(~out), np.flatnonzero(out)


def taught(
    index: DraftIndex,
    prompts: Tokens,
    outputs: Tokens,
    *,
    eos_id: int,
    settings: DraftSettings,
    epochs: int = EPOCHS,
    rate: float = RATE,
    progress: Callable[[], None] = lambda: None,
) -> NgramProposer:
    """A proposer whose weights maximise the likelihood of held-out answers, by gradient ascent.

    Args:
        index: An index without these rows.
        prompts, outputs: The held-out rows; outputs without end-of-sequence.
        settings: Settings of the proposer that will use the weights. Recent answers are turned
            off: from the second epoch on they would contain the answers themselves.
        progress: Called after each epoch.
    """
    rows = list(answers(prompts, outputs, eos_id))
    proposer = NgramProposer(
        dataclasses.replace(settings, mixture="mixed", recent_tokens=0),
        rows=1,
        capacity=max((len(p) + len(a) for p, a in rows), default=0) + 1,
        vocab_size=index.vocab_size,
        eos_ids=[eos_id],
        index=index,
        nodes=1,
    )
    for _ in range(epochs):
        for prompt, answer in rows:
            proposer.teach(prompt, answer, rate)
        progress()
    return proposer


def learn_weights(index: DraftIndex, prompts: Tokens, outputs: Tokens, **how: Any) -> Weights:
    """The weights of a `taught` proposer."""
    return taught(index, prompts, outputs, **how).weights


def corpus_weights(
    build: Callable[[Tokens, Tokens], DraftIndex], outputs: Tokens, prompts: Tokens, **how: Any
) -> Weights | None:
    """Weights learnt on some rows of a corpus and an index of the others.

    A corpus of fewer than LEAST_ROWS rows gets none.

    Args:
        build: Makes the index of some rows, outputs first.
        how: Arguments of `taught`.
    """
    if len(outputs) < LEAST_ROWS:
        return None
    kept, held = held_out(len(outputs))
    index = build(outputs.take(kept), prompts.take(kept))
    return learn_weights(index, prompts.take(held), outputs.take(held), **how)


def build_learnt_index(
    outputs: Tokens, prompts: Tokens, *, eos_id: int, settings: DraftSettings, **facts: Any
) -> DraftIndex:
    """Build an index with its `corpus_weights`; ``facts`` are other arguments of `build_index`."""

    def build(outputs: Tokens, prompts: Tokens) -> DraftIndex:
        return build_index(outputs, prompts, eos_id=eos_id, **facts)

    weights = corpus_weights(build, outputs, prompts, eos_id=eos_id, settings=settings)
    return dataclasses.replace(build(outputs, prompts), weights=weights)


def answers(prompts: Tokens, outputs: Tokens, eos_id: int) -> list[tuple[Int32, Int32]]:
    """Each row's prompt and answer: the first ANSWER_TOKENS of the output and end-of-sequence."""
    eos = np.array([eos_id], np.int32)
    p, o = prompts.offsets, outputs.offsets
    return [
        (
            np.asarray(prompts.ids[p[i] : p[i + 1]], np.int32),
            np.concatenate([outputs.ids[o[i] : o[i + 1]][:ANSWER_TOKENS], eos]).astype(np.int32),
        )
        for i in range(len(prompts))
    ]
