"""Tests that tokens follow a simple form of their rule, and depend only on their row's past."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from choosing_cases import (
    Asked,
    allowed_of,
    alone,
    begin,
    both,
    chooser_of,
    expected,
    ints,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_layouts import forest, parents_of

from paired import paired
from support import refused
from tasc_engine import Sampling
from tasc_engine.kernels.gpu import sampling as kernels
from tasc_engine.model.operations import greatest
from tasc_engine.sampling.row_parameters import Allowed
from tasc_engine.sampling.sampler import Sampler, token_logprobs

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

trees = parents_of(6).flatmap(
    lambda parents: st.tuples(st.just(parents), st.tuples(*(st.integers(0, 3) for _ in parents)))
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
many = st.integers(0, 75).map(lambda n: (1, 2) * n)  # more than random numbers fetched at once
one_asked = st.builds(Asked, samplings, few.map(lambda t: (0, *t)), few | many)
rows_asked = st.lists(st.tuples(one_asked, trees), min_size=1, max_size=3)


@st.composite
def lines(draw, n: int, vocab_size: int) -> torch.Tensor:
    """Draws peaked and flat lines, some with equal logits, and some without a possible choice."""
    make = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = make.standard_normal((n, vocab_size)) * draw(st.sampled_from([0.05, 1.0, 4.0, 40.0]))
    if draw(st.booleans()):
        x = x.round()
    x[make.random(x.shape) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.9]))] = -np.inf
    if draw(st.integers(0, 9)) == 0:
        x[make.integers(n), make.integers(vocab_size)] = np.nan
    return torch.from_numpy(x).to(draw(st.sampled_from(DTYPES)))


def test_sampled_tokens_equal_the_reference_at_every_visited_place(examples) -> None:
    vocabularies = st.sampled_from([4, 16, 63, 64, 65, 200])

    @examples(60, 200, asked=rows_asked, vocab_size=vocabularies, data=st.data())
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
        chooser = chooser_of([one for one, _ in asked], vocab_size)
        drafts = forest([tree for _, (tree, _) in asked], [tokens for _, (_, tokens) in asked])
        found = both(chooser, logits, range(len(asked)), drafts, allowed)
        own = [sets[k] if k >= 0 else None for k in mask_of]
        for (one, (tree, tokens)), end in zip(asked, np.cumsum(sizes), strict=True):
            here = slice(end - len(tree) - 1, end)
            assert found[here] == expected(one, logits[here], tree, tokens, own[here])


@pytest.mark.parametrize(("spread", "dtype"), paired([0.1, 1.5, 5.0], by=DTYPES))
def test_large_vocabulary_is_truncated_like_a_sorted_vocabulary(spread, dtype) -> None:
    """The limits are below and above the number of tokens that are ranked first; logits may tie."""
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


def test_sampling_in_parts_equals_sampling_at_once(monkeypatch) -> None:
    asked = [Asked(replace(rule, presence_penalty=0.5), answer=(1, 2)) for rule in EACH.values()]
    drafts = forest([(-1, 0, -1)] * len(asked), [(1, 2, 3)] * len(asked))
    logits = torch.randn(4 * len(asked), 12, dtype=torch.float64)
    allowed = allowed_of([set(range(9))], [0, -1] * (2 * len(asked)), 12)
    chooser = chooser_of(asked, 12)
    whole = both(chooser, logits, range(len(asked)), drafts, allowed)
    for at_once in (1, 12, 60, 12 * 7):
        monkeypatch.setattr(kernels, "_AT_ONCE", at_once)
        assert both(chooser, logits, range(len(asked)), drafts, allowed) == whole


@pytest.mark.parametrize("name", EACH)
def test_each_sampling_parameter_changes_choices(name) -> None:
    make, changed = np.random.default_rng(1), 0
    for _ in range(100):
        logits = make.standard_normal(12)
        base = Sampling(temperature=float(name in ("top_p", "top_k", "min_p", "cold")))
        asked = Asked(EACH[name], prompt=(1, 2, 3), answer=(4, 4, 7))
        changed += alone(asked, logits) != alone(replace(asked, sampling=base), logits)
    assert 4 < changed < 100


@pytest.mark.parametrize("temperature", [1e-320, 1e-5, 1.0])
@pytest.mark.parametrize("bias", [-1e4, 1e4])
def test_extreme_biases_and_temperatures_do_not_overflow(bias, temperature) -> None:
    sampling = Sampling(
        temperature=temperature, logit_bias=((1, bias),), repetition_penalty=1e-9, top_p=0.5
    )
    for logits in ([0.0, 1e308, -1e308, 5.0], [-1e300, 1e308, -np.inf, 0.0]):
        assert alone(Asked(sampling, prompt=(1, 0)), logits) == 1


VOCAB = 40
WARM = Sampling(temperature=1.0, seed=11)
RULES = [
    Sampling(),
    WARM,
    Sampling(temperature=0.8, top_p=0.9, top_k=9, seed=2),
    Sampling(temperature=1.2, repetition_penalty=1.4, frequency_penalty=0.2, seed=3),
    Sampling(presence_penalty=1.5, frequency_penalty=-0.1, logit_bias=((3, 1.0),)),
    Sampling(temperature=0.7, min_p=0.05, presence_penalty=0.4, seed=5, choice=2),
]


def test_reused_row_has_no_state_of_its_predecessor() -> None:
    make, chooser = np.random.default_rng(6), Sampler(2, 256, VOCAB)
    for before in RULES:
        for after in RULES:
            begin(chooser, 1, Asked(before, prompt=(1, 2, 3), answer=tuple(range(30))))
            chooser.finish(1)
            assert not chooser.rules.held.any()
            begin(chooser, 1, Asked(after, prompt=(5,), answer=(7, 8)))
            line = torch.from_numpy(make.standard_normal(VOCAB))
            expected = alone(Asked(after, prompt=(5,), answer=(7, 8)), line)
            assert both(chooser, line[None], [1]) == [expected]
            chooser.finish(1)


@pytest.mark.parametrize("rule", RULES)
def test_no_token_is_chosen_if_a_logit_is_nan(rule) -> None:
    for width in (VOCAB, 64, 130):
        for where in range(0, width, 3):
            logits = torch.zeros(width, dtype=torch.float64)
            logits[where] = torch.nan
            assert alone(Asked(rule), logits) == -1
            # A mask that hides it changes nothing.
            rest = allowed_of([set(range(width)) - {where}], [0], width)
            assert alone(Asked(rule), logits, rest) == -1
            if not rule.plain:
                logits[where] = torch.inf
                assert alone(Asked(rule), logits) == -1


def test_plain_rows_choose_the_greatest_logit() -> None:
    odd = torch.tensor([0.0, 1.0, torch.inf, -torch.inf, torch.nan, 2.0])
    make, chooser = np.random.default_rng(8), chooser_of([Asked(Sampling()), Asked(WARM)], VOCAB)
    assert chooser.plain(ints([0, 0]))
    assert not chooser.plain(ints([0, 1]))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        logits = odd[make.integers(0, 6, (2, VOCAB))].to(dtype)
        logits[0] = odd[make.integers(0, 4, VOCAB)].to(dtype)
        assert both(chooser, logits, [0, 0]) == greatest(logits).tolist()
        masked = Allowed(np.zeros((0, 2), np.uint32), ints([-1, -1]))
        assert both(chooser, logits, [0, 0], allowed=masked) == greatest(logits).tolist()
    chooser.finish(1)
    assert chooser.plain(ints([0, 1]))
    with refused(ValueError, "41"):
        both(chooser, torch.zeros(1, 41), [0])  # of another vocabulary


def test_logprobs_of_nan_logits_are_nan_and_have_no_likeliest_tokens() -> None:
    logits = torch.zeros(2, 30)
    logits[1, 4] = torch.nan
    fine, none = token_logprobs(logits, np.arange(2), np.zeros(2, np.int64), [2, 2])
    assert [token for token, _ in fine.top] == [0, 1]
    assert none.logprob != none.logprob
    assert none.top == ()


@settings(deadline=None)
@given(
    st.sampled_from([*range(1, 41), 5000]),
    st.integers(0, 2**32),
    st.sampled_from([*DTYPES, torch.float16]),
    st.lists(st.integers(0, 20), max_size=5),
)
def test_logprobs_equal_a_plain_log_softmax(width, seed, dtype, most) -> None:
    """Equally likely tokens are reported in the order of their ids, impossible tokens never."""
    make = np.random.default_rng(seed)
    numbers = make.standard_normal((7, width)).round(1) * 3
    numbers[make.random(numbers.shape) < 0.2] = -np.inf
    numbers[:, make.integers(width)] = 1.0
    logits, places = torch.from_numpy(numbers).to(dtype), make.integers(0, 7, len(most))
    tokens = make.integers(0, width, len(most))
    found = token_logprobs(logits, places, tokens, most)
    assert [one.token for one in found] == tokens.tolist()
    for one, place, count in zip(found, places, most, strict=True):
        right = logits[place].double().log_softmax(-1).numpy()
        order = np.argsort(-right, kind="stable")[:count]
        order = order[right[order] > -np.inf]
        assert one.logprob == pytest.approx(right[one.token], abs=1e-12)
        assert [token for token, _ in one.top] == order.tolist()
        assert [value for _, value in one.top] == pytest.approx(right[order], abs=1e-12)
