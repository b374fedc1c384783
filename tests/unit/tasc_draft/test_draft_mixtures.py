"""Drafts of the mixtures are the best by published rules in plain Python, and fit a budget."""

import dataclasses
import math
from collections import Counter
from itertools import chain, combinations
from random import Random

import draft_cases as dc
import numpy as np
import pytest
from draft_checks import SLACK, Tree, assert_best, assert_valid, trees
from draft_reference import TascReference, TrieReference, followers
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft import NGRAM_SOURCES, DraftSettings
from tasc_draft.index.weights import CELLS, Weights
from tasc_draft.mixture.evidence import PLACES
from tasc_draft.mixture.memory import OPTIMISTIC_CHILD_PROB

tasc = st.builds(
    DraftSettings,
    mixture=st.just("tasc"),
    n_max=st.integers(2, 9),
    p_min=st.integers(1, 3),
    # Chances are float32: a path of many tiny shares would round to none.
    corpus_weight=st.sampled_from([0.0, 1.0, 0.75, 0.5]) | st.floats(0.1, 0.9),
    num_speculative_tokens=st.integers(0, 10),
    min_prob=dc.min_prob,
)
trie = st.builds(
    DraftSettings,
    mixture=st.just("trie"),
    n_max=st.integers(2, 9),
    prefix=st.integers(1, 5),
    num_speculative_tokens=st.integers(0, 10),
    min_prob=dc.min_prob,
)


def best_drafts(
    setting: DraftSettings, documents: list[list[int]], rows: list[dc.Row], branching: bool = True
) -> list[Tree]:
    """Each row's draft, all rows proposed in one call; each is the best by the published rule."""
    proposer = dc.started(dc.make_index(documents), setting, *rows, branching=branching)
    limits = [dc.limits_of(setting, max(limit, 0), branching) for *_, limit in rows]
    reference: TascReference | TrieReference = TrieReference(setting, dc.SEP)
    if setting.mixture == "tasc":
        counts = followers(documents, dc.SEP, dc.EOS, setting.n_max - 1)
        reference = TascReference(setting, counts, dc.SEP)
    drafts = dc.propose_all(proposer, rows)
    assert_valid(drafts, limits)
    for nodes, (prompt, answer, _), within in zip(trees(drafts), rows, limits, strict=True):
        assert_best(nodes, lambda path, p=prompt, a=answer: reference.chances(p, a, path), within)
    return trees(drafts)


@dc.examples(100, 300)
@given(tasc, dc.outputs, dc.rows, st.booleans())
def test_tasc_drafts_the_likeliest_paths(setting, outputs, rows, branching):
    best_drafts(setting, outputs, rows, branching)


@dc.examples(100, 300)
@given(trie, dc.rows, st.booleans())
def test_trie_drafts_the_most_frequent_paths(setting, rows, branching):
    best_drafts(setting, [], rows, branching)


@pytest.mark.parametrize("branching", [True, False])
def test_random_rows_reach_every_kind_of_draft(branching: bool) -> None:
    rng, seen = Random(5), Counter[str]()
    for mixture in ("tasc", "trie") * 150:
        setting = DraftSettings(
            mixture=mixture, corpus_weight=0.5, min_prob=rng.choice([0.02, 0.3]),
            num_speculative_tokens=4,
        )  # fmt: skip
        tokens = range(1, rng.choice([5, 12]))
        documents = [rng.choices(tokens, k=rng.randrange(9)) for _ in range(rng.randrange(30))]
        row = (rng.choices(tokens, k=20), rng.choices(tokens, k=rng.randrange(1, 6)), 4)
        (nodes,) = best_drafts(setting, documents, [row], branching)
        seen.update(f"{mixture} {node.source}" for node in nodes.values())
        seen[f"{mixture} full" if len(nodes) == 4 else f"{mixture} cut"] += 1
        seen[f"{mixture} ends"] += any(path[-1] == dc.EOS for path in nodes)
        seen[f"{mixture} branches"] += branches(nodes)
    kinds = ["tasc corpus", "tasc prompt", "trie prompt", "tasc ends"]
    kinds += ["tasc full", "tasc cut", "trie full", "trie cut"]
    kinds += ["tasc branches", "trie branches"] * branching
    assert min(seen[kind] for kind in kinds) > 10, seen


