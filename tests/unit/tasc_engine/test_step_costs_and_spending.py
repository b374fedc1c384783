"""Tests that step costs are measured, stored and updated by real steps, and limit drafts."""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_layouts import forest

from support import FakeClock, Silent, index_of, replace, ruled
from tasc_draft import Drafts
from tasc_engine import (
    EngineConfig,
    GuideSpec,
    ModelSource,
    Request,
    Sampling,
    Target,
)
from tasc_engine.kv.cache import RowCache
from tasc_engine.step import live_costs
from tasc_engine.step.cost import (
    BRIEF,
    THOROUGH,
    Cost,
    StepCosts,
    _points,
    effort_on,
    kept,
    measure,
    write,
)
from tasc_engine.step.draft_budget import (
    LIKELY,
    LONGEST_PAUSE,
    PROBE,
    TRIAL,
    Decision,
    DraftBudget,
    Spent,
    convex_steps,
)
from tasc_engine.step.live_costs import LOOK, WRONG_LOOKS, LiveCosts
from tasc_text import TaskTokenizer

EOS = 0
CONFIG = EngineConfig(rows=4, max_model_len=64, max_draft_tokens=8)
SOME = StepCosts(
    "m", "d", "f",
    (Cost(4, 4, 0, 1.0), Cost(4, 8, 0, 2.0), Cost(4, 4, 100, 3.0), Cost(4, 8, 100, 5.0),
     Cost(1, 1, 0, 0.5)),
)  # fmt: skip


def at(rows: int, tokens: float, context: float) -> float:
    return float(SOME.seconds(rows, np.array([tokens], np.float64), context)[0])


def test_step_costs_are_measured_for_full_and_partial_batches(folder: Path) -> None:
    target = Target.load(ModelSource(folder, dtype="float32"), CONFIG)
    seen: list[tuple[int, int]] = []
    found = measure(target, "tiny", progress=lambda done, of: seen.append((done, of)))
    points = [(c.rows, c.tokens, c.context) for c in found.costs]
    assert points == [(r, r * (1 + n), 56) for r in (4, 2, 1) for n in (0, 1, 3, 7)]
    assert 2 * len(points) < len(seen) <= THOROUGH.rounds * len(points)
    assert seen == [(i + 1, THOROUGH.rounds * len(points)) for i in range(len(seen))]
    assert all(0 < c.seconds < 10 for c in found.costs)
    assert found.measured.threads == torch.get_num_threads()
    short = measure(target, "tiny", seconds=0.0)  # the full batch at least
    assert [(c.rows, c.tokens, c.context) for c in short.costs] == points[:4]


class Scripted:
    """A target with forward passes that take the seconds given by a test, one after the other."""

    config, device_name, dtype_name, vocab_size = CONFIG, "d", "f", 64
    cache = RowCache(1, CONFIG.rows * CONFIG.max_model_len)

    def __init__(self, clock: FakeClock, seconds: Iterable[float]) -> None:
        self.clock, self.seconds, self.forwards = clock, iter(seconds), 0

    def next_tokens(self, batch: object) -> None:
        self.clock.now += next(self.seconds)
        self.forwards += 1


POINTS = 12


@pytest.mark.parametrize(
    ("rounds", "costs"),
    [([1.0, 1.0], 1.0), ([9.0, 1.0, 1.01], 1.0), ([9.0, 5.0, 2.0, 1.0, 1.0], 1.0)],
)
def test_measurement_continues_while_minima_fall(monkeypatch, rounds, costs) -> None:
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    warm = [x for _ in range(POINTS) for x in (7.0, rounds[0])]
    later = [x for found in rounds[1:] for x in [found] * POINTS]
    target = Scripted(clock, [*warm, *later, *[1.0] * 10 * POINTS])
    found = measure(target, "m", seconds=1e9)
    assert [c.seconds for c in found.costs] == pytest.approx([costs] * POINTS)
    assert target.forwards == POINTS * (1 + max(len(rounds), 3))


