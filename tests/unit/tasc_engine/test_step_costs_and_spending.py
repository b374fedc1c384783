"""Step costs are measured, interpolated and kept in a file; drafts are spent by them."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_engine import EngineConfig, GenerationRequest, ModelSource, Target
from tasc_engine.kv.cache import RowCache
from tasc_engine.step.cost import REPEATS, Cost, StepCosts, _points, kept, measure
from tasc_engine.step.draft_budget import LONGEST_PAUSE, DraftBudget, Spent, convex_steps

CONFIG = EngineConfig(rows=4, max_model_len=64, max_draft_tokens=8)
SOME = StepCosts(
    "m", "d", "f",
    (Cost(4, 4, 0, 1.0), Cost(4, 8, 0, 2.0), Cost(4, 4, 100, 3.0), Cost(4, 8, 100, 5.0),
     Cost(1, 1, 0, 0.5)),
)  # fmt: skip


def at(rows: int, tokens: float, context: float) -> float:
    return float(SOME.seconds(rows, np.array([tokens], np.float64), context)[0])


def test_a_real_target_is_measured_for_full_and_partial_batches(folder: Path) -> None:
    target = Target.load(ModelSource(folder, dtype="float32"), CONFIG)
    seen: list[tuple[int, int]] = []
    found = measure(target, "tiny", progress=lambda done, of: seen.append((done, of)))
    points = [(c.rows, c.tokens, c.context) for c in found.costs]
    assert points == [(r, r * (1 + n), 56) for r in (4, 2, 1) for n in (0, 1, 3, 7)]
    assert seen == [(i + 1, REPEATS * len(points)) for i in range(REPEATS * len(points))]
    assert all(0 < c.seconds < 10 for c in found.costs)


def test_a_measurement_that_runs_out_of_time_has_the_full_batch_at_least(folder: Path) -> None:
    target = Target.load(ModelSource(folder, dtype="float32"), CONFIG)
    found = measure(target, "tiny", seconds=0.0)
    assert [(c.rows, c.tokens, c.context) for c in found.costs] == [
        (4, 4 * (1 + n), 56) for n in (0, 1, 3, 7)
    ]


@pytest.mark.parametrize(
    ("place", "seconds"),
    [
        ((4, 4, 0), 1.0), ((4, 6, 0), 1.5), ((4, 12, 0), 3.0), ((4, 6, 100), 4.0),
        ((4, 4, 50), 2.0), ((4, 6, 150), 4.0), ((3, 6, 0), 1.5), ((1, 9, 9), 0.5),
    ],
)  # fmt: skip
def test_between_points_costs_are_linear(place: tuple[int, int, int], seconds: float) -> None:
    assert at(*place) == pytest.approx(seconds)


def test_costs_are_measured_once_and_read_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    assert kept(path, lambda: SOME) == SOME
    assert kept(path, lambda: pytest.fail("measured again")) == SOME


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"model": 1}', '{"model": "m", "device": "d", "dtype": "f", "costs": []}'],
)
def test_a_file_that_is_none_is_measured_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    assert kept(path, lambda: SOME) == SOME
    assert kept(path, lambda: pytest.fail("not written")) == SOME


def test_where_costs_cannot_be_kept_they_are_measured_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file" / "costs.json", lambda: SOME) == SOME
    assert "cannot keep step costs in" in caplog.text


@pytest.mark.parametrize("length", range(20, 160, 7))
def test_a_step_of_any_engine_takes_time(length: int) -> None:
    """Contexts next to each other must not be drawn out to where they say less than nothing."""
    most = EngineConfig(rows=4, max_model_len=length, max_draft_tokens=8)
    noisy = np.random.default_rng(length)
    costs = StepCosts(
        "m", "d", "f",
        tuple(Cost(r, r * (1 + n), c, 1.0 + noisy.random()) for r, n, c in points(most)),
    )  # fmt: skip
    for rows in (1, 2, 3, 4):
        for context in (0.0, 32.0, float(length)):
            assert (costs.seconds(rows, np.arange(rows, 60.0), context) > 0.5).all()


def points(config: EngineConfig) -> list[tuple[int, int, int]]:
    class Shaped:
        """All that tells which points are measured."""

    shaped = Shaped()
    shaped.config = config
    shaped.cache = RowCache(1, config.rows * config.max_model_len)
    return list(_points(shaped))


ROWS, MOST = 8, 64


def costs_of(*points: tuple[int, float]) -> StepCosts:
    return StepCosts("m", "d", "f", tuple(Cost(ROWS, tokens, 64, s) for tokens, s in points))


# A plain step takes 1 ms, each token more a hundredth of that.
LINEAR = costs_of((8, 1e-3), (108, 2e-3))


def spent(drafted: int, accepted: int, draft_seconds: float = 1e-4) -> Spent:
    return Spent(ROWS, ROWS, 64, drafted, accepted, ROWS + accepted, draft_seconds)


def live(draft_budget: DraftBudget, chances: list[float], steps: int) -> tuple[list[int], float]:
    """Draft tokens of each step and tokens a second, where a draft has tokens of these chances."""
    bought, seconds, emitted = [], 0.0, 0.0
    rng = np.random.default_rng(0)
    for _ in range(steps):
        least = draft_budget.min_probs(ROWS, ROWS, 64)
        n = 0
        while n < min(len(least), len(chances)) and chances[n] >= least[n]:
            n += 1
        hits = int((rng.random(n) < chances[:n]).sum())
        drafting = 1e-4 if len(least) else 0.0
        draft_budget.learn(spent(n, hits, drafting))
        bought.append(n)
        emitted += ROWS + hits
        seconds += 1e-3 + 1e-5 * n + drafting
    return bought, emitted / seconds


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_shares_of_a_jump_are_convex_and_never_above_the_cost(values: list[float]) -> None:
    rising = np.maximum.accumulate(np.array(values))
    steps = convex_steps(rising)
    assert len(steps) == len(rising) - 1
    assert (np.diff(steps) >= -1e-6).all()
    curve = rising[0] + np.concatenate([[0.0], np.cumsum(steps, dtype=np.float64)])
    assert (curve <= rising + 1e-5).all()
    assert abs(curve[-1] - rising[-1]) < 1e-4


def test_a_jump_is_borne_by_all_tokens_behind_it() -> None:
    assert convex_steps(np.array([1.0, 2.0, 2.0, 2.0, 2.0])).tolist() == [0.25] * 4


def test_tokens_are_bought_up_to_the_greatest_rate() -> None:
    chances = [0.95**i for i in range(1, MOST)]
    bought, rate = live(DraftBudget(LINEAR, MOST), chances, 400)
    expected = [(ROWS + sum(chances[:n])) / (1e-3 + 1e-4 + 1e-5 * n) for n in range(len(chances))]
    best = int(np.argmax(expected))
    assert abs(np.mean(bought[50:]) - best) <= 2
    assert rate > 0.97 * max(expected)


def test_what_never_hits_is_hardly_tried() -> None:
    plain = ROWS / 1e-3
    draft_budget = DraftBudget(LINEAR, MOST)
    bought, rate = live(draft_budget, [0.0] * MOST, 20_000)
    assert not any(bought)
    assert rate > 0.99 * plain
    tried = sum(1 for _ in itertools.islice(drafting(DraftBudget(LINEAR, MOST)), 20_000) if _)
    assert tried < 400


def drafting(draft_budget: DraftBudget):
    """Whether each step drafts, where chances look good and never come true."""
    while True:
        least = draft_budget.min_probs(ROWS, ROWS, 64)
        draft_budget.learn(spent(min(len(least), 8), 0, 1e-4 if len(least) else 0.0))
        yield len(least) > 0


def test_drafting_comes_back_when_it_pays_again() -> None:
    draft_budget = DraftBudget(LINEAR, MOST)
    assert sum(itertools.islice(drafting(draft_budget), 5_000)) < 200
    bought, _ = live(draft_budget, [0.9] * 16, 2 * LONGEST_PAUSE)
    assert all(n > 0 for n in bought[-100:])


def test_a_prompt_beside_decoding_does_not_change_what_decoding_costs() -> None:
    """One row, then 12 tokens of a prompt, then one row: each has costs of its own."""
    alone = costs_of((1, 1e-3), (2, 2e-3), (64, 9e-3))
    draft_budget = DraftBudget(alone, 8)
    fresh = DraftBudget(alone, 8).min_probs(1, 1, 64)
    draft_budget.min_probs(1, 12, 64)
    assert (draft_budget.min_probs(1, 1, 64) == fresh).all()


def test_no_rows_cost_nothing_and_teach_nothing() -> None:
    draft_budget = DraftBudget(LINEAR, MOST)
    assert len(draft_budget.min_probs(0, 256, 64)) == 0
    before = draft_budget.min_probs(ROWS, ROWS, 64)
    draft_budget.learn(Spent(0, 256, 64.0, 0, 0, 0, 0.0))
    assert (draft_budget.min_probs(ROWS, ROWS, 64) == before).all()


def test_rows_that_ask_for_no_drafts_say_nothing_about_drafting(make_engine) -> None:
    """Plain requests between drafted ones must not look like drafts that never pay."""
    records = []
    engine = make_engine(on_step=records.append, costs=FREE)
    requests = [GenerationRequest(str(i), (5, 9, 30), 40, draft=i % 8 == 7) for i in range(64)]
    assert len(list(engine.generate(requests))) == 64
    assert not any(record.paused for record in records)
    assert sum(record.drafts for record in records) > 20


def test_an_engine_that_nothing_is_drafted_well_for_pauses(make_engine) -> None:
    records = []
    engine = make_engine(on_step=records.append, costs=DEAR)
    requests = [GenerationRequest(str(i), (5, 9, 30), 40) for i in range(32)]
    plain = list(make_engine(drafts=0).generate(requests))
    assert [r.tokens for r in engine.generate(requests)] == [r.tokens for r in plain]
    assert sum(record.paused for record in records) > len(records) / 2


# Of the tiny engine of these tests: drafts cost nothing, or a draft token as much as a whole step.
FREE = StepCosts("m", "d", "f", (Cost(2, 2, 64, 1.0), Cost(2, 10, 64, 1.0 + 1e-6)))
DEAR = StepCosts("m", "d", "f", (Cost(2, 2, 64, 1e-9), Cost(2, 10, 64, 8e-9)))
