"""Settings of drafting are refused outside their range, with value and limits in the message."""

import pytest

from tasc_draft import DraftSettings

LIMITS = {
    "n_max": (2, 16),
    "p_min": (1, 2**31 - 1),
    "corpus_weight": (0.0, 1.0),
    "num_speculative_tokens": (0, 64),
    "min_prob": (0.0, 1.0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_both_limits_are_allowed(name: str) -> None:
    for limit in LIMITS[name]:
        assert getattr(DraftSettings(**{name: limit}), name) == limit


@pytest.mark.parametrize("name", LIMITS)
def test_a_value_outside_is_refused_with_its_limits(name: str) -> None:
    least, most = LIMITS[name]
    step = 0.01 if isinstance(least, float) else 1
    for value in (least - step, most + step, float("nan")):
        with pytest.raises(ValueError, match=rf"{name} is {value}.*{least} and {most}"):
            DraftSettings(**{name: value})


def test_the_defaults_are_the_papers_mixture() -> None:
    settings = DraftSettings()
    assert (settings.n_max, settings.p_min, settings.corpus_weight) == (6, 1, 0.75)
