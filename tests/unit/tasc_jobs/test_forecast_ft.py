"""Tests a forecast of all budgets from one run of Algorithm 1, its check, and rank correlation."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support import refused
from tasc_engine import ModelSource
from tasc_jobs.enrich.ngram_selection import EnrichSettings, enrich
from tasc_jobs.evaluate.measured_model import GenerationSettings, MeasuredModel, Setup
from tasc_jobs.forecast_ft.check import (
    EXAMPLE,
    MeasuredRun,
    check,
    check_page,
    falls_at_rises,
    kendall_tau,
    read_runs,
)
from tasc_jobs.forecast_ft.forecast import Price, forecast, measure_price
from tasc_jobs.statistics.distribution import renyi2_bits
from tasc_runtime.errors import FileError
from tasc_text import PromptTemplate, TaskTokenizer

TRAIN = [f"intent: {a}_{b}, {{}}" for a in ("play", "set", "stop") for b in ("music", "alarm")] * 4
HELD_OUT = ["intent: play_alarm, {}", "intent: stop_it, {}"]


def test_each_token_knows_the_entropy_behind_it(tokenizer: TaskTokenizer) -> None:
    found = enrich(tokenizer, TRAIN, EnrichSettings(5))
    before = tokenizer.backend.encode_batch(TRAIN, add_special_tokens=False)
    after = found.tokenizer.encode_batch(TRAIN, add_special_tokens=False)
    for encodings, said in ((before, found), (after, found.tokens[-1])):
        counts = Counter(id_ for each in encodings for id_ in each.ids)
        assert said.renyi2_bits == pytest.approx(renyi2_bits(list(counts.values())))


def test_every_budget_is_as_if_it_were_run_alone_and_used_as_far_as_outputs_give(tokenizer):
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


def test_held_out_outputs_are_encoded_by_the_tokenizer_and_priced(tokenizer: TaskTokenizer) -> None:
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


def test_a_model_s_price_is_measured_by_answers_of_exact_lengths(folder: Path) -> None:
    measured, told = measured_model(folder), list[tuple[int, int]]()
    price = measure_price(measured, TRAIN[:6], 12, lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] == len(told)
    assert price.prompt_ms >= 0
    assert price.step_ms >= 0
    assert price.of(12) > 0
    measured = measured_model(folder)
    prompts = measured.prompts(["play"] * 3)
    assert [len(r.tokens) for r in measured.exact_lengths(prompts, 9)] == [9] * 3
    room = 64 - len(prompts[0].ids)
    assert [len(r.tokens) for r in measured.exact_lengths(prompts, 900)] == [room] * 3


def run(budget: int, bits: float, ms: float, steps: float | None = None, of: str = "a") -> Any:
    return {
        "setting": of, "budget": budget, "renyi2_bits": bits, "ms_per_answer": ms,
        "steps_per_answer": steps, "quality": {"ignored": 1},
    }  # fmt: skip


def write(path: Path, *runs: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, runs)) + "\n\n")
    return path


def test_settings_are_judged_by_themselves_and_averaged(tmp_path: Path) -> None:
    right = [run(60, 5, 7, 4), run(0, 4, 9, 8), run(125, 6, 6, 3)]
    wrong = [run(0, 1, 7, of="b"), run(60, 2, 8, of="b"), run(125, 3, 9, of="b")]
    found = check(read_runs(write(tmp_path / "f", *right, *wrong)))
    one, other = found.settings
    assert (one.runs, one.lines, one.rises, one.right) == (3, 3, 2, 2)
    assert (one.tau, one.tau_steps, other.tau) == (-1, -1, 1)
    assert (found.mean_tau, found.right_share) == (0, 0.5)
    assert (found.as_json["runs"], len(check_page(found).tables[0].rows)) == (6, 2)


def test_several_runs_of_a_budget_are_one_by_their_medians_which_alone_says_nothing() -> None:
    runs = [run(0, 1, 9), run(60, 2, 8), run(60, 2, 100), run(60, 2, 7)]
    checked = check([MeasuredRun(**each) for each in runs])
    (found,) = checked.settings
    assert (found.runs, found.lines, found.tau) == (2, 4, -1)
    assert (checked.as_json["runs"], checked.as_json["lines"]) == (2, 4)
    assert checked.mean_tau_steps is None
    found = check([MeasuredRun(**run(0, 1, 9))])
    assert (found.mean_tau, found.right_share) == (None, None)
    assert check_page(found).summary[0].count("unknown") == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 1 "),
        ("{}", "setting is missing"),
        (json.dumps(run(0, 1, 9) | {"renyi2_bits": None}), "--train"),
        (json.dumps(run(0, 1, -1)), "ms_per_answer"),
        (json.dumps(run(0, float("nan"), 1)), "renyi2_bits"),
    ],
)
def test_a_line_that_is_no_run_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "f").write_text(line)
    with refused(FileError, said):
        read_runs(tmp_path / "f")


def test_a_byte_order_mark_is_no_part_of_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "f", run(0, 1, 9), run(1, 2, 8))
    found = read_runs(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_runs(path) == found


def test_a_file_without_runs_is_refused_and_the_example_is_a_run(tmp_path: Path) -> None:
    with refused(FileError, "none"):
        read_runs(tmp_path / "none")
    (tmp_path / "f").write_text("\n")
    with pytest.raises(FileError):
        read_runs(tmp_path / "f")
    assert MeasuredRun.model_validate_json(EXAMPLE).budget == 60


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [
        ([1, 2, 3, 4, 5], [3, 4, 1, 2, 5], (6 - 4) / 10),  # six pairs in order, four against it
        ([1, 2, 3, 4], [9, 5, 3, 1], -1),
        ([1, 2, 3], [1, 4, 9], 1),
        ([1, 2, 2, 3], [1, 2, 3, 3], 4 / 5),  # four pairs in order, one tie in either
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),  # two pairs in order, one tie in the first alone
        ([1, 1, 1], [1, 2, 3], None),
        ([1, 2, 3], [5, 5, 5], None),
        ([1], [2], None),
    ],
)
def test_tau_is_that_of_a_textbook(one: list[int], other: list[int], tau: float | None) -> None:
    assert kendall_tau(one, other) == pytest.approx(tau)


@pytest.mark.parametrize("seed", range(5))
def test_tau_turns_its_sign_with_a_series_and_does_not_know_their_order(seed: int) -> None:
    chance = random.Random(seed)
    one, other = ([chance.randint(0, 5) for _ in range(9)] for _ in range(2))
    tau = kendall_tau(one, other)
    assert tau is not None
    assert kendall_tau(other, one) == pytest.approx(tau)
    assert kendall_tau(one, [-x for x in other]) == pytest.approx(-tau)


def test_only_rises_count_and_only_falls_are_right() -> None:
    entropy, ms = [1, 2, 3, 2.5, 4, 4], [9, 7, 8, 1, 1, 0]
    # Rises 1 -> 2 (falls), 2 -> 3 (rises), 2.5 -> 4 (stays).
    assert falls_at_rises(entropy, ms) == (3, 1)
    assert falls_at_rises([3, 2], [1, 2]) == (0, 0)
