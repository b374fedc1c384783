"""An index whose parts are damaged, or do not belong together, is refused."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from draft_cases import (
    FINGERPRINT,
    STARTS,
    VOCAB,
    bigram_table,
    full_index,
    make_index,
    outputs,
    tagged_rows,
)
from hypothesis import given, settings

from tasc_draft import DraftError, DraftIndex, Tokens, build_index
from tasc_draft.index.weights import Weights

Change = Callable[[DraftIndex], DraftIndex]
replace = dataclasses.replace


def of_vocabulary(vocab_size: int) -> DraftIndex:
    """The same rows with a larger vocabulary."""
    prompts, outputs = tagged_rows(1)
    starts = np.append(STARTS, np.ones(vocab_size - VOCAB, bool))
    return build_index(
        Tokens.of(outputs), Tokens.of(prompts), fingerprint=FINGERPRINT, vocab_size=vocab_size,
        eos_id=0, word_starts=starts,
    )  # fmt: skip


def whole() -> DraftIndex:
    canonical = np.arange(VOCAB + 1, dtype=np.int32)
    return replace(full_index(), canonical=canonical, weights=Weights.prior())


MISMATCHES: dict[str, Change] = {
    "neighbours of a larger corpus": lambda index: replace(index, corpus=make_index([[1]]).corpus),
    "neighbours of no corpus": lambda index: replace(
        index, corpus=DraftIndex.empty(FINGERPRINT, VOCAB).corpus
    ),
    "aligned without word starts": lambda index: replace(index, word_starts=None),
    "too few word starts": lambda index: replace(index, word_starts=STARTS[:-1]),
    "aligned of another vocabulary": lambda index: replace(
        index, aligned=of_vocabulary(VOCAB + 1).aligned
    ),
    "too few canonical ids": lambda index: replace(index, canonical=index.canonical[:-1]),
    "a canonical id outside": lambda index: replace(index, canonical=index.canonical + 1),
    "a negative canonical id": lambda index: replace(index, canonical=index.canonical - 1),
    "bigrams of another vocabulary": lambda index: replace(
        index, bigrams=bigram_table(1, vocab_size=VOCAB + 1)
    ),
    "bigrams of another tokenizer": lambda index: replace(
        index, bigrams=bigram_table(1, fingerprint="e" * 32)
    ),
}

DAMAGES: dict[str, Change] = {
    "corpus": lambda index: replace(index, corpus=replace(index.corpus, tokens=1)),
    "inputs": lambda index: replace(index, inputs=replace(index.inputs, rows=1)),
    "aligned": lambda index: replace(index, aligned=replace(index.aligned, head=-1)),
    "bigrams": lambda index: replace(index, bigrams=replace(index.bigrams, vocab_size=1)),
    "too few weights": lambda index: replace(index, weights=Weights(np.zeros(7, np.float32))),
    "a weight that is no number": lambda index: replace(
        index, weights=Weights(index.weights.values * np.float32("nan"))
    ),
}


@settings(deadline=None, max_examples=40)
@given(outputs)
def test_what_was_built_passes(outputs: list[list[int]]) -> None:
    make_index(outputs, outputs[::-1]).check_integrity()


def test_an_index_with_every_part_and_one_with_none_pass() -> None:
    whole().check_integrity()
    of_vocabulary(VOCAB + 1).check_integrity()
    DraftIndex.empty(FINGERPRINT, VOCAB).check_integrity()


@pytest.mark.parametrize("change", MISMATCHES.values(), ids=MISMATCHES.keys())
def test_parts_that_do_not_belong_together_are_refused(change: Change) -> None:
    with pytest.raises(DraftError, match="do not fit together; build the index again"):
        change(whole()).check_integrity()


@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_part_is_refused(change: Change) -> None:
    with pytest.raises(DraftError, match="again"):
        change(whole()).check_integrity()
