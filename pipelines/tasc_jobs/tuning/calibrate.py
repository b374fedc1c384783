"""Calibrates the probabilities of a task's labels on held-out rows, and makes the report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import redis

from tasc_jobs.errors import JobError
from tasc_jobs.report.document import Curve, Lines, ReportDocument, Table
from tasc_jobs.task_inputs import read_files
from tasc_runtime.data.rows import Fields
from tasc_runtime.engine.calibration import MIN_ROWS, Calibration, Prior, Reliability, labels_of
from tasc_store import TaskStore

TERMS = (
    "Calibration error: mean difference between the probability of the answered label and the "
    "share of right labels, over 15 intervals of the probability. Brier score: sum over labels of "
    "squared differences from 1 for the right label and from 0 for others."
)
_FOOTER = (
    f"{TERMS} The figures after calibration are for rows on which it was not fitted (two halves, "
    "in turn)."
)


def calibrate_job(
    client: redis.Redis,
    url: str,
    name: str,
    files: Sequence[Path],
    fields: Fields,
    end: str | None,
    prior: Prior = "uniform",
    **engine: Any,
) -> tuple[dict[str, Any], ReportDocument]:
    """Fits a task's temperature, and keeps it in a new version of the task's record.

    Args:
        end, prior: See `LLM.calibrate`; the record keeps them.
        engine: Fields of `EngineSettings`.

    Returns:
        The figures as JSON values, and the report.

    Raises:
        FileError: A file cannot be read.
        JobError: The task has no choices, an output is none of them, or there are too few rows.
        StoreError: The task does not exist, or Redis fails.
        TextError, EngineError: The model cannot be loaded.
    """
    tasks = TaskStore(client)
    version = tasks.versions(name)[-1]
    before = tasks.get(name, version)
    if not before.choices:
        raise JobError(f"task {name} has no labels; set them with `tasc task set {name} --choices`")
    found = read_files(files, fields)
    outputs, own = [row.output for row in found.rows], before.label_end if end is None else end
    try:
        labels_of(outputs, before.choices, own)  # before the model is loaded
    except ValueError as error:
        raise JobError(str(error)) from error
    if len(outputs) < MIN_ROWS:
        given = f"{len(outputs)} rows are given"
        raise JobError(f"{given}; at least {MIN_ROWS} are needed: name more files by --rows")
    from tasc_runtime.llm import LLM  # imports torch, after the checks

    llm = LLM.from_task(name, url, **engine)
    try:
        fit = llm.calibrate([(row.input, row.output) for row in found.rows], end=end, prior=prior)
    except ValueError as error:
        raise JobError(str(error)) from error
    fitted = llm.record
    try:
        record = replace(
            before,
            label_end=fitted.label_end,
            label_temperature=fitted.label_temperature,
            label_biases=fitted.label_biases,
            calibrated_for=fitted.calibrated_for,
        )
    except ValueError as error:
        raise JobError(f"task {name} was changed meanwhile; calibrate it again") from error
    version = tasks.put(record, after=version)
    figures = {"task": name, "version": version, "refused": found.refused, **asdict(fit)}
    return figures, _page(name, version, found.refused, fit)


def _page(name: str, version: int, refused: int, fit: Calibration) -> ReportDocument:
    lines = [
        f"Version {version} of task {name} divides log-probabilities of labels by "
        f"{fit.temperature:.3f}{' and adds a bias to each' * bool(fit.biases)}, fitted on "
        f"{fit.rows:,} rows.",
        "With abstain_below, a classification has no label if the likeliest is less probable; the "
        "second table shows what a threshold leaves, and how much of that is right.",
    ]
    if refused:
        lines.append(f"{refused} lines were refused.")
    tables, plots = reliability_parts({"before": fit.before, "after": fit.after})
    title = f"Calibration of {name}"
    return ReportDocument(title, tuple(lines), tables, plots, _FOOTER)


def reliability_parts(
    sides: Mapping[str, Reliability],
) -> tuple[tuple[Table, ...], tuple[Lines, ...]]:
    """Returns tables and plots of named reliabilities; thresholds are those of the last one."""
    last, shown = list(sides.items())[-1]
    quality = Table.of("Reliability of the probabilities", map(_row, sides, sides.values()))
    thresholds = Table.of(
        f"Thresholds, {last}",
        (
            {
                "abstain below": f"{each.threshold:g}",
                "answered": f"{each.coverage:.1%}",
                "right": "-" if each.accuracy is None else f"{each.accuracy:.1%}",
            }
            for each in shown.thresholds
        ),
    )
    reliability = Lines(
        "Right labels by probability",
        "mean probability of the label",
        "share of right labels",
        (*map(_curve, sides, sides.values()), Curve("equal", (0, 1), (0, 1))),
    )
    answered = [(at.coverage, at.accuracy) for at in shown.thresholds if at.accuracy is not None]
    coverage = Lines(
        "Right labels by answered rows",
        "share of rows with a label",
        "share of right labels",
        (Curve(last, [x for x, _ in answered], [y for _, y in answered]),),
    )
    return (quality, thresholds), (reliability, coverage)


def _row(side: str, found: Reliability) -> dict[str, str]:
    return {
        "probabilities": side,
        "calibration error": f"{found.error:.2%}",
        "Brier score": f"{found.brier:.4f}",
        "right labels": f"{found.accuracy:.2%}",
    }


def _curve(side: str, found: Reliability) -> Curve:
    return Curve(side, [p for p, _, _ in found.bins], [share for _, share, _ in found.bins])