def test_gpu_is_measured_in_two_rounds_and_three_seconds(monkeypatch) -> None:
    """The least of two times counts, and the measurement does not wait for points to settle."""
    assert (effort_on("cuda"), effort_on("cpu")) == (BRIEF, THOROUGH)
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    target = Scripted(clock, [0.002] * POINTS + [0.001] * POINTS)
    found = measure(target, "m", effort=BRIEF)
    assert [c.seconds for c in found.costs] == pytest.approx([0.001] * POINTS)
    assert target.forwards == 2 * POINTS
    slow = Scripted(clock, [1.0] * 100)
    assert len(measure(slow, "m", effort=BRIEF).costs) == slow.forwards == 4  # the full batch


@pytest.mark.parametrize(
    ("place", "seconds"),
    [
        ((4, 4, 0), 1.0), ((4, 6, 0), 1.5), ((4, 12, 0), 3.0), ((4, 6, 100), 4.0),
        ((4, 4, 50), 2.0), ((4, 6, 150), 4.0), ((3, 6, 0), 1.5), ((1, 9, 9), 0.5),
    ],
)  # fmt: skip
def test_costs_are_interpolated_linearly(place: tuple[int, int, int], seconds: float) -> None:
    assert at(*place) == pytest.approx(seconds)


EMPTY = '{"model": "m", "device": "d", "dtype": "f", "costs": []}'


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": 1}', EMPTY])
def test_missing_cost_file_is_measured_once(tmp_path: Path, content: str) -> None:
    path = tmp_path / "deep" / "costs.json"
    if content is not None:
        path.parent.mkdir()
        path.write_text(content)
    assert kept(path, lambda: SOME) == SOME
    assert kept(path, lambda: pytest.fail("not written")) == SOME


def test_cost_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write(path, SOME)
    with path.open() as before:
        write(path, replace(SOME, model="other"))
        assert StepCosts.from_json(json.loads(before.read())) == SOME
    assert [file.name for file in tmp_path.iterdir()] == ["costs.json"]


