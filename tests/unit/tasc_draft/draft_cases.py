"""Indexes, proposers and random rows that the tests of drafting share.

All proposers have arrays of the same types, so that the kernels are compiled once.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
from draft_checks import Limits, Tree, trees
from hypothesis import settings
from hypothesis import strategies as st

from tasc_draft import (
    BigramTable,
    DraftIndex,
    Drafts,
    DraftSettings,
    NgramProposer,
    Tokens,
    build_index,
)
from tasc_draft.drafts import Int32

VOCAB = 12
SEP = VOCAB
TARGET = VOCAB + 3  # as of a model with padded embeddings: SEP's id is one of the padding
EOS = 0
FINGERPRINT = "f" * 32
STARTS = np.array([token % 2 == 0 for token in range(VOCAB)] + [True])
CAPACITY = 96

Row = tuple[list[int], list[int], int]  # prompt, answer so far, limit

token = st.integers(0, 5)
outputs = st.lists(st.lists(token, max_size=8), max_size=8)
prompts = st.lists(token, max_size=14)
# Ids of the target beyond the tokenizer's too, of which one is the index's document mark.
answers = st.lists(st.sampled_from([*range(6), SEP, SEP + 1]) | st.integers(1, 3), max_size=12)
rows = st.lists(st.tuples(prompts, answers, st.integers(-1, 12)), min_size=1, max_size=3)
min_prob = st.sampled_from([0.0, 0.02, 0.3, 1.0]) | st.floats(0, 1)
mixed = st.builds(
    DraftSettings,
    num_speculative_tokens=st.integers(0, 10),
    min_prob=min_prob,
    neighbours=st.integers(0, 4),
    neighbour_tokens=st.just(64),
    recent_tokens=st.just(48),
)


many_examples = False  # until the option --all is read


def examples(few: int, many: int) -> settings:
    """Sets the number of examples of a property: many with --all, otherwise few."""
    return settings(max_examples=many if many_examples else few)


def ids(values: Sequence[int]) -> Int32:
    return np.array(values, np.int32)


def make_index(
    outputs: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]] | None = None,
    starts: np.ndarray | None = None,
    canonical: np.ndarray | None = None,
    vocab_size: int = VOCAB,
) -> DraftIndex:
    return build_index(
        Tokens.of(outputs),
        None if prompts is None else Tokens.of(prompts),
        fingerprint=FINGERPRINT,
        vocab_size=vocab_size,
        eos_id=EOS,
        word_starts=None if starts is None else starts.copy(),
        canonical=canonical,
    )


def tagged_rows(seed: int, rows: int = 80) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts of words, and outputs with one tag for each word."""
    rng = Random(seed)
    prompts, outputs = [], []
    for _ in range(rows):
        words = [
            [rng.choice([2, 4, 6]), *rng.choices([1, 3], k=rng.randrange(2))]
            for _ in range(rng.randrange(1, 5))
        ]
        prompts.append([token for word in words for token in word])
        outputs.append([8 if sum(word) % 3 or rng.random() < 0.1 else 10 for word in words])
    return prompts, outputs


@cache
def full_index(seed: int = 1) -> DraftIndex:
    """Returns an index that has every part."""
    prompts, outputs = tagged_rows(seed)
    index = make_index(outputs, prompts, STARTS)
    assert index.inputs
    assert index.aligned
    return dataclasses.replace(index, bigrams=bigram_table(seed))


def bigram_table(seed: int, vocab_size: int = VOCAB, fingerprint: str = FINGERPRINT) -> BigramTable:
    rng = np.random.default_rng(seed)
    chances = rng.dirichlet(np.full(vocab_size, 0.3), vocab_size).astype(np.float32)
    tokens = np.argsort(-chances, axis=1)[:, :4].astype(np.int32)
    logp = np.log(np.take_along_axis(chances, tokens, 1) + np.float32(1e-9))
    return BigramTable("a target", fingerprint, vocab_size, tokens, logp)


indexes = st.builds(
    lambda outputs, with_prompts: make_index(outputs, outputs[::-1] if with_prompts else None),
    outputs | st.just([[1, 2, 3, 4]] * 3),
    st.booleans(),
) | st.integers(1, 2).map(full_index)


def make_proposer(index: DraftIndex, settings: DraftSettings, **options: Any) -> NgramProposer:
    sizes = {"rows": 3, "capacity": CAPACITY, "vocab_size": TARGET}
    return NgramProposer(settings, eos_ids=[EOS], index=index, **(sizes | options))


def begun(proposer: NgramProposer, row: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
    proposer.start(row, ids(prompt))
    proposer.observe(row, ids(answer))


def started(
    index: DraftIndex, settings: DraftSettings, *rows: Sequence[Any], **options: Any
) -> NgramProposer:
    """Returns a proposer with a prompt and an answer so far in each of its rows 0, 1, ..."""
    proposer = make_proposer(index, settings, **options)
    for row, (prompt, answer, *_) in enumerate(rows):
        begun(proposer, row, prompt, answer)
    return proposer


def propose(proposer: NgramProposer, row: int = 0, limit: int = 64) -> Tree:
    (nodes,) = trees(proposer.propose(ids([row]), ids([limit])))
    return nodes


def propose_all(
    proposer: NgramProposer, rows: Sequence[Row], least: np.ndarray | None = None
) -> Drafts:
    return proposer.propose(ids(range(len(rows))), ids([limit for *_, limit in rows]), least)


def limits_of(settings: DraftSettings, limit: int, branching: bool = True) -> Limits:
    most = min(limit, settings.num_speculative_tokens)
    return Limits(most, TARGET, SEP, (EOS,), settings.min_prob, branching)
