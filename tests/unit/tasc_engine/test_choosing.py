"""Compiled code and tensors choose what a plain reading of the rule chooses, in any draft tree."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from choosing_cases import Asked, allowed_of, alone, both, chooser_of, expected
from draft_trees import forest
from hypothesis import strategies as st

from paired import paired
from tasc_engine import Sampling, choosing_tensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
EACH = {
    "temperature": Sampling(temperature=1.0),
    "cold": Sampling(temperature=1e-5, seed=3),
    "top_p": Sampling(temperature=1.0, top_p=0.6),
    "top_k": Sampling(temperature=1.0, top_k=3),
    "min_p": Sampling(temperature=1.0, min_p=0.3),
    "repetition": Sampling(repetition_penalty=1.8),
    "presence": Sampling(presence_penalty=1.5),
    "frequency": Sampling(frequency_penalty=0.7),
    "bias": Sampling(logit_bias=((1, 2.0), (5, -100.0))),
}

tokens_of_tree = st.integers(0, 3)
trees = st.integers(0, 6).flatmap(
    lambda n: st.tuples(
        st.tuples(*(st.integers(-1, i - 1) for i in range(n))),
        st.tuples(*(tokens_of_tree for _ in range(n))),
    )
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 1e-5, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 100, 10**6]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.6]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.1]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([1.0, -2.5, 100.0, -1e4, 1e4])),
        max_size=2,
        unique_by=lambda pair: pair[0],
    ).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    prompt=st.integers(0, 3),
    choice=st.integers(0, 3),
)
few = st.lists(st.integers(0, 3), max_size=5).map(tuple)
rows_asked = st.lists(
    st.tuples(st.builds(Asked, samplings, few.map(lambda t: (0, *t)), few), trees),
    min_size=1,
    max_size=3,
)


@st.composite
def lines(draw, n: int, vocab_size: int) -> torch.Tensor:
    """Peaked and flat, with equal ones, and some that nothing is chosen by."""
    make = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = make.standard_normal((n, vocab_size)) * draw(st.sampled_from([0.05, 1.0, 4.0, 40.0]))
    if draw(st.booleans()):
        x = x.round()
    x[make.random(x.shape) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.9]))] = -np.inf
    if draw(st.integers(0, 9)) == 0:
        x[make.integers(n), make.integers(vocab_size)] = np.nan
    return torch.from_numpy(x).to(draw(st.sampled_from(DTYPES)))


def test_every_visited_place_takes_what_the_rule_says(examples) -> None:
    sizes = st.sampled_from([4, 16, 63, 64, 65, 200])
    examples(60, 200, asked=rows_asked, vocab_size=sizes, data=st.data())(takes_what_the_rule_says)


def takes_what_the_rule_says(asked: Any, vocab_size: int, data: Any) -> None:
    sizes = [len(tree) + 1 for _, (tree, _) in asked]
    logits = data.draw(lines(sum(sizes), vocab_size))
    every = set(range(vocab_size))
    some = st.integers(0, 2**20).map(
        lambda seed: set(np.flatnonzero(np.random.default_rng(seed).random(vocab_size) < 0.4))
    )
    sets = data.draw(st.lists(some | st.just(every) | st.just(set()), max_size=2))
    mask_of = data.draw(st.tuples(*[st.integers(-1, len(sets) - 1)] * sum(sizes)))
    allowed = allowed_of(sets, mask_of, vocab_size) if sets else None
    found = both(
        chooser_of([one for one, _ in asked], vocab_size),
        logits,
        range(len(asked)),
        forest([tree for _, (tree, _) in asked], [tokens for _, (_, tokens) in asked]),
        allowed,
    )
    own = [sets[k] if k >= 0 else None for k in mask_of]
    for (one, (tree, tokens)), end in zip(asked, np.cumsum(sizes), strict=True):
        here = slice(end - len(tree) - 1, end)
        assert found[here] == expected(one, logits[here], tree, tokens, own[here])


@pytest.mark.parametrize(("spread", "dtype"), paired([0.1, 1.5, 5.0], by=DTYPES))
def test_a_large_vocabulary_is_cut_where_a_sorted_one_would_be(spread, dtype) -> None:
    """More than are ranked at first, whole blocks of them, and equal ones at the cut."""
    make = np.random.default_rng(int(spread * 10))
    rules = [
        Sampling(temperature=t, top_p=p, top_k=k, min_p=m, seed=seed)
        for seed, (t, p, k, m) in enumerate(
            (t, p, k, m)
            for t in (0.5, 1.0)
            for p in (1.0, 0.9999, 0.95, 0.5)
            for k in (0, 1, 40, 90, 1500, 2999)
            for m in (0.0, 1e-3)
        )
    ]
    x = torch.from_numpy(make.standard_normal((len(rules), 3000)) * spread).to(dtype)
    asked = [Asked(rule) for rule in rules]
    found = both(chooser_of(asked, 3000), x, range(len(rules)))
    assert found == [expected(one, x[i : i + 1], (), (), [None])[0] for i, one in enumerate(asked)]
    assert len(set(found)) > 20


def test_places_that_do_not_fit_at_once_are_taken_in_turns(monkeypatch) -> None:
    asked = [Asked(replace(rule, presence_penalty=0.5), answer=(1, 2)) for rule in EACH.values()]
    drafts = forest([(-1, 0, -1)] * len(asked), [(1, 2, 3)] * len(asked))
    logits = torch.randn(4 * len(asked), 12, dtype=torch.float64)
    allowed = allowed_of([set(range(9))], [0, -1] * (2 * len(asked)), 12)
    chooser = chooser_of(asked, 12)
    whole = both(chooser, logits, range(len(asked)), drafts, allowed)
    for at_once in (1, 12, 60, 12 * 7):
        monkeypatch.setattr(choosing_tensors, "_AT_ONCE", at_once)
        assert both(chooser, logits, range(len(asked)), drafts, allowed) == whole


@pytest.mark.parametrize("name", EACH)
def test_each_setting_changes_choices(name) -> None:
    make, changed = np.random.default_rng(1), 0
    for _ in range(100):
        logits = make.standard_normal(12)
        base = Sampling(temperature=1.0) if name in ("top_p", "top_k", "min_p", "cold") else None
        asked = Asked(EACH[name], prompt=(1, 2, 3), answer=(4, 4, 7))
        changed += alone(asked, logits) != alone(
            replace(asked, sampling=base or Sampling()), logits
        )
    assert 4 < changed < 100


@pytest.mark.parametrize("temperature", [1e-320, 1e-5, 1.0])
@pytest.mark.parametrize("bias", [-1e4, 1e4])
def test_nothing_overflows(bias, temperature) -> None:
    sampling = Sampling(
        temperature=temperature, logit_bias=((1, bias),), repetition_penalty=1e-9, top_p=0.5
    )
    for logits in ([0.0, 1e308, -1e308, 5.0], [-1e300, 1e308, -np.inf, 0.0]):
        assert alone(Asked(sampling, prompt=(1, 0)), logits) == 1


def test_a_logit_of_zero_stays_zero_under_a_repetition_penalty() -> None:
    for factor in (0.01, 100.0):
        asked = Asked(Sampling(repetition_penalty=factor), prompt=(0, 1))
        assert alone(asked, [0.0, -0.0, -1.0]) == 0
        assert alone(asked, [-1e-9, -0.0, 0.0]) == 1
