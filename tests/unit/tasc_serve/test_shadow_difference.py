"""When an answer decoded again differs really, and when two tokens were as good as each other."""

import numpy as np
import pytest
import torch

from tasc_engine import TokenLogprob
from tasc_engine.logprobs import token_logprobs
from tasc_serve.shadow import MARGINS, difference


def test_equal_logits_are_a_near_tie_and_others_are_real():
    logits = torch.tensor([[0.0, 5.0, 5.0, 4.999], [3.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    shadow = tuple(token_logprobs(logits, np.arange(2), np.array([1, 0]), [3, 3]))
    for dtype, margin in MARGINS.items():
        assert difference((1, 0), shadow, margin) is None
        tie, clear = difference((2, 0), shadow, margin), difference((1, 1), shadow, margin)
        assert (tie.place, tie.gap, tie.kind) == (0, 0.0, "near_tie"), dtype
        assert (clear.place, clear.kind) == (1, "real"), dtype
        assert clear.gap == pytest.approx(2.0)
    assert difference((3, 0), shadow, MARGINS["float32"] / 2).kind == "real"
    assert difference((3, 0), shadow, MARGINS["bfloat16"]).kind == "near_tie"


@pytest.mark.parametrize("answer", [(1,), (1, 0, 0), ()])
def test_an_answer_of_another_length_differs_really(answer):
    shadow = tuple(TokenLogprob(token, -0.1, ((token, -0.1),)) for token in (1, 0))
    found = difference(answer, shadow, 1.0)
    assert (found.place, found.kind) == (min(len(answer), 2), "real")


def test_a_token_that_was_none_of_the_likeliest_differs_really():
    found = difference((7,), (TokenLogprob(1, -0.1, ((1, -0.1),)),), 1e9)
    assert (found.gap, found.kind) == (float("inf"), "real")