def branches(nodes: Tree) -> bool:
    return len({path[:-1] for path in nodes}) < len(nodes)


def test_drafts_follow_an_output_that_is_longer_than_the_longest_context() -> None:
    rng = Random(6)
    for _ in range(100):
        documents = [rng.choices(range(1, 4), k=30) for _ in range(3)]
        setting = DraftSettings(mixture="tasc", n_max=rng.randrange(2, 10), min_prob=0.01)
        best_drafts(setting, documents, [([], documents[0][: rng.randrange(10, 30)], 8)] * 3)


def chances(nodes: Tree) -> dict[tuple[int, ...], float]:
    return {path: round(math.exp(node.logp), 5) for path, node in nodes.items()}


def test_tasc_drafts_equal_the_worked_example() -> None:
    """SEP 1 is certain; then the corpus has 2, 2, 3 and the prompt has 4."""
    index, row = dc.make_index([[1, 2], [1, 2], [1, 3]]), ([5, 1, 4], [])
    published = dc.started(index, DraftSettings.published("tasc"), row)
    assert chances(dc.propose(published)) == {(0,): 0.25}  # nothing occurs five times
    proposer = dc.started(index, DraftSettings(mixture="tasc", min_prob=0.0), row)
    expected = {(1,): 1, (1, 2): 0.5, (1, 2, 0): 0.5, (1, 3): 0.25, (1, 3, 0): 0.25, (1, 4): 0.25}
    assert chances(dc.propose(proposer)) == expected


@pytest.mark.parametrize("mixture", ["mixed", "tasc", "trie"])
def test_tokens_outside_the_vocabulary_are_not_drafted(mixture: str) -> None:
    setting = DraftSettings(mixture=mixture, min_prob=0.0, learning_rate=0.0)
    for vocab_size, first in ((12, {2, 6}), (6, {2})):
        row = ([1, 6, 1, 2, 3], [1])
        proposer = dc.started(dc.make_index([[1, 6], [1, 2]]), setting, row, vocab_size=vocab_size)
        assert {path[0] for path in dc.propose(proposer)} & {2, 6} == first


def test_trie_drafts_equal_the_worked_example() -> None:
    """1 2 is the longest end of the answer that the prompt has; paths end six tokens from there."""
    setting = DraftSettings(mixture="trie", min_prob=0.0, num_speculative_tokens=32)
    row = ([1, 2, 3, 1, 2, 4, 2, 3, 5], [5, 1, 2])
    three, four = (3, 1, 2, 4), (4, 2, 3, 5)
    expected = {path[:n]: 0.5 for path in (three, four) for n in range(1, 5)}
    assert chances(dc.propose(dc.started(dc.make_index([[1, 2, 5]]), setting, row))) == expected


def test_trie_subtree_ends_with_the_prompt() -> None:
    """2 3 is at the prompt's end; the tokens after 3 with another prefix are another path."""
    setting = DraftSettings(mixture="trie", min_prob=0.0)
    proposer = dc.started(dc.make_index([]), setting, ([1, 3, 4, 2, 3], [1, 2]))
    assert chances(dc.propose(proposer)) == {(3,): 1}


def test_only_the_latest_positions_of_a_gram_are_counted() -> None:
    setting = DraftSettings(
        mixture="tasc", n_max=2, corpus_weight=0.0, num_speculative_tokens=1, min_prob=0.0
    )
    rows = [([1, 2] * 300 + [1, 3] * newer, [1]) for newer in (PLACES - 1, PLACES)]
    proposer = dc.started(dc.make_index([]), setting, *rows, capacity=800)
    for row, chance in enumerate((round(1 - 1 / PLACES, 5), 1)):
        assert chances(dc.propose(proposer, row)) == {(3,): chance}


