"""Tests that a damaged index is refused or drafts worse, without access out of bounds.

The last test runs those before it once more with numba's bounds checks.
"""

import dataclasses
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import draft_cases as dc
import numpy as np
import pytest
from draft_checks import Limits, assert_valid

from support import DEADLINE_S, refused
from tasc_draft import DraftError, DraftIndex, Drafts, DraftSettings, NgramProposer
from tasc_draft.index.weights import Weights
from tasc_draft.labels import LabelTrie

RNG = Random(0)
PROMPTS = [RNG.choices([2, 4, 6], k=RNG.randrange(1, 9)) for _ in range(300)]
OUTPUTS = [[RNG.choice([word, 8, 10]) for word in prompt] for prompt in PROMPTS]
INDEX = dataclasses.replace(
    dc.make_index(OUTPUTS, PROMPTS, dc.STARTS),
    canonical=np.arange(dc.SEP + 1, dtype=np.int32),
    bigrams=dc.bigram_table(1),
    weights=Weights(Weights.initial().values.copy()),
)
LABELS = LabelTrie.of([[*output, dc.EOS] for output in OUTPUTS])
PARTS = {"corpus": INDEX.corpus, "inputs": INDEX.inputs, "aligned": INDEX.aligned}
PARTS |= {"bigrams": INDEX.bigrams, "weights": INDEX.weights, "": INDEX}
ARRAYS = [
    (part, name)
    for part, whole in PARTS.items()
    for name, value in vars(whole).items()
    if isinstance(value, np.ndarray)
]
Change = Callable[[np.ndarray], np.ndarray]
MIXTURES = ("mixed", "tasc", "trie")


def changed(part: str, name: str, change: Change) -> DraftIndex:
    """The index with one array changed."""
    whole = dataclasses.replace(PARTS[part], **{name: change(getattr(PARTS[part], name))})
    return dataclasses.replace(INDEX, **{part: whole}) if part else whole


def assert_refused(part: str, name: str, change: Change) -> None:
    with refused(DraftError, "again"):
        changed(part, name, change).check_integrity()


@pytest.mark.parametrize(("part", "name"), ARRAYS)
def test_arrays_of_wrong_length_or_type_are_refused(part: str, name: str) -> None:
    for change in (
        lambda array: array[:-1],
        lambda array: array[:0],
        lambda array: array[..., None],
        lambda array: array.astype(np.float64),
        lambda array: array.astype(np.int64),
    ):
        assert_refused(part, name, change)


def put(*at: Any) -> Change:
    """The array with a value, the last, at a place."""

    def change(array: np.ndarray) -> np.ndarray:
        array, (*place, value) = array.copy(), at
        array[tuple(place)] = value(array) if callable(value) else value
        return array

    return change


