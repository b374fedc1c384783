"""Draft indexes with wrong values in many arrays, but without references out of bounds."""

from dataclasses import replace
from typing import Any

import numpy as np

from tasc_draft import BigramTable, DraftIndex
from tasc_draft.index.aligned import AlignedTable
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.inputs import InputIndex
from tasc_draft.index.lookup import END, WIDEST
from tasc_draft.index.weights import CELLS, Weights


def wrong_index(index: DraftIndex, rng: np.random.Generator) -> DraftIndex:
    """Returns another index with random values in some arrays of each part."""
    ids, changed = index.vocab_size + 1, {"corpus": _corpus(index.corpus, rng)}
    for name, wrong in (("inputs", _inputs), ("aligned", _aligned), ("bigrams", _bigrams)):
        if (part := getattr(index, name)) is not None:
            changed[name] = wrong(part, rng, len(index.corpus.offsets) - 1)
    values = rng.normal(0, rng.choice([1, 1000]), CELLS).astype(np.float32)
    canonical = rng.integers(0, ids, ids).astype(np.int32)
    return replace(index, weights=Weights(values), canonical=canonical, **changed)


def _some(part: Any, rng: np.random.Generator, **arrays: Any) -> Any:
    kinds = {name: getattr(part, name).dtype for name in arrays}
    chosen = [name for name in arrays if rng.random() < 0.5]
    return replace(part, **{name: arrays[name].astype(kinds[name]) for name in chosen})


def _rising(rng: np.random.Generator, n: int, end: int) -> np.ndarray:
    """Where each of ``n`` runs of ``end`` values begins, and the end."""
    return np.array([0, *np.sort(rng.integers(0, end + 1, n - 1)), end][: n + 1])


def _corpus(corpus: CorpusIndex, rng: np.random.Generator) -> CorpusIndex:
    text, grams, hot = corpus.text, len(corpus.order), len(corpus.hot_next)
    other = rng.integers(0, corpus.vocab_size + 1, len(text))
    corpus = _some(
        corpus,
        rng,
        text=np.where((text == END) | (rng.random(len(text)) < 0.7), text, other),
        order=rng.integers(0, len(text) - corpus.depth, grams),
        cumulative=np.append(0, np.cumsum(rng.integers(1, 9, grams))),
    )
    tokens, _, lo, hi = corpus.hot_next.T
    if rng.random() < 0.5:
        lo = rng.integers(0, grams, hot)
        hi = rng.integers(lo + 1, grams + 1)
    if rng.random() < 0.5:
        tokens = rng.integers(0, corpus.vocab_size + 1, hot)
    following = np.stack([tokens, corpus.cumulative[hi] - corpus.cumulative[lo], lo, hi], axis=1)
    slots = corpus.hot_slots.copy()
    used = slots[:, 3] > 0
    if rng.random() < 0.5:
        slots[used, 3] = rng.integers(1, WIDEST + 1, used.sum())
        slots[used, 2] = rng.integers(0, hot + 1 - slots[used, 3])
    return replace(corpus, hot_next=following.astype(np.int32), hot_slots=slots)


def _inputs(inputs: InputIndex, rng: np.random.Generator, documents: int) -> InputIndex:
    features, rows, size = len(inputs.keys), inputs.rows, len(inputs.postings)
    weights = rng.uniform(0.2, 99, features).astype(np.float32)
    return _some(
        replace(inputs, weights=weights, norms=inputs.norms + np.float32(0.2)),
        rng,
        first=_rising(rng, features, size),
        postings=rng.integers(0, rows, size),
        norms=rng.uniform(0.2, 99, rows),
        documents=rng.integers(0, documents, rows),
    )


def _aligned(table: AlignedTable, rng: np.random.Generator, _: int) -> AlignedTable:
    keys, size = len(table.keys), len(table.tokens)
    return _some(
        replace(table, head=int(rng.integers(0, 5))),
        rng,
        first=_rising(rng, keys, size),
        tokens=rng.integers(0, table.vocab_size, size),
        counts=rng.integers(-9, 99, size),
        totals=rng.integers(1, 99, keys),
    )


def _bigrams(table: BigramTable, rng: np.random.Generator, _: int) -> BigramTable:
    logp = rng.choice([np.nan, np.inf, -np.inf, -1.0, 1e30], table.logp.shape)
    return _some(table, rng, tokens=rng.integers(0, table.vocab_size, logp.shape), logp=logp)
