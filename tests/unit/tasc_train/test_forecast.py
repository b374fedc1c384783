"""Tests a forecast of all budgets from one run of Algorithm 1, and the measured price."""

from collections import Counter
from pathlib import Path

import pytest

from tasc_engine import ModelSource
from tasc_jobs.statistics.distribution import renyi2_bits
from tasc_text import PromptTemplate, TaskTokenizer
from tasc_train.enrich.ngram_selection import EnrichSettings, enrich
from tasc_train.evaluate.measured_model import GenerationSettings, MeasuredModel, Setup
from tasc_train.forecast import Price, forecast, measure_price

TRAIN = [f"intent: {a}_{b}, {{}}" for a in ("play", "set", "stop") for b in ("music", "alarm")] * 4
HELD_OUT = ["intent: play_alarm, {}", "intent: stop_it, {}"]


def test_each_new_token_has_the_entropy_after_its_addition(tokenizer: TaskTokenizer) -> None:
    found = enrich(tokenizer, TRAIN, EnrichSettings(5))
    before = tokenizer.backend.encode_batch(TRAIN, add_special_tokens=False)
    after = found.tokenizer.encode_batch(TRAIN, add_special_tokens=False)
    for encodings, reported in ((before, found), (after, found.tokens[-1])):
        counts = Counter(id_ for each in encodings for id_ in each.ids)
        assert reported.renyi2_bits == pytest.approx(renyi2_bits(list(counts.values())))


def test_forecast_of_several_budgets_equals_forecasts_of_each_budget(tokenizer):
    settings = EnrichSettings(0, n_max=3, pcs=0.2)
    together = forecast(tokenizer, TRAIN, HELD_OUT, settings, (9, 0, 4))
    alone = [forecast(tokenizer, TRAIN, HELD_OUT, settings, (n,))[0] for n in (0, 4, 9)]
    assert list(together) == alone
    assert [point.new_tokens for point in together] == [0, 4, 9]
    assert together[0].length_reduction == together[0].train_reduction == 1
    assert together[2].length_reduction > together[1].length_reduction > 1
    points = forecast(tokenizer, TRAIN, HELD_OUT, EnrichSettings(0), (500, 1000))
    assert 0 < points[0].new_tokens == points[1].new_tokens < 500
    assert points[0].renyi2_bits == points[1].renyi2_bits


def test_forecast_steps_are_the_tokens_of_held_out_outputs(
    tokenizer: TaskTokenizer,
) -> None:
    (point,) = forecast(tokenizer, TRAIN, HELD_OUT, EnrichSettings(0), (7,))
    enriched = enrich(tokenizer, TRAIN, EnrichSettings(7)).tokenizer
    tokens = sum(len(e.ids) for e in enriched.encode_batch(HELD_OUT, add_special_tokens=False))
    assert point.steps_per_answer == tokens / len(HELD_OUT) + 1
    before = sum(map(len, tokenizer.encode_outputs(HELD_OUT)))
    assert point.length_reduction == before / tokens
    (point,) = forecast(tokenizer, TRAIN, HELD_OUT, EnrichSettings(0), (3,))
    priced = point.priced(Price(prompt_ms=2.0, step_ms=0.5))
    assert priced.ms_per_answer == 2 + point.steps_per_answer / 2


def measured_model(folder: Path) -> MeasuredModel:
    generation = GenerationSettings(PromptTemplate("{input} ->"))
    return MeasuredModel(ModelSource(folder), generation, Setup(rows=2, max_model_len=64))


def test_price_is_measured_with_answers_of_exact_lengths(folder: Path) -> None:
    measured, progress = measured_model(folder), list[tuple[int, int]]()
    price = measure_price(measured, TRAIN[:6], 12, lambda done, of: progress.append((done, of)))
    assert progress[-1][0] == progress[-1][1] == len(progress)
    assert price.prompt_ms >= 0
    assert price.step_ms >= 0
    assert price.of(12) > 0
    measured = measured_model(folder)
    prompts = measured.prompts(["play"] * 3)
    assert [len(r.tokens) for r in measured.exact_lengths(prompts, 9)] == [9] * 3
    room = 64 - len(prompts[0].ids)
    assert [len(r.tokens) for r in measured.exact_lengths(prompts, 900)] == [room] * 3
