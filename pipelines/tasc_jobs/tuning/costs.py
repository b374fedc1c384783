"""Measured costs of steps, and the speed-up that replayed drafts have at these costs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasc_draft import Replay
from tasc_jobs.errors import JobError
from tasc_runtime.engine_settings import EngineSettings, fault_of
from tasc_runtime.errors import FileError
from tasc_store import TaskRecord


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CostEntry(_Section):
    """One measured forward pass: tokens of all rows together, context of each row, seconds."""

    rows: int = Field(ge=1)
    tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)


class CostFile(_Section):
    """The content of a file of step costs, as an engine writes it."""

    model: str
    device: str
    dtype: str
    measured: dict[str, Any] | None = Field(None, description="place and time, for users")
    costs: tuple[CostEntry, ...] = Field(min_length=1)

    @property
    def rows(self) -> list[int]:
        """The measured numbers of rows, in ascending order."""
        return sorted({c.rows for c in self.costs})

    def curve(self, rows: int, context: float) -> "StepCurve":
        """Returns the costs of steps of ``rows`` rows, at the measured context nearest ``context``.

        Raises:
            JobError: There are no costs for ``rows`` rows, for a plain step or for a larger step.
        """
        own = [c for c in self.costs if c.rows == rows]
        if not own:
            raise JobError(
                f"there are no step costs for b = {rows} rows, only for b = "
                f"{', '.join(map(str, self.rows))}; use one of these as --batch-size"
            )
        nearest = min((abs(c.context - context), c.context) for c in own)[1]
        points = sorted((c.tokens, c.seconds) for c in own if c.context == nearest)
        tokens, seconds = zip(*points, strict=True)
        if not tokens[0] <= rows < tokens[-1]:
            raise JobError(
                f"the costs for b = {rows} rows at context {nearest} span {tokens[0]} to "
                f"{tokens[-1]} tokens; a plain step has {rows} tokens and a step with drafts has "
                "more: measure both"
            )
        return StepCurve(rows, nearest, tokens, seconds)

    def curves(self, context: float) -> list["StepCurve"]:
        """Returns the curve of each number of rows that has costs without and with drafts."""
        found = list[StepCurve]()
        for rows in self.rows:
            with suppress(JobError):
                found.append(self.curve(rows, context))
        return found


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
        if tokens > self.tokens[-1]:
            return None
        return float(np.interp(tokens, self.tokens, self.seconds))

    @property
    def of_token(self) -> float:
        """Seconds that each further token, such as a prompt token, adds to a large step."""
        tokens, seconds = self.tokens[-2:], self.seconds[-2:]
        return max(seconds[1] - seconds[0], 0.0) / (tokens[1] - tokens[0])


def read_cost_file(path: Path) -> CostFile:
    """Read a file of step costs.

    Raises:
        FileError: The file cannot be read, or does not have the format of `CostFile`.
    """
    try:
        return CostFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise FileError(f"cannot read step costs from {path}: {error}") from error
    except ValidationError as error:
        raise FileError(
            f"{path} holds no step costs: {fault_of(error)}; use --measure-cost, or a file that a "
            "replica or --measure-cost wrote"
        ) from error


def costs_here(record: TaskRecord, rows: int, note: Callable[[str], None]) -> CostFile:
    """Returns the step costs of a task's model on this machine, up to ``rows`` rows.

    Costs are measured once. Later calls, and engines of the same shape, read the costs from a file.

    Raises:
        TextError, EngineError: The model cannot be loaded.
    """
    import torch

    from tasc_engine import EngineConfig, Target
    from tasc_engine.model.loading import max_positions
    from tasc_jobs.task_inputs import device_here
    from tasc_runtime.engine.builder import DEFAULT_MODEL_LEN, model_source
    from tasc_runtime.engine.step_costs import step_costs

    settings = EngineSettings(rows=rows)
    torch.set_num_threads(settings.torch_threads)
    source = model_source(record, device_here(settings.device))
    length = min(DEFAULT_MODEL_LEN, max_positions(source.folder))
    target = Target.load(source, EngineConfig(rows=rows, max_model_len=length))
    found, _ = step_costs(target, source, say=note, seconds=settings.cost_seconds)
    return CostFile.model_validate(found.as_json())


def speed_up(curve: StepCurve, found: Replay, prompt_tokens: float = 0.0) -> float | None:
    """Returns the speed-up by a replay's drafts for the given step costs.

    speed-up = (s' * C(b) + P) / (s * (C(b + b * n) + b * d) + P), where b is the number of rows, n
    the number of nodes per step and row, s and s' the numbers of steps per answer with and without
    drafts, C the curve, and d the time to draft for one row in the replay. P is the time that b
    prompts and the forced tokens of b answers add to the steps that read them. Forced tokens of
    accepted drafts are part of P and not of n.

    Args:
        prompt_tokens: Mean number of prompt tokens per row outside the common prefix.

    Returns:
        The speed-up; None if a step is larger than the measured ones.
    """
    draft_seconds = (sum(found.draft_us) + sum(found.start_us)) / found.steps * 1e-6
    verify = curve.at(curve.rows * (1 + found.charged / found.steps))
    if verify is None:
        return None
    step = verify + curve.rows * draft_seconds
    common = (found.rows * prompt_tokens + found.forced) * curve.rows * curve.of_token
    return (found.plain_steps * curve.plain + common) / (found.steps * step + common)
