"""Chooses a task's proposer settings by replaying held-out rows.

The expected speed-up is maximised, because tokens per step alone would always favour the largest
drafts. The speed-up depends on the price of a draft token, or on a machine's measured step costs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from tasc_draft import DraftSettings, Replay
from tasc_draft.index.weights import Weights
from tasc_jobs.tuning.costs import StepCurve, speed_up
from tasc_jobs.tuning.held_out import HeldOut

BUDGETS = (4, 8, 16, 32)
NEIGHBOURS = (0, 16, 32, 64)
MIN_PROBS = (0.0, 0.02, 0.05, 0.1, 0.2)
RECENT_LOSS = 0.01  # maximum fraction of the expected speed-up that recent answers may cost
_FIRST_BUDGET = 8
_VARIED = ("num_speculative_tokens", "neighbours", "min_prob")

Price: TypeAlias = Callable[[Replay], float]
"""Returns the expected speed-up of a replay."""


def by_node(cost: float, prompt_tokens: float = 0.0) -> Price:
    """Returns a function that computes the expected speed-up of a replay from the cost of a token.

    Prompt tokens and forced tokens cost as much as draft tokens, with drafts and without.

    Args:
        cost: Cost of a token, as a fraction of a step without drafts.
        prompt_tokens: Mean number of tokens of a row's prompt.
    """

    def price(found: Replay) -> float:
        common = cost * (prompt_tokens * found.rows + found.forced)
        return (found.plain_steps + common) / (found.steps + cost * found.charged + common)

    return price


def by_curve(curve: StepCurve, prompt_tokens: float = 0.0) -> Price:
    """Returns a function that computes the expected speed-up of a replay from a machine's costs.

    The result is 0 if a step is larger than the measured ones.
    """
    return lambda found: speed_up(curve, found, prompt_tokens) or 0.0


@dataclass(frozen=True)
class Trial:
    """The result of a replay with some settings."""

    settings: DraftSettings
    replay: Replay
    speed_up: float

    def figures(self) -> dict[str, Any]:
        """Returns the varied settings and the result as JSON values."""
        found = self.replay
        counts = ("tokens", "steps", "nodes", "carried", "forced", "plain_steps", "tokens_per_step")
        return {
            **{name: getattr(self.settings, name) for name in _VARIED},
            **{name: getattr(found, name) for name in counts},
            "nodes_per_step": found.nodes / found.steps,
            "speed_up": self.speed_up,
        }


@dataclass(frozen=True)
class Worth:
    """Tokens per step with a source and without it.

    Without a source other than ``recent``, the weights are learnt again.

    Attributes:
        kept: Whether the chosen settings use the source.
    """

    source: str
    with_it: float
    without_it: float
    kept: bool

    @property
    def gain(self) -> float:
        return self.with_it - self.without_it

    def figures(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain}


@dataclass(frozen=True)
class Tuned:
    """The chosen settings, the trials behind the choice, and the weights to use with them.

    Attributes:
        by_neighbours: Trials by number of neighbours, each with its own weights.
        grid: Trials of budgets and minimum probabilities with the best number of neighbours.
    """

    chosen: Trial
    by_neighbours: tuple[Trial, ...]
    grid: tuple[Trial, ...]
    worths: tuple[Worth, ...]
    weights: Weights

    @property
    def trials(self) -> tuple[Trial, ...]:
        return (*self.by_neighbours, *self.grid)


@dataclass(frozen=True)
class AtRows:
    """The expected speed-up with ``rows`` rows decoded together.

    Attributes:
        speed_up: With the chosen settings; None if a step is larger than the measured ones.
        best_budget: The budget of the best trial at this number of rows.
        best_speed_up: The speed-up of the best trial; if it is below 1, drafts cost time.
    """

    rows: int
    plain_seconds: float
    speed_up: float | None
    best_budget: int
    best_speed_up: float | None

    def __str__(self) -> str:
        if self.speed_up is None:
            return f"b = {self.rows}: not measured"
        return f"b = {self.rows}: {self.speed_up:.2f} x"


def at_rows(tuned: Tuned, curve: StepCurve, prompt_tokens: float) -> AtRows:
    """Returns the speed-up at the number of rows of a curve; see `by_curve`."""
    price = by_curve(curve, prompt_tokens)
    trials = (tuned.chosen, *tuned.trials)
    found, budget = max((price(t.replay), t.settings.num_speculative_tokens) for t in trials)
    chosen = price(tuned.chosen.replay)
    return AtRows(curve.rows, curve.plain, chosen or None, budget, found or None)


def planned(held: HeldOut) -> int:
    """Returns the number of replays of `tune`, except trials that lack several sources."""
    return len(NEIGHBOURS) + len(BUDGETS) * len(MIN_PROBS) + len(held.sources)


def tune(
    held: HeldOut, base: DraftSettings, price: Price, progress: Callable[[], None] = lambda: None
) -> Tuned:
    """Try neighbours, then budgets and minimum probabilities, then the absence of each source.

    A source is left out if the expected speed-up does not fall without it. Recent answers are left
    out only if they lower the expected speed-up by more than RECENT_LOSS, because a replay cannot
    show their full gain: they help most where a model's answers differ from the corpus.

    Args:
        base: Supplies the settings that are not varied, except the mixture, which is ``mixed``.
        price: Returns the expected speed-up of a replay.
        progress: Called after each replay.
    """
    bench = _Bench(held, price, progress)
    base = replace(base, mixture="mixed", recent_tokens=0, num_speculative_tokens=_FIRST_BUDGET)
    first = [bench.learnt(replace(base, min_prob=0.0, neighbours=k)) for k in NEIGHBOURS]
    best, weights = max(first, key=lambda tried: tried[0].speed_up)
    grid = [
        bench.tried(
            replace(best.settings, num_speculative_tokens=budget, min_prob=min_prob), weights
        )
        for budget in BUDGETS
        for min_prob in MIN_PROBS
    ]
    best = max(grid, key=lambda trial: trial.speed_up)
    worths, chosen = _leave_one_out(bench, best, weights)
    return Tuned(
        chosen,
        tuple(trial for trial, _ in first),
        tuple(grid),
        tuple(worths),
        held.weights(chosen.settings, final=True),
    )


class _Bench:
    def __init__(self, held: HeldOut, price: Price, progress: Callable[[], None]) -> None:
        self.held = held
        self.price, self._progress = price, progress

    def tried(self, settings: DraftSettings, weights: Weights) -> Trial:
        found = self.held.replay(settings, weights)
        self._progress()
        return Trial(settings, found, self.price(found))

    def learnt(self, settings: DraftSettings) -> tuple[Trial, Weights]:
        weights = self.held.weights(settings)
        return self.tried(settings, weights), weights


def _leave_one_out(bench: _Bench, best: Trial, weights: Weights) -> tuple[list[Worth], Trial]:
    """Returns each source's worth, and the best trial without useless sources.

    Two sources may replace each other. So sources that can each be left out alone are removed one
    after the other, and each trial lacks the sources removed before. Recent answers are in no other
    trial, so they are added here.
    """
    whole = best.replay.tokens_per_step
    found: dict[str, tuple[float, float]] = {}
    idle: list[tuple[Trial, str]] = []
    recent = best
    for source in bench.held.sources:
        if source == "recent":
            online = replace(best.settings, recent_tokens=DraftSettings().recent_tokens)
            recent = bench.tried(online, weights)
            found[source] = recent.replay.tokens_per_step, whole
            continue
        trial, _ = bench.learnt(_without(best.settings, source))
        found[source] = whole, trial.replay.tokens_per_step
        if trial.speed_up >= best.speed_up:
            idle.append((trial, source))
    idle.sort(key=lambda each: each[0].speed_up, reverse=True)
    chosen = idle[0][0] if idle else best
    uncounted = _Bench(bench.held, bench.price, lambda: None)
    for _, source in idle[1:]:
        trial, _ = uncounted.learnt(_without(chosen.settings, source))
        if trial.speed_up >= chosen.speed_up:
            chosen = trial
    if recent.speed_up < (1 - RECENT_LOSS) * best.speed_up:
        chosen = replace(chosen, settings=_without(chosen.settings, "recent"))
    kept = chosen.settings.sources
    return [Worth(source, *pair, source in kept) for source, pair in found.items()], chosen


def _without(settings: DraftSettings, source: str) -> DraftSettings:
    return replace(settings, sources=tuple(name for name in settings.sources if name != source))
