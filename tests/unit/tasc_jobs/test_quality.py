"""Tests the quality and the confidence of answers, and the demo's own parts."""

import math
import random

import httpx
import pytest

from support import refused
from tasc_jobs.demo import measure
from tasc_jobs.demo.tasks import TASKS, read_split
from tasc_jobs.errors import UsageError
from tasc_jobs.statistics.quality import (
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
TWICE = "intent: a, slot fills: {x: one, x: one}"
COMMA = "intent: a, slot fills: {x: one, two, y: three}"


@pytest.mark.parametrize(
    ("answers", "truth", "scores"),
    [
        (RIGHT, RIGHT, (1, 1, 1)),
        (["intent: alarm_set, slot fills: {time: ten am, date: friday}", RIGHT[1]], RIGHT,
         (1, 0.5, 0.5)),
        (["nonsense", RIGHT[1]], RIGHT, (0.5, 0, 0.5)),
        (["intent: a, slot fills: {x: one}"], [TWICE], (1, 2 / 3, 0)),
        ([COMMA], [COMMA], (1, 1, 1)),
        (["intent: a, slot fills: {x: one, y: three}"], [COMMA], (1, 0.5, 0)),
    ],
    ids=["right", "a wrong slot", "unreadable", "a slot twice", "a comma", "without its comma"],
)  # fmt: skip
def test_intent_accuracy_slot_f1_and_joint_accuracy_equal_known_values(answers, truth, scores):
    found = intent_quality(answers, truth)
    got = (found.intent_accuracy, found.slot_f1, found.joint_accuracy)
    assert got == pytest.approx(scores)


@pytest.mark.parametrize(
    "unreadable",
    ["y", "", "intent: a", "intent: a, slot fills: {nonsense}", "intent: a, slot fills: {b x: 1}"],
)
def test_expected_output_without_an_intent_is_named_in_the_error(unreadable: str) -> None:
    """Otherwise an unreadable answer would equal an unreadable expected output."""
    for answer in ("x", unreadable):
        with refused(UsageError, "row 2", repr(unreadable), "--metrics"):
            quality([RIGHT[0], answer], [RIGHT[0], unreadable], "massive")


def test_tags_are_compared_by_position() -> None:
    assert tagging_accuracy(["A B C"], ["A B C"]) == 1
    assert tagging_accuracy(["A C"], ["A B C D"]) == 0.25
    assert tagging_accuracy(["A B C D E"], ["A B"]) == 1
    # If there is no word to tag, an empty answer is right and a tag is wrong.
    assert quality(["", " "], ["", ""], "tags") == {"exact_match": 1, "tag_accuracy": 1}
    assert tagging_accuracy(["", "A"], ["", ""]) == 0


@pytest.mark.parametrize(
    ("answers", "truth", "precision", "recall", "f1"),
    [
        (["b; a", "c; d; x"], ["a; b", "c; y"], 3 / 5, 3 / 4, 6 / 9),
        (["a; a; a"], ["a"], 1, 1, 1),
        ([""], ["a; b"], 0, 0, 0),
    ],
    ids=["all rows in any order", "a repeated label", "no label"],
)
def test_repeated_labels_count_once(answers, truth, precision, recall, f1):
    found = label_quality(answers, truth)
    got = (found.precision, found.recall, found.f1)
    assert got == pytest.approx((precision, recall, f1))


def test_exact_match_word_f1_and_rouge_l_equal_known_values() -> None:
    assert exact_match([" a b", "a  b", "A b"], ["a b"] * 3) == pytest.approx(1 / 3)
    assert token_f1(["The cat, sat!"], ["sat the cat"]) == 1
    assert token_f1(["a a b"], ["a b c"]) == pytest.approx(2 * 2 / 6)
    assert (token_f1(["a", "b"], ["a", "c"]), token_f1([""], ["a"])) == (0.5, 0)
    assert rouge_l(["a b c"], ["a b c"]) == 1
    assert rouge_l(["c b a"], ["a b c"]) == pytest.approx(2 * 1 / 6)
    # Lin 2004: "police killed the gunman" against "police kill the gunman".
    assert rouge_l(["police kill the gunman"], ["police killed the gunman"]) == 0.75


@pytest.mark.parametrize("seed", range(5))
def test_longest_common_subsequence_equals_the_textbook_algorithm(seed: int) -> None:
    chance = random.Random(seed)
    one, other = (chance.choices("abcd", k=chance.randint(0, 90)) for _ in range(2))
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, x in enumerate(one, 1):
        for j, y in enumerate(other, 1):
            longer = max(table[i - 1][j], table[i][j - 1])
            table[i][j] = table[i - 1][j - 1] + 1 if x == y else longer
    assert common_subsequence(one, other) == table[-1][-1]


def test_each_kind_of_task_has_its_metrics() -> None:
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


@pytest.mark.parametrize(
    ("pieces", "labels"),
    [
        ([(b"civil", 0.5), (b" law", 0.5), (b"; ", 0.1), (b"trade", 0.8)],
         {"civil law": 0.25, "trade": 0.8}),
        ([(b"a", 0.5), (b"b; c", 0.4), (b"d", 1.0)], {"ab": 0.2, "cd": 0.4}),
        ([("é".encode()[:1], 0.5), ("é".encode()[1:], 0.5)], {"é": 0.25}),
        ([], {}),
    ],
    ids=["tokens of a label", "a token over a separator", "tokens of a character", "none"],
)  # fmt: skip
def test_confidence_of_a_label_is_the_product_over_its_tokens(pieces, labels):
    found = confident_labels([(text, math.log(p)) for text, p in pieces])
    assert found == pytest.approx(labels)


def test_precision_and_recall_count_labels_above_each_confidence() -> None:
    answers = [{"a": 0.9, "b": 0.3}, {"c": 0.55}]
    found = {at.level: at.quality for at in precision_recall(answers, ["a; x", "d"])}
    assert list(found) == list(LEVELS)
    assert (found[0.0].precision, found[0.0].recall) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (found[0.5].precision, found[0.5].recall) == (0.5, pytest.approx(1 / 3))
    assert (found[0.9].precision, found[0.9].recall) == (1, pytest.approx(1 / 3))
    assert (found[0.99].precision, found[0.99].recall) == (0, 0)


@pytest.mark.parametrize("task", TASKS)
def test_expected_outputs_of_shipped_test_rows_score_as_correct(task: str) -> None:
    truth = [r["output"] for r in read_split(task, "test")]
    assert len(truth) > 2000
    if task == "massive_en":
        assert intent_quality(truth, truth).joint_accuracy == 1
        assert intent_quality(truth, truth).slot_f1 == 1
    else:
        assert tagging_accuracy(truth, truth) == 1


METRICS = """
# TYPE tasc_row_steps_total counter
tasc_row_steps_total{task="t"} %d
tasc_row_steps_total{task="other"} 99
# TYPE tasc_generation_tokens_total counter
tasc_generation_tokens_total{task="t"} %d
# TYPE tasc_spec_decode_num_accepted_tokens_total counter
tasc_spec_decode_num_accepted_tokens_total{task="t",source="corpus"} %d
tasc_spec_decode_num_accepted_tokens_total{task="t",source="prompt"} 5
# TYPE tasc_spec_decode_num_drafts_per_pos_total counter
tasc_spec_decode_num_drafts_per_pos_total{task="t",source="corpus",position="0"} %d
tasc_spec_decode_num_drafts_per_pos_total{task="t",source="prompt",position="10"} %d
tasc_spec_decode_num_drafts_per_pos_total{task="t",source="corpus",position="2"} %d
tasc_spec_decode_num_drafts_per_pos_total{task="t",source="prompt",position="2"} %d
# TYPE tasc_spec_decode_num_accepted_tokens_per_pos_total counter
tasc_spec_decode_num_accepted_tokens_per_pos_total{task="t",source="corpus",position="0"} %d
tasc_spec_decode_num_accepted_tokens_per_pos_total{task="t",position="10"} %d
tasc_spec_decode_num_accepted_tokens_per_pos_total{task="t",position="2"} 1
"""


def test_demo_counters_are_differences_for_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([(10, 20, 5, 4, 0, 5, 1, 2, 0), (14, 30, 9, 7, 3, 8, 2, 4, 1)])
    monkeypatch.setattr(
        measure.httpx, "get", lambda url, **_: httpx.Response(200, text=METRICS % next(pages))
    )
    before = measure.read_counters("http://service", "t")
    gained = measure.read_counters("http://service", "t").since(before)
    assert (gained.generation_tokens, gained.block_efficiency) == (10, 2.5)
    assert gained.by_source == {"corpus": 4}
    assert gained.acceptance_by_position == pytest.approx([2 / 3, 0, 1 / 3])
