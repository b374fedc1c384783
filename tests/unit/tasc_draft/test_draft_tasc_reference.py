"""Drafts are equal to those of the paper's rule written down in plain Python."""

import random
from collections import Counter

from draft_reference import (
    EOS,
    OCCURRENCES,
    Guess,
    Reference,
    guesses,
    ids,
    make_index,
    make_proposer,
    ngram_counts,
    propose,
    same,
)
from draft_strategies import documents, drafting, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import DraftSettings
from tasc_draft.kernels import MAX_OCCURRENCES

Row = tuple[list[int], list[int], int]


def both(
    documents: list[list[int]], rows: list[Row], setting: DraftSettings, n_max: int, p_min: int
) -> list[tuple[list[Guess], list[Guess]]]:
    """(ours, the reference's) for each row, all rows proposed in one call."""
    proposer = make_proposer(make_index(documents, n_max, p_min), setting, rows=len(rows))
    order = list(reversed(range(len(rows))))
    for row, (prompt, answer, _) in enumerate(rows):
        proposer.start(row, ids(prompt))
        proposer.observe(row, ids(answer))
    drafts = proposer.propose(ids(order), ids([rows[row][2] for row in order]))
    reference = Reference(setting, ngram_counts(documents, n_max, p_min))
    return [(guesses(drafts, at), reference.draft(*rows[row])) for at, row in enumerate(order)]


@settings(deadline=None, max_examples=400)
@given(
    documents,
    st.lists(rows, min_size=1, max_size=4),
    drafting,
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_drafts_equal_the_references(
    documents: list[list[int]], rows: list[Row], setting: DraftSettings, n_max: int, p_min: int
) -> None:
    for ours, expected in both(documents, rows, setting, n_max, p_min):
        assert same(ours, expected), (ours, expected)


def test_random_rows_reach_every_kind_of_draft_and_equal_the_references() -> None:
    rng = random.Random(5)
    seen: Counter[str] = Counter()
    for _ in range(400):
        docs = [rng.choices(range(1, 5), k=rng.randrange(9)) for _ in range(rng.randrange(9))]
        row = (rng.choices(range(1, 5), k=12), rng.choices(range(1, 5), k=rng.randrange(6)), 6)
        setting = DraftSettings(corpus_weight=0.5, min_prob=0.05)
        [(ours, expected)] = both(docs, [row], setting, 6, 1)
        assert same(ours, expected), (ours, expected)
        seen.update(source for _, _, source in ours)
        ended = "eos" if ours and ours[-1][0] == EOS else "cut" if len(ours) < 6 else "full"
        seen[ended if ours else "empty"] += 1
    assert min(seen[kind] for kind in ("corpus", "prompt", "eos", "cut", "full")) > 10, seen


def test_only_the_latest_occurrences_in_the_prompt_are_counted() -> None:
    assert MAX_OCCURRENCES == OCCURRENCES
    setting = DraftSettings(n_max=2, corpus_weight=0.0, num_speculative_tokens=1)
    proposer = make_proposer(make_index([]), setting, capacity=2000)
    old, recent = [1, 2] * 300, [1, 3] * (OCCURRENCES - 1)
    for row, prompt in enumerate(([*old, *recent, 1], [*old, *recent, 1, 3, 1])):
        proposer.start(row, ids(prompt))
        expected = Reference(setting, {(): 0}).draft(prompt, [], 1)
        assert same(propose(proposer, row), expected)
        assert expected[0][0] == 3
    within, full = propose(proposer, 0)[0][1], propose(proposer, 1)[0][1]
    assert within < full == 0.0  # one old occurrence is looked at, then none


def test_places_inside_a_draft_do_not_use_up_occurrences() -> None:
    setting = DraftSettings(num_speculative_tokens=64, min_prob=0.0)
    prompt = [1] * (OCCURRENCES + 10)
    proposer = make_proposer(make_index([]), setting, capacity=200)
    proposer.start(0, ids(prompt))
    expected = Reference(setting, {(): 0}).draft(prompt, [], 64)
    assert same(propose(proposer, 0), expected)
    assert [token for token, _, _ in expected] == [1] * 64
