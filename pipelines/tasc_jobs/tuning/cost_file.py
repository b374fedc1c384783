"""What one verify forward costs on a machine, read from a file. It measures nothing.

The file is JSON: the model, the device and the dtype that were measured, and seconds of one forward
over so many tokens in all, for so many rows at so much context.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasc_jobs.errors import JobError
from tasc_runtime.errors import FileError

EXAMPLE = (
    '{"model": "my-model", "device": "cpu", "dtype": "float32", "costs": ['
    '{"rows": 8, "tokens": 8, "context": 64, "seconds": 0.0058}, '
    '{"rows": 8, "tokens": 72, "context": 64, "seconds": 0.0190}]}'
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CostEntry(_Section):
    """One measured forward: tokens of all rows together, context of each row, seconds."""

    rows: int = Field(ge=1)
    tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)


class CostFile(_Section):
    """The content of a step-cost file; ``draft_seconds`` are those of one row in one step."""

    model: str
    device: str
    dtype: str
    draft_seconds: float | None = Field(None, ge=0, allow_inf_nan=False)
    costs: tuple[CostEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _measured_once(self) -> Self:
        places = [(c.rows, c.tokens, c.context) for c in self.costs]
        if twice := {p for p in places if places.count(p) > 1}:
            rows, tokens, context = min(twice)
            raise ValueError(f"{rows} rows, {tokens} tokens, context {context} stand there twice")
        return self

    def of(self, rows: int) -> list[CostEntry]:
        """The costs of steps of so many rows.

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
        """Costs of steps of so many rows, at the measured context nearest to this one.

        Raises:
            JobError: There are none for so many rows, or not from a plain step upwards.
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
    """Seconds of a forward by its tokens, for one number of rows; linear between measured ones."""

    rows: int
    context: int
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        return float(np.interp(self.rows, self.tokens, self.seconds))

    def at(self, tokens: float) -> float | None:
        """Seconds of a step of so many tokens; None where it is larger than what was measured."""
        return float(np.interp(tokens, self.tokens, self.seconds)) if self.reaches(tokens) else None

    def reaches(self, tokens: float) -> bool:
        return tokens <= self.tokens[-1]


def read_cost_file(path: Path) -> CostFile:
    """Read a step-cost file.

    Raises:
        FileError: It cannot be read, or is not as `CostFile` says.
    """
    try:
        return CostFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise FileError(f"cannot read step costs from {path}: {error}") from error
    except ValidationError as error:
        raise FileError(
            f"{path} holds no step costs: {_faults(error)}; a right file: {EXAMPLE}"
        ) from error


def _faults(error: ValidationError) -> str:
    """Every fault by its field; one that several costs share is said of the first of them."""
    alike: dict[tuple[str, str], list[str]] = {}
    found = [([str(part) for part in fault["loc"]], fault["msg"]) for fault in error.errors()]
    for where, said in found:
        if any(other[: len(where)] == where and other != where for other, _ in found):
            continue  # a list without a right entry is called empty; its entries' faults say more
        kind = ".".join("" if part.isdecimal() else part for part in where)
        alike.setdefault((kind, said), []).append(".".join(where) or "the file")
    return "; ".join(
        f"{places[0]}: {said}" + (f" (and {len(places) - 1} more such)" if places[1:] else "")
        for (_, said), places in alike.items()
    )
