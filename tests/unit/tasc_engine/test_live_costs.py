"""A table of step costs follows the times of real steps, and only what lasts moves it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tasc_engine.step.cost import Cost, StepCosts
from tasc_engine.step.draft_budget import LIKELY, PROBE, DraftBudget, Spent
from tasc_engine.step.live_costs import LOOK, WRONG_LOOKS, LiveCosts

ROWS, MOST, CONTEXT = 8, 248, 40.0
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
    """Steps of all sizes, small ones more often, whose times vary."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        tokens = int(ROWS * 32 ** rng.random())
        seconds = slower * SECONDS[tokens - ROWS] * math.exp(noise * rng.standard_normal())
        live.correct(ROWS, tokens, CONTEXT, float(seconds))


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_table_that_is_wrong_by_three_is_right_after_some_hundred_steps(factor: float) -> None:
    live = LiveCosts(wrong_by(*[factor] * 6))
    assert worst(live.table) == pytest.approx(math.log(3))
    serve(live, 10 * LOOK)
    assert worst(live.table) < math.log(1.2)
    assert live.error < 0.15


@pytest.mark.parametrize("factors", [(1, 1, 1, 1, 3, 3), (3, 3, 1, 1, 1, 1), (1, 3, 1, 3, 1, 3)])
def test_each_point_is_corrected_by_its_own_error(factors: tuple[float, ...]) -> None:
    live = LiveCosts(wrong_by(*factors))
    serve(live, 16 * LOOK)
    assert worst(live.table) < math.log(1.2)


@pytest.mark.parametrize("before", [0, 50, 2000])
def test_one_step_that_is_a_hundred_times_slow_moves_nothing(before: int) -> None:
    live, kept = LiveCosts(TRUE), []
    serve(live, before)
    live.correct(ROWS, 40, CONTEXT, 100 * SECONDS[32])
    serve(live, 4 * LOOK)
    assert worst(live.table) < math.log(1.1)
    assert not kept


def test_a_table_that_is_right_is_never_replaced() -> None:
    live = LiveCosts(TRUE, lambda costs: pytest.fail("kept"))
    table = live.table
    serve(live, 40 * LOOK)
    assert live.table is table


def test_a_busy_minute_does_not_reach_the_file_and_is_forgotten() -> None:
    live = LiveCosts(TRUE, lambda costs: pytest.fail("kept"))
    serve(live, WRONG_LOOKS * LOOK)
    for _ in range(3):
        serve(live, WRONG_LOOKS // 2 * LOOK, slower=2.0)
        assert worst(live.table) > math.log(1.2)
        serve(live, 2 * WRONG_LOOKS * LOOK)
        assert worst(live.table) < math.log(1.2)


def test_what_was_wrong_for_long_is_kept_once() -> None:
    kept: list[StepCosts] = []
    live = LiveCosts(wrong_by(*[3.0] * 6), kept.append)
    serve(live, (WRONG_LOOKS - 1) * LOOK)
    assert not kept
    serve(live, 4 * WRONG_LOOKS * LOOK)
    assert len(kept) == 1
    assert worst(kept[0]) < math.log(1.2)
    assert kept[0].measured.real_steps == WRONG_LOOKS * LOOK


def test_the_error_is_told_and_falls_as_the_table_is_corrected() -> None:
    live = LiveCosts(wrong_by(*[1.5] * 6))
    serve(live, 20, noise=0.0)
    early = live.error
    serve(live, 20 * LOOK, noise=0.0)
    assert early > 0.1 > 2 * live.error


def test_steps_of_shapes_that_were_not_measured_go_to_their_neighbours() -> None:
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
    """Draft tokens a step and tokens a second over the last 500 steps of so many."""
    budget, rng = DraftBudget(LiveCosts(costs), MOST), np.random.default_rng(0)
    found = []
    for _ in range(steps):
        chances = np.repeat(rng.uniform(0.85, 0.99) ** np.arange(1, 32), ROWS)
        least = budget.min_probs(ROWS, ROWS, CONTEXT)
        worth = chances[: len(least)] >= least
        n = len(worth) if worth.all() else int(worth.argmin())
        hits, seconds = int((rng.random(n) < chances[:n]).sum()), float(SECONDS[n])
        seconds *= math.exp(0.1 * rng.standard_normal())
        spent = Spent(ROWS, ROWS, CONTEXT, n, hits, ROWS + hits, 1e-4, seconds)
        budget.time(spent)
        budget.learn(spent)
        found.append((n, ROWS + hits, seconds))
    drafted, tokens, took = np.array(found[-500:]).sum(0)
    return drafted / 500, tokens / took


@pytest.mark.parametrize("factors", [(1, 1, 4, 4, 4, 4), (1, 3, 3, 3, 3, 3), (1, 9, 9, 9, 9, 9)])
def test_costs_that_keep_drafts_from_being_made_are_found_out(factors: tuple[float, ...]) -> None:
    right, rate = drafts(TRUE, 1_000)
    wrong, slow = drafts(wrong_by(*factors), 500)
    mended, again = drafts(wrong_by(*factors), 6_000)
    assert wrong < 0.7 * right
    assert mended == pytest.approx(right, rel=0.25)
    assert slow < 0.95 * again
    assert again == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(("likely", "plain"), [(24, 5), (0, 0)])
def test_only_drafts_of_a_probe_say_that_costs_are_right(likely: int, plain: int) -> None:
    """Not probes that drafted nothing, nor steps that asked for no drafts after a probe."""
    budget = DraftBudget(LiveCosts(wrong_by(1, 9, 9, 9, 9, 9)), MOST)

    def step(draft: bool = True) -> bool:
        least = budget.min_probs(ROWS, ROWS, CONTEXT) if draft else np.ones(1)
        probes = len(least) > 0 and bool(least.max() <= LIKELY)
        n = likely if probes else 0
        spent = Spent(ROWS, ROWS, CONTEXT, n, 0, ROWS, 1e-4, float(SECONDS[n]))
        budget.time(spent)
        if draft:
            budget.learn(spent)
        return probes

    for _ in range(4):
        assert next(n for n in range(2000) if step()) == PROBE
        for _ in range(plain):
            step(draft=False)
