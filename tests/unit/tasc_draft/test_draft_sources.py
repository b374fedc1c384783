"""Tests that each source drafts from its own data, and weights follow the target's tokens."""

import dataclasses
import json
import math
from random import Random

import draft_cases as dc
import numpy as np
import pytest
from draft_checks import Tree
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.draft.default_weights import prior
from support import refused
from tasc_draft import (
    NGRAM_SOURCES,
    BigramTable,
    DraftError,
    DraftIndex,
    DraftSettings,
    NgramProposer,
)
from tasc_draft.index.weights import Weights

EMPTY = DraftIndex.empty(dc.FINGERPRINT, dc.VOCAB)


def drafting(*sources: str) -> DraftSettings:
    return DraftSettings(
        sources=sources, min_prob=0.0, num_speculative_tokens=16, recent_tokens=48, learning_rate=0
    )


def chain(index: DraftIndex, sources: str, *rows: tuple[list[int], list[int]]) -> NgramProposer:
    """Returns a proposer of chains from these sources, for rows with a prompt and an answer."""
    return dc.started(index, drafting(*sources.split()), *rows, branching=False)


def likeliest_path(nodes: Tree) -> list[int]:
    """The tokens of a chain."""
    return list(max(nodes, key=len, default=()))


def named(nodes: Tree) -> set[str]:
    return {node.source for node in nodes.values()}


def test_neighbours_draft_answers_of_similar_prompts() -> None:
    """The prompt's first token determines the output's second one; the corpus alone does not."""
    rng = Random(1)
    rows = [(key, rng.randrange(6, 11)) for key in range(1, 6) for _ in range(12)]
    index = dc.make_index([[11, 5 + key] for key, _ in rows], [[key, noise] for key, noise in rows])
    for key in range(1, 6):
        for sources in ("neighbours", "corpus neighbours"):
            nodes = dc.propose(chain(index, sources, ([key, 11], [])))
            assert likeliest_path(nodes) == [11, 5 + key, dc.EOS]
            assert named(nodes) <= {*sources.split()}
        assert likeliest_path(dc.propose(chain(index, "corpus", ([key, 11], [])))) == [
            11,
            6,
            dc.EOS,
        ]


def test_most_similar_neighbour_counts_most() -> None:
    rng = Random(4)
    noise = [rng.choices(range(1, 8), k=6) for _ in range(40)]
    like, unlike = [8, 9, 10, 11], [8, 11, 11, 11]
    for prompt, other in ((like, unlike), (unlike, like)):
        index = dc.make_index([[6], [7], *([1] for _ in noise)], [prompt, other, *noise])
        nodes = dc.propose(dc.started(index, drafting("neighbours"), (prompt, [])))
        assert nodes[6,].logp > nodes[7,].logp + 0.1


def test_aligned_source_drafts_the_tag_of_each_word() -> None:
    tags, rng = {(2,): 8, (2, 1): 10, (4,): 6}, Random(2)
    sentences = [rng.choices([*tags], k=rng.randrange(1, 5)) for _ in range(80)]
    prompts = [[token for word in words for token in word] for words in sentences]
    outputs = [[tags[word] for word in words] for words in sentences]
    longer_than_any = [4, 2, 2, 1, 2, 1, 4, 2, 4]
    proposer = chain(dc.make_index(outputs, prompts, dc.STARTS), "aligned", (longer_than_any, []))
    nodes = dc.propose(proposer)
    assert (likeliest_path(nodes), named(nodes)) == ([6, 8, 10, 10, 6, 8, 6, dc.EOS], {"aligned"})
    proposer.observe(0, dc.ids([6, 8, 10]))
    assert likeliest_path(dc.propose(proposer)) == [10, 6, 8, 6, dc.EOS]


def test_recent_answers_are_drafted() -> None:
    proposer = chain(EMPTY, "corpus recent", ([5], [3, 1, 4, dc.EOS]), ([6], []))
    assert likeliest_path(dc.propose(proposer, 1)) == []
    proposer.finish(0)
    nodes = dc.propose(proposer, 1)
    assert (likeliest_path(nodes), named(nodes)) == ([3, 1, 4, dc.EOS], {"recent"})


def test_bigrams_draft_without_other_evidence() -> None:
    following = (np.arange(dc.VOCAB, dtype=np.int32) + 1) % dc.VOCAB
    tokens = np.stack([following, (following + 1) % dc.VOCAB], 1)
    logp = np.log(np.full((dc.VOCAB, 2), [0.9, 0.1])).astype(np.float32)
    table = BigramTable("a target", dc.FINGERPRINT, dc.VOCAB, tokens, logp)
    proposer = chain(dataclasses.replace(EMPTY, bigrams=table), "corpus bigrams", ([5], []))
    assert likeliest_path(dc.propose(proposer)) == []
    proposer.observe(0, dc.ids([7]))
    nodes = dc.propose(proposer)
    assert (likeliest_path(nodes), named(nodes)) == ([8, 9, 10, 11, dc.EOS], {"bigrams"})