PLACES = len(INDEX.corpus.text) - INDEX.corpus.depth
USED = int(np.flatnonzero(INDEX.corpus.hot_slots[:, 3])[0])
POSTED = int(INDEX.inputs.postings[0])
FULL = int(np.flatnonzero(np.diff(INDEX.inputs.first))[0])
LIMITS: list[tuple[str, str, Change]] = [
    ("corpus", "text", put(1, dc.SEP + 1)),
    ("corpus", "text", put(1, -1)),
    ("corpus", "text", put(1, -2)),
    ("corpus", "text", put(-1, 0)),
    ("corpus", "text", lambda text: np.append(text, text[-1:])),
    ("corpus", "offsets", put(0, 1)),
    ("corpus", "offsets", put(-1, PLACES + 1)),
    ("corpus", "offsets", put(1, 2)),
    ("corpus", "offsets", put(1, -(2**31))),
    ("corpus", "order", put(3, -1)),
    ("corpus", "order", put(3, PLACES)),
    ("corpus", "cumulative", put(0, -1)),
    ("corpus", "cumulative", put(4, lambda counts: counts[3])),
    ("corpus", "cumulative", put(4, 2**31 - 1)),
    ("corpus", "hot_slots", put(slice(None), 3, 1)),
    ("corpus", "hot_slots", lambda slots: np.concatenate([slots, slots[:1]])),
    ("corpus", "hot_slots", put(USED, 3, 9)),
    ("corpus", "hot_slots", put(USED, 3, -1)),
    ("corpus", "hot_slots", put(USED, 2, -1)),
    ("corpus", "hot_slots", put(USED, 2, len(INDEX.corpus.hot_next))),
    ("corpus", "hot_slots", put(USED, 2, 2**31 - 1)),
    ("corpus", "hot_next", put(0, 0, -1)),
    ("corpus", "hot_next", put(0, 0, dc.SEP + 1)),
    ("corpus", "hot_next", put(0, 1, 0)),
    ("corpus", "hot_next", put(0, 2, -1)),
    ("corpus", "hot_next", put(0, 2, lambda following: following[0, 3])),
    ("corpus", "hot_next", put(0, 3, len(INDEX.corpus.order) + 1)),
    ("inputs", "slots", put(1, -1)),
    ("inputs", "slots", put(1, len(INDEX.inputs.keys) + 1)),
    ("inputs", "keys", put(1, lambda keys: keys[0])),
    ("inputs", "first", put(0, 1)),
    ("inputs", "first", put(1, -1)),
    ("inputs", "first", put(1, len(INDEX.inputs.postings) + 1)),
    ("inputs", "first", put(-1, len(INDEX.inputs.postings) + 1)),
    ("inputs", "postings", put(0, -1)),
    ("inputs", "postings", put(0, INDEX.inputs.rows)),
    *(("inputs", "weights", put(FULL, value)) for value in (0, -1, 1e-30, 1e30, math.nan)),
    *(("inputs", "norms", put(POSTED, value)) for value in (0, -1, math.nan)),
    ("inputs", "documents", put(0, -1)),
    ("inputs", "documents", put(0, len(INDEX.corpus.offsets) - 1)),
    ("aligned", "slots", put(1, -1)),
    ("aligned", "slots", put(-1, len(INDEX.aligned.keys) + 1)),
    ("aligned", "slots", lambda slots: slots[-1:]),
    ("aligned", "first", put(0, 1)),
    ("aligned", "first", put(1, -1)),
    ("aligned", "first", put(-1, len(INDEX.aligned.tokens) + 1)),
    ("aligned", "first", put(1, len(INDEX.aligned.tokens) + 1)),
    ("aligned", "tokens", put(0, -1)),
    ("aligned", "tokens", put(0, dc.VOCAB)),
    ("aligned", "totals", put(0, 0)),
    ("bigrams", "tokens", put(2, 1, -1)),
    ("bigrams", "tokens", put(2, 1, dc.VOCAB)),
    *(("weights", "values", put(5, value)) for value in (math.nan, math.inf, -1e7)),
    ("", "canonical", put(3, -1)),
    ("", "canonical", put(3, dc.SEP + 1)),
]


@pytest.mark.parametrize(("part", "name", "change"), LIMITS)
def test_out_of_bounds_references_are_refused(part: str, name: str, change: Change) -> None:
    assert_refused(part, name, change)


LARGER = dc.make_index(OUTPUTS, PROMPTS, np.append(dc.STARTS, True), vocab_size=dc.VOCAB + 1)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("corpus", "depth", 1),
        ("corpus", "depth", INDEX.corpus.depth + 1),
        ("corpus", "depth", 64),
        ("corpus", "vocab_size", dc.VOCAB - 1),
        ("corpus", "vocab_size", 2**21),
        ("inputs", "rows", 1),
        ("inputs", "rows", INDEX.inputs.rows - 1),
        ("aligned", "head", -1),
        ("aligned", "head", 2**31),
        ("bigrams", "vocab_size", 1),
        ("bigrams", "vocab_size", dc.VOCAB + 1),
        ("bigrams", "fingerprint", "e" * 32),
        ("", "corpus", dc.make_index([[1]]).corpus),
        ("", "corpus", DraftIndex.empty(dc.FINGERPRINT, dc.VOCAB).corpus),
        ("", "word_starts", None),
        ("", "aligned", LARGER.aligned),
        ("", "bigrams", dc.bigram_table(1, vocab_size=dc.VOCAB + 1)),
    ],
)
def test_wrong_numbers_and_foreign_parts_are_refused(part: str, field: str, value: Any):
    with refused(DraftError, "again"):
        changed(part, field, lambda _: value).check_integrity()