def test_path_whose_probability_underflows_is_not_drafted() -> None:
    text = Random(1).choices(range(1, 12), k=300)
    setting = DraftSettings(mixture="tasc", n_max=2, num_speculative_tokens=256, min_prob=0.0)
    nodes = dc.propose(
        dc.started(dc.make_index([text]), setting, ([], []), rows=1, branching=False), 0, 256
    )
    assert 40 < len(nodes) < 256
    assert all(np.isfinite(node.logp) for node in nodes.values())


few = dc.examples(50, 150)


@few
@given(dc.indexes, dc.mixed, dc.rows)
def test_probabilities_of_a_node_sum_to_one(index, setting, rows):
    proposer = dc.started(index, setting, *rows)
    drafts = dc.propose_all(proposer, rows)
    nodes = proposer.memory.nodes[: drafts.offsets[-1] + sum(limit > 0 for *_, limit in rows)]
    for node in nodes:
        width = node["width"]
        if width:
            whole = np.abs(node["chance"][:width]).sum() + node["other_chance"]
            assert math.isclose(whole, 1, rel_tol=1e-5)
            assert len(set(node["candidates"][:width].tolist())) == width


@few
@given(dc.indexes, dc.mixed, dc.rows, st.integers(0, 12))
def test_shared_budget_goes_to_likely_paths_of_all_rows(index, setting, rows, budget):
    """A left-out path is likelier than a drafted one by at most the optimistic probability."""
    proposer = dc.started(index, setting, *rows)
    paths = trees(dc.propose_all(proposer, rows))
    drafts = dc.propose_all(proposer, rows, np.zeros(budget, np.float32))
    assert len(drafts.tokens) == min(budget, sum(map(len, paths)))
    left_out = []
    for some, every in zip(trees(drafts), paths, strict=True):
        assert some.items() <= every.items()
        left_out += [node.logp for path, node in every.items() if path not in some]
    if left_out and budget:
        assert min(drafts.logp) >= max(left_out) + math.log(OPTIMISTIC_CHILD_PROB) - SLACK


@few
@given(dc.indexes, dc.mixed, dc.rows, st.floats(0, 1, width=32), st.integers(0, 12))
def test_token_below_its_minimum_probability_is_not_drafted(index, setting, rows, bar, budget):
    proposer = dc.started(index, setting, *rows)
    full = trees(dc.propose_all(proposer, rows))
    drafts = dc.propose_all(proposer, rows, np.full(budget, bar, np.float32))
    assert len(drafts.tokens) <= budget
    assert (np.exp(drafts.logp.astype(float)) >= bar * (1 - SLACK)).all()
    worth = 0
    for some, every, (*_, limit) in zip(trees(drafts), full, rows, strict=True):
        likely = {path for path, node in every.items() if math.exp(node.logp) > bar * (1 + SLACK)}
        worth += len(likely)
        if len(drafts.tokens) < budget:
            assert likely <= some.keys()
        if not some.keys() <= every.keys():  # less likely nodes fill the whole draft
            assert len(every) == dc.limits_of(setting, max(limit, 0)).max_tokens
    assert len(drafts.tokens) >= min(budget, worth)


def test_drafts_name_only_used_sources() -> None:
    prompts, outputs = dc.tagged_rows(9, 3)
    # Weights at random, so that evidence may also speak against what it speaks of.
    values = np.random.default_rng(3).normal(0, 3, CELLS)
    index = dataclasses.replace(dc.full_index(), weights=Weights(values.astype(np.float32)))
    named = set()
    for asked in chain.from_iterable(
        combinations(NGRAM_SOURCES, n) for n in range(len(NGRAM_SOURCES) + 1)
    ):
        setting = DraftSettings(min_prob=0.0, sources=asked, recent_tokens=48)
        proposer = dc.make_proposer(index, setting)
        for prompt, output in zip(prompts, outputs, strict=True):
            dc.begun(proposer, 0, prompt, output)
            proposer.finish(0)
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            dc.begun(proposer, row, [*output, *prompt], output[:1])
        drafts = proposer.propose(dc.ids(range(3)), dc.ids([10] * 3))
        here = {NGRAM_SOURCES[source] for source in drafts.source}
        assert here <= set(asked)
        named |= here
    assert named == set(NGRAM_SOURCES)
