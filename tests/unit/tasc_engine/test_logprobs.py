"""Log-probabilities are those of a plain float64 softmax, the likeliest by id where equal."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_engine.logprobs import token_logprobs


def plain(logits: torch.Tensor) -> list[float]:
    line = logits.double().tolist()
    whole = math.fsum(math.exp(x - max(line)) for x in line)
    return [x - max(line) - math.log(whole) for x in line]


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
)
def test_tokens_are_as_likely_as_a_plain_softmax_says(width, seed, dtype, most) -> None:
    make = np.random.default_rng(seed)
    logits = torch.from_numpy(make.standard_normal((7, width)).round(1) * 3).to(dtype)
    places, tokens = make.integers(0, 7, len(most)), make.integers(0, width, len(most))
    told = token_logprobs(logits, places, tokens, most)
    assert [one.token for one in told] == tokens.tolist()
    for one, place, count in zip(told, places, most, strict=True):
        right = plain(logits[place])
        # Equal logits are equally likely to the bit.
        order = sorted(range(width), key=lambda token: (-float(logits[place, token]), token))
        assert one.logprob == pytest.approx(right[one.token], abs=1e-12)
        assert [token for token, _ in one.top] == order[:count]
        assert [value for _, value in one.top] == pytest.approx(
            [right[token] for token in order[:count]], abs=1e-12
        )


def test_of_equal_ones_the_first_are_told() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [4000, 17]] = 1.0
    told = token_logprobs(logits, np.array([0]), np.array([3]), [5])
    assert [token for token, _ in told[0].top] == [17, 4000, 0, 1, 2]


def test_what_is_impossible_is_not_told() -> None:
    logits = torch.tensor([[-torch.inf, 2.0, -torch.inf, 2.0]])
    told = token_logprobs(logits, np.array([0]), np.array([3]), np.array([4]))
    assert told[0].logprob == pytest.approx(math.log(0.5))
    assert told[0].top == ((1, told[0].logprob), (3, told[0].logprob))


def test_nothing_is_told_of_no_places() -> None:
    assert token_logprobs(torch.zeros(3, 4), np.zeros(0, np.int64), np.zeros(0, np.int64), []) == []
