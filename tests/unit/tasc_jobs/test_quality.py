"""How well answers are, and how sure of them a model is."""

import math
import random

import pytest

from support import refused
from tasc_jobs.errors import UsageError
from tasc_jobs.evaluate.quality import (
    LEVELS,
    common_subsequence,
    confident_labels,
    exact_match,
    intent_quality,
    label_quality,
    precision_recall,
    quality,
    rouge_l,
    tagging_accuracy,
    token_f1,
)

RIGHT = [
    "intent: alarm_set, slot fills: {time: nine am, date: friday}",
    "intent: play, slot fills: {}",
]


def test_right_answers_score_one_on_every_measure() -> None:
    found = intent_quality(RIGHT, RIGHT)
    assert (found.intent_accuracy, found.slot_f1, found.joint_accuracy) == (1, 1, 1)


def test_a_wrong_slot_value_costs_the_slot_and_the_row_but_not_the_intent() -> None:
    wrong = ["intent: alarm_set, slot fills: {time: ten am, date: friday}", RIGHT[1]]
    found = intent_quality(wrong, RIGHT)
    assert found.intent_accuracy == 1
    assert found.slot_f1 == pytest.approx(0.5)
    assert found.joint_accuracy == 0.5


def test_an_unreadable_answer_has_no_intent_and_no_slots() -> None:
    found = intent_quality(["nonsense", RIGHT[1]], RIGHT)
    assert (found.intent_accuracy, found.slot_f1) == (0.5, 0.0)


@pytest.mark.parametrize(
    "unreadable",
    ["y", "", "intent: a", "intent: a, slot fills: {nonsense}", "intent: a, slot fills: {b x: 1}"],
)
def test_an_expected_output_that_is_no_intent_is_named(unreadable: str) -> None:
    """Garbage would be what is expected of garbage."""
    for answer in ("x", unreadable):
        with refused(UsageError, "row 2", repr(unreadable), "--metrics"):
            quality([RIGHT[0], answer], [RIGHT[0], unreadable], "massive")


def test_a_slot_that_occurs_twice_counts_twice() -> None:
    truth = "intent: a, slot fills: {x: one, x: one}"
    once = intent_quality(["intent: a, slot fills: {x: one}"], [truth])
    assert once.slot_f1 == pytest.approx(2 / 3)
    assert once.joint_accuracy == 0


def test_a_value_may_hold_a_comma() -> None:
    truth = "intent: a, slot fills: {x: one, two, y: three}"
    assert intent_quality([truth], [truth]).slot_f1 == 1
    assert intent_quality(["intent: a, slot fills: {x: one, y: three}"], [truth]).slot_f1 == 0.5


def test_tags_are_compared_by_position() -> None:
    assert tagging_accuracy(["A B C"], ["A B C"]) == 1
    assert tagging_accuracy(["A C"], ["A B C D"]) == 0.25
    assert tagging_accuracy(["A B C D E"], ["A B"]) == 1


def test_without_a_word_to_tag_nothing_said_is_right_and_a_tag_wrong() -> None:
    assert quality(["", " "], ["", ""], "tags") == {"exact_match": 1, "tag_accuracy": 1}
    assert tagging_accuracy(["", "A"], ["", ""]) == 0


def test_labels_count_over_all_rows_in_any_order() -> None:
    found = label_quality(["b; a", "c; d; x"], ["a; b", "c; y"])
    assert found.precision == pytest.approx(3 / 5)
    assert found.recall == pytest.approx(3 / 4)
    assert found.f1 == pytest.approx(6 / 9)


def test_a_label_said_twice_counts_once_and_none_is_no_label() -> None:
    assert label_quality(["a; a; a"], ["a"]).precision == 1
    nothing = label_quality([""], ["a; b"])
    assert (nothing.precision, nothing.recall, nothing.f1) == (0, 0, 0)


def test_an_exact_match_ignores_blanks_around_it_alone() -> None:
    assert exact_match([" a b", "a  b", "A b"], ["a b"] * 3) == pytest.approx(1 / 3)


def test_words_are_compared_in_any_order_by_token_f1() -> None:
    assert token_f1(["The cat, sat!"], ["sat the cat"]) == 1
    assert token_f1(["a a b"], ["a b c"]) == pytest.approx(2 * 2 / 6)
    assert token_f1(["a", "b"], ["a", "c"]) == 0.5
    assert token_f1([""], ["a"]) == 0


def test_rouge_l_keeps_the_order() -> None:
    assert rouge_l(["a b c"], ["a b c"]) == 1
    assert rouge_l(["c b a"], ["a b c"]) == pytest.approx(2 * 1 / 6)
    # Lin 2004: "police killed the gunman" against "police kill the gunman".
    assert rouge_l(["police kill the gunman"], ["police killed the gunman"]) == 0.75


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_common_subsequence_is_that_of_the_textbook(seed: int) -> None:
    chance = random.Random(seed)
    one, other = (chance.choices("abcd", k=chance.randint(0, 90)) for _ in range(2))
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, x in enumerate(one, 1):
        for j, y in enumerate(other, 1):
            longer = max(table[i - 1][j], table[i][j - 1])
            table[i][j] = table[i - 1][j - 1] + 1 if x == y else longer
    assert common_subsequence(one, other) == table[-1][-1]


def test_each_kind_of_task_has_its_own_measures() -> None:
    truth = RIGHT
    for metrics, names in (
        ("massive", {"intent_accuracy", "slot_f1", "joint_accuracy"}),
        ("tags", {"tag_accuracy"}),
        ("labels", {"precision", "recall", "f1"}),
        ("exact", {"token_f1"}),
        ("text", {"token_f1", "rouge_l"}),
    ):
        found = quality(truth, truth, metrics)
        assert found.keys() == names | {"exact_match"}
        assert set(found.values()) == {1}


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
