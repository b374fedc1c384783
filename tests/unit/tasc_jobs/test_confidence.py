"""A label is as sure as its tokens together, wherever they are cut."""

import math

import pytest

from tasc_jobs.evaluate.confidence import LEVELS, confident_labels, precision_recall


def test_a_label_s_confidence_is_the_product_of_its_tokens() -> None:
    pieces = [(b"civil", 0.5), (b" law", 0.5), (b"; ", 0.1), (b"trade", 0.8)]
    found = confident_labels([(text, math.log(p)) for text, p in pieces])
    assert found == {"civil law": pytest.approx(0.25), "trade": pytest.approx(0.8)}


def test_a_token_over_a_separator_counts_for_both_sides() -> None:
    pieces = [(b"a", 0.5), (b"b; c", 0.4), (b"d", 1.0)]
    found = confident_labels([(text, math.log(p)) for text, p in pieces])
    assert found == {"ab": pytest.approx(0.2), "cd": pytest.approx(0.4)}


def test_a_character_of_several_tokens_is_one_label() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert list(confident_labels([(first, -0.1), (second, -0.2)])) == ["é"]
    assert confident_labels([]) == {}


def test_precision_and_recall_are_those_of_the_labels_that_are_sure_enough() -> None:
    answers = [{"a": 0.9, "b": 0.3}, {"c": 0.55}]
    found = {at.level: at.quality for at in precision_recall(answers, ["a; x", "d"])}
    assert list(found) == list(LEVELS)
    assert (found[0.0].precision, found[0.0].recall) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (found[0.5].precision, found[0.5].recall) == (0.5, pytest.approx(1 / 3))
    assert (found[0.9].precision, found[0.9].recall) == (1, pytest.approx(1 / 3))
    assert (found[0.99].precision, found[0.99].recall) == (0, 0)