@pytest.mark.parametrize(
    ("prompt", "answer", "blanks", "copied"),
    [
        ([1, 2, 3, 4, 5], [2, 3], False, [4, 5]),  # the mark follows, which is never emitted
        ([], [1, 2, 3, 1, 2], False, [*(3, 1, 2) * 5, 3]),
        ([1, 9, 4, 5], [3], False, []),
        ([1, 9, 4, 5], [3], True, [4, 5]),
        *(([1, 9, 4, 5], [1], blanks, [9, 4, 5]) for blanks in (False, True)),
    ],
)
def test_prompt_and_answer_are_copied(prompt, answer, blanks, copied):
    """With ``blanks``, token 3 is token 9 without its leading blank."""
    canonical = np.array([*range(9), 3, *range(10, dc.VOCAB + 1)], np.int32)
    index = dataclasses.replace(EMPTY, canonical=canonical) if blanks else EMPTY
    nodes = dc.propose(chain(index, "prompt", (prompt, answer)))
    assert (likeliest_path(nodes), named(nodes)) == (copied, {"prompt"} if copied else set())


def test_corpus_drafts_the_most_frequent_output() -> None:
    index = dc.make_index([[1, 2]] * 3 + [[1, 3]])
    nodes = dc.propose(dc.started(index, drafting("corpus"), ([5], [])))
    assert nodes[1, 2].logp > nodes[1, 3].logp
    assert nodes[1,].logp > nodes[1, 2].logp
    assert named(nodes) == {"corpus"}


LIMITS = {
    "num_speculative_tokens": (0, 256),
    "min_prob": (0.0, 1.0),
    "n_max": (2, 16),
    "p_min": (1, 2**31 - 1),
    "corpus_weight": (0.0, 1.0),
    "prefix": (1, 8),
    "neighbours": (0, 256),
    "neighbour_tokens": (0, 1 << 20),
    "recent_tokens": (0, 1 << 20),
    "learning_rate": (0.0, 1.0),
}


def test_every_setting_has_limits() -> None:
    numbers = {f.name for f in dataclasses.fields(DraftSettings) if f.type in (int, float)}
    assert numbers == set(LIMITS)


@pytest.mark.parametrize("name", LIMITS)
def test_settings_may_equal_their_limits_but_not_exceed_them(name: str) -> None:
    least, most = LIMITS[name]
    step = 0.01 if isinstance(least, float) else 1
    for limit in (least, most):
        assert getattr(DraftSettings(**{name: limit}), name) == limit
    for value in (least - step, most + step, float("nan")):
        with refused(DraftError, name):
            DraftSettings(**{name: value})


@pytest.mark.parametrize(
    ("unknown", "named"),
    [({"mixture": "best"}, "'best'"), ({"sources": ("corpus", "oracle")}, "'oracle'")],
)
def test_unknown_mixture_is_refused(unknown: dict[str, object], named: str) -> None:
    with refused(DraftError, named):
        DraftSettings(**unknown)


def test_settings_survive_json() -> None:
    settings = DraftSettings(sources=("prompt", "corpus"), min_prob=0.5)
    again = DraftSettings(**json.loads(json.dumps(dataclasses.asdict(settings))))
    assert (again, hash(again)) == (settings, hash(settings))
    assert DraftSettings().sources == NGRAM_SOURCES


def test_published_settings_equal_the_settings_of_the_papers() -> None:
    tasc, trie = DraftSettings.published("tasc"), DraftSettings.published("trie")
    numbers = tasc.n_max, tasc.p_min, tasc.corpus_weight, tasc.min_prob
    assert (tasc.mixture, *numbers) == ("tasc", 6, 5, 0.75, 0.0)
    assert (trie.mixture, trie.n_max, trie.prefix, trie.min_prob) == ("trie", 13, 3, 0.0)
    with refused(DraftError, "'mixed'"):
        DraftSettings.published("mixed")


# Token 2 follows token 1 in the corpus, but neither in prompts nor in the target's answers.
INDEX = dataclasses.replace(dc.make_index([[1, 2]] * 20), weights=prior())


def learner(rate: float, index: DraftIndex = INDEX) -> NgramProposer:
    setting = DraftSettings(
        min_prob=0.0, recent_tokens=0, learning_rate=rate, num_speculative_tokens=8
    )
    return dc.make_proposer(index, setting)


def answer(proposer: NgramProposer, prompt: list[int], *parts: list[int]) -> Tree:
    """Runs one row with its answer in parts; returns the first draft."""
    proposer.start(0, dc.ids(prompt))
    first = dc.propose(proposer)
    for n, part in enumerate(parts):
        if n:
            dc.propose(proposer)
        proposer.observe(0, dc.ids(part))
    proposer.finish(0)
    return first


