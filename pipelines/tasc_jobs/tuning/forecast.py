"""What speed-up drafting will bring on a machine whose step costs are known, before deploying.

Drafts are replayed on held-out rows; a step's time comes from the machine's costs. It runs no model
and changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tasc_draft import DraftSettings, Replay
from tasc_engine.layout import MOST_NODES
from tasc_jobs.tuning.cost_file import StepCurve
from tasc_jobs.tuning.held_out import HeldOut
from tasc_runtime.engine_settings import EngineSettings


@dataclass(frozen=True)
class Option:
    """Drafting with one budget, for b rows.

    Attributes:
        budget: Most draft tokens of a row's step.
        draft_seconds: Of drafting for one row in one step.
        step_seconds: Of a step of all rows, drafting included; None beyond what was measured.
        speed_up: Tokens a second over those without drafts; None as before.
    """

    budget: int
    tokens_per_step: float
    nodes_per_step: float
    draft_seconds: float
    step_seconds: float | None
    speed_up: float | None


@dataclass(frozen=True)
class Outlook:
    """What to expect at ``rows`` = b rows decoded together."""

    rows: int
    context: int
    plain_seconds: float
    options: tuple[Option, ...]

    @property
    def best(self) -> Option | None:
        """The budget with the greatest speed-up, worth it or not; None if no cost is known."""
        known = [option for option in self.options if option.speed_up is not None]
        return max(known, key=lambda option: option.speed_up or 0.0, default=None)

    @property
    def budget(self) -> int:
        """The budget to draft with; 0 means not to draft."""
        return self.best.budget if self.best and (self.best.speed_up or 0.0) > 1.0 else 0

    @property
    def speed_up(self) -> float:
        """With that budget; 1 without drafts."""
        return (self.best.speed_up or 1.0) if self.best and self.budget else 1.0

    def verdict(self) -> str:
        """In words."""
        at = f"b = {self.rows}: "
        if self.best is None:
            return at + "unknown, every budget needs larger steps than were measured"
        if self.budget:
            return at + f"draft {self.budget} tokens, {self.speed_up:.2f} x"
        return at + (
            f"do not draft; drafting loses: {self.best.speed_up:.2f} x at its best, "
            f"with {self.best.budget} tokens"
        )

    def figures(self) -> dict[str, Any]:
        """All of it for machines."""
        verdict = {"draft": self.budget > 0, "budget": self.budget, "speed_up": self.speed_up}
        return {**asdict(self), **verdict, "verdict": self.verdict()}


def how_to_set(task: str, found: Outlook, now: int) -> str | None:
    """The settings that give a task the budget recommended; None where it has it, or none is known.

    Args:
        now: Most draft tokens of a row's step, as the task was tuned, else as its record says.
    """
    if found.best is None or found.budget == now:
        return None
    put = f"tasks: [{{name: {task}, draft: {{num_speculative_tokens: {found.budget}}}}}]"
    if found.budget > EngineSettings().max_draft_tokens:
        put += f" and engine: {{max_draft_tokens: {min(found.budget, MOST_NODES)}}}"
    return (
        f"b = {found.rows}: {task} drafts up to {now} tokens so far; put {put} into serve.yaml, or "
        f"run `tasc tune {task} --step-cost FILE --rows {found.rows}`, which chooses and keeps it"
    )


def replayed(
    held: HeldOut,
    settings: DraftSettings,
    budgets: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> dict[int, Replay]:
    """Replays of the held-out rows by budget, with weights learnt from the other half of them.

    Args:
        settings: How the task is drafted, but for the budget.
        progress: Called behind each replayed row.
    """
    settings = replace(settings, recent_tokens=0)
    weights = held.weights(settings) if settings.mixture == "mixed" else None
    return {
        budget: held.replay(replace(settings, num_speculative_tokens=budget), weights, progress)
        for budget in budgets
    }


def outlook(curve: StepCurve, replays: dict[int, Replay], draft_seconds: float | None) -> Outlook:
    """What replays by budget promise where steps cost this much."""
    options = (priced(curve, budget, found, draft_seconds) for budget, found in replays.items())
    return Outlook(curve.rows, curve.context, curve.plain, tuple(options))


def priced(
    curve: StepCurve, budget: int, found: Replay, draft_seconds: float | None = None
) -> Option:
    """What a replay's drafts bring where steps cost this much.

    With b rows, n nodes and t tokens a step and row, C the curve and d the drafting of one row:
    speed-up = t * C(b) / (C(b + b * n) + b * d).

    Args:
        draft_seconds: d, as measured on the machine; None takes the replay's own.
    """
    nodes = found.nodes / found.steps
    if draft_seconds is None:
        draft_seconds = (sum(found.draft_us) + sum(found.start_us)) / found.steps * 1e-6
    verify = curve.at(curve.rows * (1 + nodes))
    step = None if verify is None else verify + curve.rows * draft_seconds
    speed_up = None if step is None else found.tokens_per_step * curve.plain / step
    return Option(budget, found.tokens_per_step, nodes, draft_seconds, step, speed_up)