def drafting(mixture: str) -> NgramProposer:
    settings = DraftSettings(
        mixture=mixture, min_prob=0.0, num_speculative_tokens=8, p_min=1, recent_tokens=0,
        neighbours=6, neighbour_tokens=64, learning_rate=0.2,
    )  # fmt: skip
    return dc.make_proposer(INDEX, settings)


def draft(proposer: NgramProposer, rng: np.random.Generator) -> int:
    """Rows are begun, drafted for, answered and ended; returns how many tokens were drafted.

    The last row is limited to labels.
    """
    answers = [OUTPUTS[at] for at in rng.integers(len(OUTPUTS), size=3)]
    for row, at in enumerate(rng.integers(len(PROMPTS), size=3)):
        proposer.start(row, dc.ids(PROMPTS[at]), LABELS if row == 2 else None)
    external = Drafts(
        dc.ids([8, 10] * 3), dc.ids([-1, 0] * 3), np.array([1, 2] * 3, np.int16),
        dc.ids([0, 2, 4, 6]), np.array([-0.5, -0.9] * 3, np.float32), np.full(6, 6, np.int8),
    )  # fmt: skip
    n, most = 0, [Limits(9, dc.TARGET, dc.SEP, (dc.EOS,))] * 3
    for step in range(6):
        others = external if step % 2 else None
        drafts = proposer.propose(dc.ids(range(3)), dc.ids([9] * 3), None, others)
        assert_valid(drafts, most)
        n += len(drafts.tokens)
        for row in range(3):
            accepted = drafts.tokens[drafts.offsets[row] : drafts.offsets[row + 1]][:3]
            proposer.observe(row, accepted.copy() if rng.random() < 0.7 else dc.ids(answers[row]))
    for row in range(3):
        proposer.finish(row)
    return n


def assert_drafts_as_new(proposer: NgramProposer, mixture: str) -> None:
    """Asserts that damaged indexes have no effect after the intact index is used again."""
    drafted = []
    proposer.set_index(INDEX)
    for each in (proposer, drafting(mixture)):
        dc.begun(each, 0, [2, 4, 6, 2, 4], [2])
        drafted.append(dc.propose(each))
    assert drafted[0] == drafted[1] != {}


def wrong(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns an array with its own values in another order, or with one other value.

    That is one of its own, next to one, or anything.
    """
    array = array.copy()
    flat = array.reshape(-1)
    if rng.random() < 0.3:
        return rng.permuted(flat).reshape(array.shape)
    at, other = rng.integers(len(flat)), rng.choice(flat)
    if array.dtype.kind == "f":
        flat[at] = rng.choice([other, 0, -1, 1e-30, 1e30, math.inf, math.nan])
    elif array.dtype.kind == "b":
        flat[at] = not flat[at]
    else:
        info = np.iinfo(array.dtype)
        wanted = rng.choice([other, flat[at] + 1, flat[at] - 1, len(flat), 0, -1, 2**31 - 1])
        flat[at] = np.clip(wanted, info.min, info.max)
    return array


@pytest.mark.parametrize(("part", "name"), ARRAYS)
def test_wrong_array_is_refused_or_drafts_valid_trees(part, name, everything, seed):
    rng, seen = np.random.default_rng(seed), Counter[str]()
    mixture = str(rng.choice(MIXTURES))
    proposer = drafting(mixture)
    for _ in range(200 if everything else 25):
        index = changed(part, name, lambda array: wrong(array, rng))
        try:
            index.check_integrity()
        except DraftError:
            seen["refused"] += 1
            continue
        proposer.set_index(index)
        seen["drafted"] += draft(proposer, rng) > 0
    assert seen.total() == (200 if everything else 25), seen
    assert_drafts_as_new(proposer, mixture)
    assert seen["refused"] or name in ("logp", "counts", "word_starts"), seen


@pytest.mark.slow("compiles drafting once more")
def test_damaged_index_causes_no_access_outside_arrays(tmp_path: Path) -> None:
    bounds = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env=os.environ | bounds, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout
