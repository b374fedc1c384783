"""A forecast from one run of Algorithm 1 says what a run of each budget would have said."""

import math
from collections import Counter
from pathlib import Path

import pytest

import tiny
from tasc_engine import ModelSource
from tasc_jobs.enrich.algorithm import EnrichSettings, enrich
from tasc_jobs.evaluate.subject import Asking, Setup, Subject
from tasc_jobs.forecast_ft.forecast import Price, forecast
from tasc_jobs.forecast_ft.price import measure_price
from tasc_jobs.statistics.distribution import renyi2_bits
from tasc_text import PromptTemplate, TaskTokenizer

TRAIN = [f"intent: {a}_{b}, {{}}" for a in ("play", "set", "stop") for b in ("music", "alarm")] * 4
HELD_OUT = ["intent: play_alarm, {}", "intent: stop_it, {}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_folder(tmp_path_factory.mktemp("forecast"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TaskTokenizer:
    return TaskTokenizer.from_folder(folder)


def test_entropy_is_that_of_a_hand_count() -> None:
    assert renyi2_bits([1, 1, 1, 1]) == pytest.approx(2)
    assert renyi2_bits([7]) == 0
    assert renyi2_bits([3, 1, 0]) == pytest.approx(-math.log2(10 / 16))
    assert renyi2_bits([]) == 0
    assert renyi2_bits([10**9] * 8) == pytest.approx(3)


def test_each_token_knows_the_entropy_behind_it(tokenizer: TaskTokenizer) -> None:
    found = enrich(tokenizer, TRAIN, EnrichSettings(5))
    before = tokenizer.backend.encode_batch(TRAIN, add_special_tokens=False)
    after = found.tokenizer.encode_batch(TRAIN, add_special_tokens=False)
    for encodings, said in ((before, found), (after, found.tokens[-1])):
        counts = Counter(id_ for each in encodings for id_ in each.ids)
        assert said.renyi2_bits == pytest.approx(renyi2_bits(list(counts.values())))


def test_every_budget_is_as_if_it_were_run_alone(tokenizer: TaskTokenizer) -> None:
    settings = EnrichSettings(0, n_max=3, pcs=0.2)
    together = forecast(tokenizer, TRAIN, HELD_OUT, settings, (9, 0, 4))
    alone = [forecast(tokenizer, TRAIN, HELD_OUT, settings, (n,))[0] for n in (0, 4, 9)]
    assert list(together) == alone
    assert [point.new_tokens for point in together] == [0, 4, 9]
    assert together[0].length_reduction == together[0].train_reduction == 1
    assert together[2].length_reduction > together[1].length_reduction > 1


def test_held_out_outputs_are_encoded_by_the_tokenizer_itself(tokenizer: TaskTokenizer) -> None:
    (point,) = forecast(tokenizer, TRAIN, HELD_OUT, EnrichSettings(0), (7,))
    enriched = enrich(tokenizer, TRAIN, EnrichSettings(7)).tokenizer
    tokens = sum(len(e.ids) for e in enriched.encode_batch(HELD_OUT, add_special_tokens=False))
    assert point.steps_per_answer == tokens / len(HELD_OUT) + 1
    before = sum(map(len, tokenizer.encode_outputs(HELD_OUT)))
    assert point.length_reduction == before / tokens


def test_outputs_with_no_more_to_give_give_fewer_tokens(tokenizer: TaskTokenizer) -> None:
    points = forecast(tokenizer, TRAIN, HELD_OUT, EnrichSettings(0), (500, 1000))
    assert 0 < points[0].new_tokens == points[1].new_tokens < 500
    assert points[0].renyi2_bits == points[1].renyi2_bits


def test_a_price_is_a_straight_line(tokenizer: TaskTokenizer) -> None:
    (point,) = forecast(tokenizer, TRAIN, HELD_OUT, EnrichSettings(0), (3,))
    priced = point.priced(Price(prompt_ms=2.0, step_ms=0.5))
    assert priced.ms_per_answer == 2 + point.steps_per_answer / 2


def test_a_model_s_price_is_measured(folder: Path) -> None:
    source, told = ModelSource(folder), list[tuple[int, int]]()
    subject = Subject(source, Asking(PromptTemplate("{input} ->")), Setup(rows=2))
    price = measure_price(subject, TRAIN[:6], 12, lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] == len(told)
    assert price.prompt_ms >= 0
    assert price.step_ms >= 0
    assert price.of(12) > 0


def test_answers_of_exact_lengths_end_at_room_alone(folder: Path) -> None:
    setup = Setup(rows=2, max_model_len=64)
    subject = Subject(ModelSource(folder), Asking(PromptTemplate("{input} ->")), setup)
    prompts = subject.prompts(["play"] * 3)
    assert [len(r.tokens) for r in subject.exact_lengths(prompts, 9)] == [9] * 3
    room = 64 - len(prompts[0].ids)
    assert [len(r.tokens) for r in subject.exact_lengths(prompts, 900)] == [room] * 3
