"""Forecasts the speed-up by drafting on a machine with known step costs, before a deployment.

Drafts are replayed on held-out rows; the time of a step comes from a file of measured costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasc_draft import DraftSettings, Replay
from tasc_engine.config import MAX_NODES
from tasc_jobs.errors import JobError
from tasc_jobs.tuning.held_out import HeldOut
from tasc_runtime.engine_settings import EngineSettings, fault_of
from tasc_runtime.errors import FileError

EXAMPLE = (
    '{"model": "my-model", "device": "cpu", "dtype": "float32", "costs": ['
    '{"rows": 8, "tokens": 8, "context": 64, "seconds": 0.0058}, '
    '{"rows": 8, "tokens": 72, "context": 64, "seconds": 0.0190}]}'
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CostEntry(_Section):
    """One measured forward pass: tokens of all rows together, context of each row, seconds."""

    rows: int = Field(ge=1)
    tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)


class CostFile(_Section):
    """The content of a step-cost file; ``draft_seconds`` is the time for one row in one step."""

    model: str
    device: str
    dtype: str
    draft_seconds: float | None = Field(None, ge=0, allow_inf_nan=False)
    measured: dict[str, Any] | None = Field(None, description="where and when, for people")
    costs: tuple[CostEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _measured_once(self) -> Self:
        places = [(c.rows, c.tokens, c.context) for c in self.costs]
        if twice := {p for p in places if places.count(p) > 1}:
            rows, tokens, context = min(twice)
            raise ValueError(f"{rows} rows, {tokens} tokens, context {context} stand there twice")
        return self

    def of(self, rows: int) -> list[CostEntry]:
        """Returns the costs of steps of ``rows`` rows.

        Raises:
            JobError: There are none.
        """
        own = [c for c in self.costs if c.rows == rows]
        if not own:
            known = ", ".join(str(r) for r in sorted({c.rows for c in self.costs}))
            raise JobError(
                f"the file of step costs has none for b = {rows} rows, it has b = {known}: measure "
                f"it too, or ask with --rows {known.replace(' ', '')}"
            )
        return own

    def curve(self, rows: int, context: float) -> "StepCurve":
        """Returns the costs of steps of ``rows`` rows, at the measured context nearest to this.

        Raises:
            JobError: There are none for ``rows``, or they do not range from a plain step upwards.
        """
        own = self.of(rows)
        nearest = min((abs(c.context - context), c.context) for c in own)[1]
        points = sorted((c.tokens, c.seconds) for c in own if c.context == nearest)
        tokens, seconds = zip(*points, strict=True)
        if not tokens[0] <= rows < tokens[-1]:
            raise JobError(
                f"the costs for b = {rows} rows at context {nearest} span {tokens[0]} to "
                f"{tokens[-1]} tokens; a plain step has {rows} and one with drafts has more: "
                "measure both"
            )
        return StepCurve(rows, nearest, tokens, seconds)


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a forward pass by its tokens, for one number of rows, interpolated linearly."""

    rows: int
    context: int
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        return float(np.interp(self.rows, self.tokens, self.seconds))

    def at(self, tokens: float) -> float | None:
        """Returns the seconds of a step; None if it is larger than the measured ones."""
        return float(np.interp(tokens, self.tokens, self.seconds)) if self.reaches(tokens) else None

    @property
    def of_token(self) -> float:
        """Seconds that each further token, such as one of a prompt, adds to a large step."""
        tokens, seconds = self.tokens[-2:], self.seconds[-2:]
        return max(seconds[1] - seconds[0], 0.0) / (tokens[1] - tokens[0])

    def reaches(self, tokens: float) -> bool:
        return tokens <= self.tokens[-1]


def read_cost_file(path: Path) -> CostFile:
    """Read a step-cost file.

    Raises:
        FileError: The file cannot be read, or does not have the format of `CostFile`.
    """
    try:
        return CostFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise FileError(f"cannot read step costs from {path}: {error}") from error
    except ValidationError as error:
        raise FileError(
            f"{path} holds no step costs: {fault_of(error)}; a right file: {EXAMPLE}"
        ) from error


@dataclass(frozen=True)
class Option:
    """Drafting with one budget, for b rows.

    Attributes:
        budget: Maximum draft tokens per row and step.
        draft_seconds: Time to draft for one row in one step.
        step_seconds: Time of a step of all rows, drafting included; None if the step is larger than
            the measured ones.
        speed_up: Tokens per second, prompts included, divided by those without drafts; None if
            ``step_seconds`` is None.
    """

    budget: int
    tokens_per_step: float
    nodes_per_step: float
    draft_seconds: float
    step_seconds: float | None
    speed_up: float | None


