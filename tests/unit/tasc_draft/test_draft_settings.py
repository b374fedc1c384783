"""Settings of drafting are refused outside their range, with value and limits in the message."""

import dataclasses
import json

import pytest

from tasc_draft import NGRAM_SOURCES, DraftSettings

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


def test_every_number_has_limits() -> None:
    numbers = {f.name for f in dataclasses.fields(DraftSettings) if f.type in (int, float)}
    assert numbers == set(LIMITS)


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


def test_an_unknown_mixture_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'best'.*'mixed', 'tasc', 'trie'"):
        DraftSettings(mixture="best")


def test_an_unknown_source_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"\['oracle'\] are unknown.*'corpus'.*'aligned'"):
        DraftSettings(sources=("corpus", "oracle"))


def test_settings_survive_json_and_can_be_compared() -> None:
    settings = DraftSettings(sources=("prompt", "corpus"), min_prob=0.5)
    again = DraftSettings(**json.loads(json.dumps(dataclasses.asdict(settings))))
    assert again == settings
    assert hash(again) == hash(settings)
    assert DraftSettings().sources == NGRAM_SOURCES


def test_the_published_settings_are_those_of_the_papers() -> None:
    tasc, trie = DraftSettings.published("tasc"), DraftSettings.published("trie")
    assert (tasc.n_max, tasc.p_min, tasc.corpus_weight, tasc.min_prob) == (6, 5, 0.75, 0.0)
    assert (trie.n_max, trie.prefix, trie.min_prob) == (13, 3, 0.0)
    assert (tasc.mixture, trie.mixture) == ("tasc", "trie")
    with pytest.raises(ValueError, match="'mixed' was not published"):
        DraftSettings.published("mixed")