def chance(proposer: NgramProposer, prompt: list[int], path: tuple[int, ...]) -> float:
    """Returns the chance of a path from the start of the answer, without learning."""
    nodes = answer(proposer, prompt)
    return math.exp(nodes[path].logp) if path in nodes else 0.0


def test_learning_raises_repeated_answers() -> None:
    proposer = learner(0.1)
    prompt = [1, 3, 4]
    copied, usual = (1, 3), (1, 2)
    before = chance(proposer, prompt, copied)
    for _ in range(10):
        was = chance(proposer, prompt, copied), chance(proposer, prompt, usual)
        answer(proposer, prompt, [1], [3], [dc.EOS])
        assert chance(proposer, prompt, copied) > was[0]
        assert chance(proposer, prompt, usual) < was[1]
    assert chance(proposer, prompt, copied) > before + 0.1
    # The kind of evidence was learnt and not the token, and the index did not change.
    assert chance(proposer, [1, 5, 4], (1, 5)) > chance(learner(0.1), [1, 5, 4], (1, 5)) + 0.1
    np.testing.assert_array_equal(INDEX.weights.values, prior().values)


def test_learning_rate_zero_learns_nothing() -> None:
    proposer = learner(0.0, dc.full_index())
    before = proposer.weights.values
    for prompt, output in zip(*dc.tagged_rows(3, 10), strict=True):
        answer(proposer, prompt, *([token] for token in (*output, dc.EOS)))
    np.testing.assert_array_equal(proposer.weights.values, before)
    assert (proposer.moved == 0).all()


def test_new_proposer_uses_the_weights_of_its_index() -> None:
    """The warm-up of a new proposer changes no weight and stores no answer."""
    proposer = dc.make_proposer(INDEX, DraftSettings(learning_rate=0.5, min_prob=0.0))
    np.testing.assert_array_equal(proposer.weights.values, prior().values)
    assert {node.source for node in answer(proposer, []).values()} == {"corpus"}


def test_teach_learns_the_same_weights_as_answering() -> None:
    taught, answered = learner(0.1), learner(0.1)
    for _ in range(3):
        taught.teach(dc.ids([1, 3, 4]), dc.ids([1, 3, dc.EOS]), 0.1)
        answer(answered, [1, 3, 4], [1], [3], [dc.EOS])
    np.testing.assert_array_equal(taught.weights.values, answered.weights.values)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_answer_observed_at_once_teaches_along_the_drafted_path(emitted: list[int]) -> None:
    """Only the tokens on the drafted path and the first token off the path are learnt from."""
    proposer, stepwise = learner(0.1), learner(0.1)
    nodes = answer(proposer, [1, 3, 4], emitted)
    depth = 0
    while depth < len(emitted) and tuple(emitted[:depth]) in ((), *nodes):
        depth += 1
    assert (proposer.moved > 0).any()
    answer(stepwise, [1, 3, 4], emitted[:depth])
    np.testing.assert_array_equal(proposer.moved, stepwise.moved)


def test_weights_learn_from_every_branch_of_a_tree() -> None:
    """The tokens after a child of a node are learnt from, whichever child the answer takes."""
    index = dataclasses.replace(dc.make_index([[1, 2], [3, 4], [5, 6]]), weights=prior())
    for first in (1, 3, 5):
        less, more = learner(0.1, index), learner(0.1, index)
        assert {(1, 2), (3, 4), (5, 6)} <= answer(less, [], [first]).keys()
        answer(more, [], [first, first + 1])
        assert 0 < less.moved.sum() < more.moved.sum()


def test_row_does_not_learn_from_other_rows() -> None:
    """In the second step only row 1 drafts, so its tree is stored where row 0's tree was."""
    proposer = learner(0.5)
    dc.begun(proposer, 0, [1, 3, 4], [])
    dc.begun(proposer, 1, [1, 2], [1])
    proposer.propose(dc.ids([0, 1]), dc.ids([8, 8]))
    proposer.propose(dc.ids([1]), dc.ids([8]))
    proposer.observe(0, dc.ids([1, 3]))
    proposer.finish(0)
    assert (proposer.moved == 0).all()
    proposer.observe(1, dc.ids([2]))
    proposer.finish(1)
    assert (proposer.moved > 0).any()


def test_learnt_weights_are_dropped_with_the_index() -> None:
    proposer = learner(0.5)
    proposer.start(0, dc.ids([1, 3, 4]))
    dc.propose(proposer)
    proposer.observe(0, dc.ids([1, 3]))
    proposer.set_index(dc.full_index())
    dc.propose(proposer)
    np.testing.assert_array_equal(proposer.weights.values, Weights.initial().values)
    assert (proposer.moved == 0).all()