@dataclass(frozen=True)
class Outlook:
    """The expected speed-up at ``rows`` = b rows decoded together."""

    rows: int
    context: int
    plain_seconds: float
    options: tuple[Option, ...]

    @property
    def best(self) -> Option | None:
        """The budget with the maximum speed-up, even if this is below 1; None without costs."""
        known = [option for option in self.options if option.speed_up is not None]
        return max(known, key=lambda option: option.speed_up or 0.0, default=None)

    @property
    def budget(self) -> int:
        """The recommended budget; 0 means no drafts."""
        return self.best.budget if self.best and (self.best.speed_up or 0.0) > 1.0 else 0

    @property
    def speed_up(self) -> float:
        """Speed-up with that budget; 1 without drafts."""
        return (self.best.speed_up or 1.0) if self.best and self.budget else 1.0

    def verdict(self) -> str:
        """Returns the recommendation as a sentence."""
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
        """Returns the figures as JSON values."""
        verdict = {"draft": self.budget > 0, "budget": self.budget, "speed_up": self.speed_up}
        return {**asdict(self), **verdict, "verdict": self.verdict()}


def how_to_set(task: str, found: Outlook, now: int) -> str | None:
    """Returns a text on how to give a task the recommended budget.

    Returns None if the task already has this budget, or no budget can be recommended.

    Args:
        now: The task's maximum of draft tokens per row and step, tuned or else from its record.
    """
    if found.best is None or found.budget == now:
        return None
    put = f"tasks: [{{name: {task}, draft: {{num_speculative_tokens: {found.budget}}}}}]"
    if found.budget > EngineSettings().max_draft_tokens:
        put += f" and engine: {{max_draft_tokens: {min(found.budget, MAX_NODES)}}}"
    return (
        f"b = {found.rows}: {task} drafts up to {now} tokens so far; put {put} into serve.yaml, or "
        f"run `tasc tune {task} --step-cost FILE --batch-size {found.rows}`, which chooses and "
        "keeps it"
    )


def replayed(
    held: HeldOut,
    settings: DraftSettings,
    budgets: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> dict[int, Replay]:
    """Returns replays of one half of the held-out rows by budget; the other half gives weights.

    Args:
        settings: Draft settings of the task, except for the budget.
        progress: Called after each replayed row.
    """
    settings = replace(settings, recent_tokens=0)
    weights = held.weights(settings) if settings.mixture == "mixed" else None
    return {
        budget: held.replay(replace(settings, num_speculative_tokens=budget), weights, progress)
        for budget in budgets
    }


def outlook(
    curve: StepCurve,
    replays: dict[int, Replay],
    draft_seconds: float | None,
    prompt_tokens: float = 0.0,
) -> Outlook:
    """Returns the outlook for replays by budget and for measured step costs; see `priced`."""
    options = (
        priced(curve, budget, found, draft_seconds, prompt_tokens)
        for budget, found in replays.items()
    )
    return Outlook(curve.rows, curve.context, curve.plain, tuple(options))


def priced(
    curve: StepCurve,
    budget: int,
    found: Replay,
    draft_seconds: float | None = None,
    prompt_tokens: float = 0.0,
) -> Option:
    """Returns the speed-up by a replay's drafts for the given step costs.

    speed-up = (s' * C(b) + P) / (s * (C(b + b * n) + b * d) + P), where b is the number of rows, n
    the number of nodes per step and row, s and s' the numbers of steps per answer with and without
    drafts, C the curve, and d the time to draft for one row. P is the time that b prompts and the
    forced tokens of b answers add to the steps that read them. Forced tokens of accepted drafts
    are part of P and not of n.

    Args:
        draft_seconds: d, as measured on the machine; None takes the replay's own time.
        prompt_tokens: Mean number of prompt tokens per row outside the common prefix.
    """
    nodes = found.charged / found.steps
    if draft_seconds is None:
        draft_seconds = (sum(found.draft_us) + sum(found.start_us)) / found.steps * 1e-6
    verify = curve.at(curve.rows * (1 + nodes))
    step = None if verify is None else verify + curve.rows * draft_seconds
    speed_up = None
    if step is not None:
        common = (found.rows * prompt_tokens + found.forced) * curve.rows * curve.of_token
        speed_up = (found.plain_steps * curve.plain + common) / (found.steps * step + common)
    per_step = found.nodes / found.steps
    return Option(budget, found.tokens_per_step, per_step, draft_seconds, step, speed_up)