def test_costs_are_measured_if_the_file_cannot_be_written(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file" / "costs.json", lambda: SOME) == SOME
    assert "costs.json" in caplog.text


@pytest.mark.parametrize("length", range(20, 160, 7))
def test_step_costs_are_positive(length: int) -> None:
    """Extrapolation from neighbouring contexts must not give negative costs."""
    config = EngineConfig(rows=4, max_model_len=length, max_draft_tokens=8)
    target = SimpleNamespace(config=config, cache=RowCache(1, 4 * length))
    noisy = np.random.default_rng(length)
    found = (Cost(r, r * (1 + n), c, 1.0 + noisy.random()) for r, n, c in _points(target))
    costs = StepCosts("m", "d", "f", tuple(found))
    for rows in (1, 2, 3, 4):
        for context in (0.0, 32.0, float(length)):
            assert (costs.seconds(rows, np.arange(rows, 60.0), context) > 0.5).all()


ROWS, MOST, CONTEXT = 8, 64, 40.0


def costs_of(*points: tuple[int, float]) -> StepCosts:
    return StepCosts("m", "d", "f", tuple(Cost(ROWS, tokens, 64, s) for tokens, s in points))


# A plain step takes 1 ms, each token more a hundredth of that.
LINEAR = costs_of((8, 1e-3), (108, 2e-3))


def budget_of(costs: StepCosts, most: int = MOST) -> DraftBudget:
    return DraftBudget(LiveCosts(costs), most)


def spend(
    budget: DraftBudget,
    n: int,
    hits: int,
    seconds: float,
    drafts: bool = True,
    beginning: float = 0.0,
) -> None:
    """Simulates a step of all rows with this duration, with or without a request for drafts."""
    drafting = 1e-4 + beginning if drafts else 0.0
    spent = Spent(
        ROWS, ROWS, CONTEXT, n, n, ROWS + hits, drafting, seconds, decision=budget.decision
    )
    budget.time(spent)
    budget.learn(spent)


def live(
    budget: DraftBudget,
    steps: int,
    chances_of: Callable[[np.random.Generator], np.ndarray],
    seconds_of: Callable[[int], float] = lambda drafted: 1e-3 + 1e-5 * drafted,
    noise: float = 0.0,
) -> np.ndarray:
    """``[steps, 3]`` draft tokens, tokens and seconds; a draft's tokens have these chances."""
    rng, found = np.random.default_rng(0), []
    for _ in range(steps):
        chances, min_probs = chances_of(rng), budget.min_probs(ROWS, ROWS, CONTEXT)
        most = min(len(chances), len(min_probs))
        n = [*(chances[:most] >= min_probs[:most]), False].index(False)
        hits = int((rng.random(n) < chances[:n]).sum())
        seconds = seconds_of(n) * math.exp(noise * rng.standard_normal())
        spend(budget, n, hits, seconds, len(min_probs) > 0)
        found.append((n, ROWS + hits, seconds + 1e-4 * (len(min_probs) > 0)))
    return np.array(found)


def rate(found: np.ndarray) -> float:
    """Returns tokens per second."""
    return float(found[:, 1].sum() / found[:, 2].sum())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_marginal_costs_are_convex_and_below_the_cost(values: list[float]) -> None:
    rising = np.maximum.accumulate(np.array(values))
    steps = convex_steps(rising)
    assert len(steps) == len(rising) - 1
    assert (np.diff(steps) >= -1e-6).all()
    curve = rising[0] + np.concatenate([[0.0], np.cumsum(steps, dtype=np.float64)])
    assert (curve <= rising + 1e-5).all()
    assert abs(curve[-1] - rising[-1]) < 1e-4


def test_cost_jump_is_spread_over_the_following_tokens() -> None:
    assert convex_steps(np.array([1.0, 2.0, 2.0, 2.0, 2.0])).tolist() == [0.25] * 4


def test_draft_budget_reaches_the_highest_token_rate() -> None:
    chances = 0.95 ** np.arange(1, MOST)
    found = live(budget_of(LINEAR), 400, lambda rng: chances)
    expected = [(ROWS + sum(chances[:n])) / (1e-3 + 1e-4 + 1e-5 * n) for n in range(len(chances))]
    assert abs(np.mean(found[50:, 0]) - int(np.argmax(expected))) <= 2
    assert rate(found) > 0.97 * max(expected)


def test_useless_drafts_are_tried_rarely() -> None:
    found = live(budget_of(LINEAR), 20_000, lambda rng: np.zeros(MOST))
    assert not any(found[:, 0])
    assert rate(found) > 0.99 * ROWS / 1e-3
    assert sum(itertools.islice(drafting(budget_of(LINEAR)), 20_000)) < 400


def drafting(draft_budget: DraftBudget):
    """Yields whether each step drafts if chances look good but drafts are never accepted."""
    while True:
        n = min(len(draft_budget.min_probs(ROWS, ROWS, CONTEXT)), 8)
        spend(draft_budget, n, 0, 1e-3 + 1e-5 * n, n > 0)
        yield n > 0


def test_drafting_resumes_when_drafts_save_time() -> None:
    draft_budget = budget_of(LINEAR)
    assert sum(itertools.islice(drafting(draft_budget), 5_000)) < 200
    found = live(draft_budget, 2 * LONGEST_PAUSE, lambda rng: np.full(16, 0.9))
    assert (found[-100:, 0] > 0).all()


def test_row_start_time_does_not_prolong_a_pause() -> None:
    draft_budget = budget_of(LINEAR)
    assert sum(itertools.islice(drafting(draft_budget), 5_000)) < 200
    paused, drafted = True, list[bool]()
    for _ in range(2 * LONGEST_PAUSE):
        min_probs = draft_budget.min_probs(ROWS, ROWS, CONTEXT)
        n = min(len(min_probs), 8)
        spend(draft_budget, n, 2, 1e-3 + 1e-5 * n, n > 0, 5e-3 * paused)
        paused = n == 0
        drafted.append(n > 0)
    assert all(drafted[-100:])


def test_drafting_pauses_begin_short_and_double_in_length() -> None:
    steps = itertools.islice(drafting(budget_of(LINEAR)), 400)
    pauses = [len([*run]) for drafts, run in itertools.groupby(steps) if not drafts]
    assert pauses[:2] == [4, 8]  # a probe falls into the next


def test_prompts_do_not_change_decoding_costs() -> None:
    """One row, then 12 tokens of a prompt, then one row: each has costs of its own."""
    alone = costs_of((1, 1e-3), (2, 2e-3), (64, 9e-3))
    draft_budget = budget_of(alone, 8)
    fresh = budget_of(alone, 8).min_probs(1, 1, 64)
    draft_budget.min_probs(1, 12, 64)
    assert (draft_budget.min_probs(1, 1, 64) == fresh).all()


def test_steps_without_rows_are_ignored() -> None:
    draft_budget = budget_of(LINEAR)
    assert len(draft_budget.min_probs(0, 256, 64)) == 0
    before = draft_budget.min_probs(ROWS, ROWS, 64)
    draft_budget.learn(Spent(0, 256, 64.0, 0, 0, 0, 0.0, 0.1))
    assert (draft_budget.min_probs(ROWS, ROWS, 64) == before).all()


def test_undrafted_rows_do_not_affect_the_budget(folder, make_engine, monkeypatch) -> None:
    """Plain requests between drafted ones must not look like drafts that never pay."""
    monkeypatch.setattr(live_costs, "LOOK", 1 << 40)  # the costs stay as they are
    (known,) = make_engine(drafts=0).generate([Request("known", (5, 9, 30), 40)])
    index = index_of(TaskTokenizer.from_folder(folder), [known.tokens] * 4)
    records = []
    engine = make_engine(on_step=records.append, costs=FREE, index=index)
    requests = [Request(str(i), (5, 9, 30), 40, draft=i % 8 == 7) for i in range(64)]
    assert len(list(engine.generate(requests))) == 64
    assert not any(record.paused for record in records)
    assert sum(record.drafts for record in records) > 20


def test_engine_with_useless_drafts_pauses_drafting(make_engine) -> None:
    records = []
    engine = make_engine(on_step=records.append, costs=DEAR)
    requests = [Request(str(i), (5, 9, 30), 40) for i in range(32)]
    plain = list(make_engine(drafts=0).generate(requests))
    assert [r.tokens for r in engine.generate(requests)] == [r.tokens for r in plain]
    assert sum(record.paused for record in records) > len(records) / 2


def test_single_token_labels_do_not_pause_drafting(make_engine) -> None:
    """Such rows get no drafts, which is no evidence on the value of drafts for other rows."""
    records, guide = [], GuideSpec("choice", ("alarm set", "play music", "friday"))
    engine = make_engine(on_step=records.append, costs=FREE)
    requests = [Request(str(i), (5, 9, 30), 40, guide=guide) for i in range(64)]
    assert len(list(engine.generate(requests))) == 64
    assert len(records) > 2 * TRIAL
    assert not any(record.paused for record in records)


class Ends(Silent):
    """Drafts an end of sequence for each row."""

    def propose(self, rows: Any, budget: Any, min_probs: Any = None) -> Drafts:
        none = min_probs is not None and len(min_probs) < len(rows)
        sizes = [0 if none else min(n, 1) for n in budget.tolist()]
        return forest([[-1] * n for n in sizes], [[EOS] * n for n in sizes])


def test_drafts_that_end_answers_save_no_forward_pass(make_engine) -> None:
    records, sampling = [], Sampling(logit_bias=((EOS, 100.0),))
    engine = make_engine(on_step=records.append, costs=FREE, proposer=Ends())
    asked = (Request(str(i), (5, 9, 30), 40, **ruled(sampling)) for i in range(64))
    assert all(result.tokens == (EOS,) for result in engine.generate(asked))
    assert sum(int(record.accepted.sum()) for record in records) > 2 * TRIAL
    assert any(record.paused for record in records)


def test_steps_with_forced_tokens_correct_the_costs(make_engine) -> None:
    """All steps but the first, which reads the prompts, have more than one token for each row."""
    records, parts = [], itertools.product(("alarm", "play"), ("set", "friday"), ("off", "music"))
    guide = GuideSpec("choice", tuple(" intent: ".join(part) for part in parts))
    engine = make_engine(on_step=records.append, costs=FREE)
    requests = [Request(str(i), (5, 9, 30), 40, guide=guide) for i in range(2)]
    assert len(list(engine.generate(replace(r, draft=False) for r in requests))) == 2
    assert all(record.forced_tokens for record in records[:-1])
    assert records[-1].cost_error > 0


@pytest.mark.parametrize(
    ("busy", "seconds", "corrects"),
    [(True, 1e-9, True), (False, 1e-9, False), (False, 1.0, True)],
)
def test_time_of_a_step_that_the_host_was_late_for_only_lowers_costs(
    make_engine, busy, seconds, corrects
) -> None:
    costs = StepCosts("m", "d", "f", (Cost(2, 2, 64, seconds), Cost(2, 10, 64, seconds)))
    records = []
    engine = make_engine(on_step=records.append, costs=costs)
    engine._target.is_busy = lambda: busy
    assert len(list(engine.generate(Request(str(i), (5, 9, 30), 20) for i in range(4)))) == 4
    assert (records[-1].cost_error > 0) == corrects


# Costs of the tests' engine: drafts cost nothing, or a draft token costs as much as a whole step.
FREE = StepCosts("m", "d", "f", (Cost(2, 2, 64, 1.0), Cost(2, 10, 64, 1.0 + 1e-6)))
DEAR = StepCosts("m", "d", "f", (Cost(2, 2, 64, 1e-9), Cost(2, 10, 64, 8e-9)))


DRAFTED = (0, 1, 3, 7, 15, 31)
TRUE = StepCosts(
    "m", "d", "f",
    tuple(Cost(ROWS, ROWS * (1 + n), 64, 2e-3 + 1e-4 * ROWS * n) for n in DRAFTED),
)  # fmt: skip


def wrong_by(*factors: float) -> StepCosts:
    changed = zip(TRUE.costs, factors, strict=True)
    return replace(TRUE, costs=tuple(replace(c, seconds=f * c.seconds) for c, f in changed))


def worst(costs: StepCosts) -> float:
    pairs = zip(costs.costs, TRUE.costs, strict=True)
    return max(abs(math.log(a.seconds / b.seconds)) for a, b in pairs)


SIZES = np.arange(ROWS, ROWS * 32 + 1)
SECONDS = TRUE.seconds(ROWS, SIZES.astype(np.float64), CONTEXT)


def serve(live: LiveCosts, steps: int, noise: float = 0.1, slower: float = 1.0) -> None:
    """Simulates steps of all sizes, small ones more often, with varying times."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        tokens = int(ROWS * 32 ** rng.random())
        seconds = slower * SECONDS[tokens - ROWS] * math.exp(noise * rng.standard_normal())
        live.correct(ROWS, tokens, CONTEXT, float(seconds))


@pytest.mark.parametrize(
    "factors",
    [[1 / 3] * 6, [3] * 6, (1, 1, 1, 1, 3, 3), (3, 3, 1, 1, 1, 1), (1, 3, 1, 3, 1, 3)],
    ids=str,
)
def test_each_wrong_cost_is_corrected_by_its_own_error(factors: Sequence[float]) -> None:
    live = LiveCosts(wrong_by(*factors))
    assert worst(live.table) == pytest.approx(math.log(3))
    serve(live, 16 * LOOK)
    assert worst(live.table) < math.log(1.2)


@pytest.mark.parametrize("before", [0, 50, 2000])
def test_single_slow_step_changes_no_cost(before: int) -> None:
    live = LiveCosts(TRUE)
    serve(live, before)
    live.correct(ROWS, 40, CONTEXT, 100 * SECONDS[32])
    serve(live, 4 * LOOK)
    assert worst(live.table) < math.log(1.1)


def test_correct_cost_table_is_not_replaced() -> None:
    live = LiveCosts(TRUE, lambda costs: pytest.fail("kept"))
    table = live.table
    serve(live, 40 * LOOK)
    assert live.table is table


def test_busy_minute_does_not_change_the_cost_file() -> None:
    live = LiveCosts(TRUE, lambda costs: pytest.fail("kept"))
    serve(live, WRONG_LOOKS * LOOK)
    for _ in range(3):
        serve(live, WRONG_LOOKS // 2 * LOOK, slower=2.0)
        assert worst(live.table) > math.log(1.2)
        serve(live, 2 * WRONG_LOOKS * LOOK)
        assert worst(live.table) < math.log(1.2)


def test_lasting_cost_correction_is_written_once() -> None:
    kept: list[StepCosts] = []
    live = LiveCosts(wrong_by(*[3.0] * 6), kept.append)
    serve(live, (WRONG_LOOKS - 1) * LOOK)
    assert not kept
    serve(live, 4 * WRONG_LOOKS * LOOK)
    assert len(kept) == 1
    assert worst(kept[0]) < math.log(1.2)
    assert kept[0].measured.real_steps == WRONG_LOOKS * LOOK


def test_cost_error_falls_as_the_table_is_corrected() -> None:
    live = LiveCosts(wrong_by(*[1.5] * 6))
    serve(live, 20, noise=0.0)
    early = live.error
    serve(live, 20 * LOOK, noise=0.0)
    assert early > 0.1 > 2 * live.error


def test_steps_of_unmeasured_shapes_correct_the_costs_of_neighbours() -> None:
    """Fewer rows, longer contexts and more tokens than any that was measured."""
    table = StepCosts(
        "m", "d", "f",
        tuple(Cost(r, r * (1 + n), c, 1e-3) for r in (4, 1) for c in (64, 512) for n in (0, 7)),
    )  # fmt: skip
    live = LiveCosts(table)
    for rows, tokens, context in ((3, 3, 0.0), (4, 40, 9999.0), (2, 9, 288.0), (1, 1, 64.0)):
        for _ in range(4 * LOOK):
            live.correct(rows, tokens, context, 2e-3)
        assert live.table.seconds(rows, np.array([tokens], np.float64), context) == pytest.approx(
            2e-3, rel=0.2
        )


def drafts(costs: StepCosts, steps: int) -> tuple[float, float]:
    """Returns draft tokens per step and tokens per second over the last 500 of ``steps`` steps."""
    found = live(
        *(budget_of(costs, 248), steps),
        lambda rng: np.repeat(rng.uniform(0.85, 0.99) ** np.arange(1, 32), ROWS),
        lambda drafted: float(SECONDS[drafted]),
        noise=0.1,
    )[-500:]
    return found[:, 0].mean(), rate(found)


@pytest.mark.parametrize("factors", [(1, 1, 4, 4, 4, 4), (1, 3, 3, 3, 3, 3), (1, 9, 9, 9, 9, 9)])
def test_too_high_costs_are_detected_by_probes(factors: tuple[float, ...]) -> None:
    right, rate = drafts(TRUE, 1_000)
    wrong, slow = drafts(wrong_by(*factors), 500)
    corrected, again = drafts(wrong_by(*factors), 6_000)
    assert wrong < 0.7 * right
    assert corrected == pytest.approx(right, rel=0.25)
    assert slow < 0.95 * again
    assert again == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(("likely", "plain"), [(24, 5), (0, 0)])
def test_only_probes_with_draft_tokens_confirm_costs(likely: int, plain: int) -> None:
    """Probes without draft tokens do not count, nor do steps without drafts after a probe."""
    budget = budget_of(wrong_by(1, 9, 9, 9, 9, 9), 248)

    def step(draft: bool = True) -> bool:
        min_probs = budget.min_probs(ROWS, ROWS, CONTEXT) if draft else np.ones(1)
        probes = len(min_probs) > 0 and bool(min_probs.max() <= LIKELY)
        n = likely if probes else 0
        decision = budget.decision if draft else Decision()
        seconds = float(SECONDS[n])
        spent = Spent(ROWS, ROWS, CONTEXT, n, n, ROWS, 1e-4, seconds, decision=decision)
        budget.time(spent)
        if draft:
            budget.learn(spent)
        return probes

    for _ in range(4):
        assert next(n for n in range(2000) if step()) == PROBE
        for _ in range(plain):
            step(draft=False)


@pytest.mark.parametrize("reads", [False, True])
def test_forced_tokens_do_not_hide_step_costs(reads: bool) -> None:
    """Each step has other tokens beside those of its rows: forced ones, or those of a prompt."""
    far = costs_of((8, 1e-3), (24, 1e-3), (108, 1.0))
    budget, probes, brought = budget_of(far), 0, 12
    for _ in range(2 * PROBE):
        min_probs = budget.min_probs(ROWS, ROWS + brought, CONTEXT, reads)
        probes += bool(min_probs.max() <= LIKELY)
        n = int((min_probs <= LIKELY / 2).sum())
        decision = budget.decision
        spent = Spent(ROWS, ROWS + brought, CONTEXT, n, n, ROWS + n, 1e-4, 2e-3, reads, decision)
        budget.time(spent)
        budget.learn(spent)
    assert (probes > 0) == (not reads)
    assert (budget.cost_error > 0) == (not reads)
