"""Measures the quality and the cost of a model's answers to test rows, and makes the report."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tasc_engine import ModelSource
from tasc_jobs.errors import EmptyCorpusError, JobError, UsageError
from tasc_jobs.report.document import Bars, Curve, Lines, ReportDocument, Table
from tasc_jobs.statistics.distribution import renyi2_bits
from tasc_jobs.statistics.quality import (
    AtLevel,
    Metrics,
    Piece,
    confident_labels,
    precision_recall,
    quality,
    require_judgeable,
)
from tasc_jobs.task_inputs import GenerationSettings
from tasc_jobs.tuning.calibrate import TERMS, reliability_parts
from tasc_protocol import GuideSpec, LabelScores
from tasc_runtime.engine.calibration import (
    Reliability,
    Scaling,
    Scored,
    labels_of,
    require_fitting,
)
from tasc_runtime.progress import StageProgress, silent
from tasc_store import CorpusRow, TaskRecord
from tasc_text import TaskTokenizer
from tasc_train.enrich.enrichment import RECORD
from tasc_train.evaluate.measured_model import MeasuredModel, Prompt, Setup, Side, measure

_FOOTER = (
    "A step is one forward pass of the model for a row. An answer takes fewer steps if its tokens "
    "are longer, or if drafts are accepted. Milliseconds are the share of one row in a full batch. "
    "Quality is measured on the answers without drafts."
)
_MUCH_LONGER = 1.5  # ratio to the expected length from which new tokens count as not learnt

STAGES = {"index": "rows", "answer": "rows", "confidence": "rows"}


@dataclass(frozen=True)
class Evaluation:
    """The inputs of an evaluation.

    Attributes:
        train: Rows of the draft index. Without rows, there are no runs with drafts.
        repeats: Number of timed runs without drafts, and the same number with drafts.
        drafts: Whether to also measure with drafts.
        setting: Name shared by runs that differ only in the number of new tokens.
        record: The task's record, if there is one. ``labels`` scores its choices, with its label
            end and its calibration.
    """

    source: ModelSource
    generation: GenerationSettings
    setup: Setup
    metrics: Metrics
    test: Sequence[CorpusRow]
    train: Sequence[CorpusRow] = ()
    repeats: int = 3
    drafts: bool = True
    setting: str = ""
    record: TaskRecord | None = None


@dataclass(frozen=True)
class Evaluated:
    """The results of an evaluation.

    Attributes:
        rows: Number of answered rows.
        too_long: Number of rows that were left out because their prompts leave no room for an
            answer.
        batch_rows: Number of rows decoded together.
        budget: Number of new tokens of the model's tokenizer; 0 if it was not enriched.
        renyi2_bits: Renyi entropy of the train outputs' tokens; None without train rows.
        sides: Costs without drafts (``plain``) and, if measured, with drafts (``drafted``).
        reference_tokens: Mean number of tokens of an expected answer, with end-of-sequence. If
            the model's answers have many more, it does not use its tokenizer's longest tokens.
        identical: Number of drafted answers that equal the plain ones; None without drafts.
        precision_recall: Quality of lists of labels by the model's confidence, for ``labels`` of a
            task without choices; else empty.
        reliability: For ``labels`` of a task with choices, how far the probabilities of the choices
            can be trusted, ``uncalibrated`` and, if the task is calibrated, ``calibrated``.
    """

    model: str
    setting: str
    rows: int
    too_long: int
    batch_rows: int
    repeats: int
    budget: int
    renyi2_bits: float | None
    quality: dict[str, float]
    sides: dict[str, Side]
    identical: int | None
    reference_tokens: float
    precision_recall: tuple[AtLevel, ...] = ()
    reliability: dict[str, Reliability] = field(default_factory=dict)

    @property
    def speed_up(self) -> float | None:
        """Median plain time divided by median drafted time; None without drafts."""
        if "drafted" not in self.sides:
            return None
        plain, drafted = (self.sides[side].ms_per_answer.median for side in ("plain", "drafted"))
        return plain / drafted

    @property
    def as_json(self) -> dict[str, Any]:
        """All fields; ``ms_per_answer`` and ``steps_per_answer`` are the plain medians."""
        plain = self.sides["plain"]
        return {
            **asdict(self),
            "sides": {side: _figures(found) for side, found in self.sides.items()},
            "speed_up": self.speed_up,
            "ms_per_answer": plain.ms_per_answer.median,
            "steps_per_answer": plain.steps_per_answer,
        }


def evaluate(given: Evaluation, progress: StageProgress = silent) -> Evaluated:
    """Answers the test rows without and with drafts, and judges the answers without drafts.

    Raises:
        JobError: The model cannot be loaded, or the engine ended an answer with an error.
        EmptyCorpusError: No test row's prompt leaves room for an answer.
        UsageError: A test row's output cannot be judged by the metrics.
        GuideError: The task's choices cannot be scored with this model's tokenizer.
    """
    outputs, record, labels = [row.output for row in given.test], given.record, None
    require_judgeable(outputs, given.metrics, [row.key for row in given.test])
    if given.metrics == "labels" and record and record.choices:
        labels = GuideSpec("labels", record.choices, end=record.label_end)
        try:
            outputs = labels_of(outputs, record.choices, record.label_end)
        except ValueError as error:
            raise UsageError(f"{error} with `tasc task set {record.name}`") from error
        try:
            require_fitting(len(outputs), len(record.choices))
        except ValueError as error:
            raise UsageError(f"--limit: {error}") from error
    measured = MeasuredModel(given.source, given.generation, given.setup)
    prompts = measured.prompts([row.input for row in given.test], labels)
    if not prompts:
        raise EmptyCorpusError(
            f"no prompt of {len(given.test)} test rows leaves room for an answer in "
            f"{measured.config.max_model_len} tokens; raise --max-model-len, or name other rows"
        )
    index = None
    if given.train and given.drafts:
        progress("index", 0, len(given.train))
        index = measured.index(given.train)
        progress("index", len(given.train), len(given.train))
    done, of = 0, given.repeats * len(prompts) * (1 if index is None else 2)

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        progress("answer", done, of)

    progress("answer", 0, of)
    sides = measure(measured, prompts, index, given.repeats, advance)
    expected = [outputs[p.row] for p in prompts]
    answers = sides["plain"].answers
    levels: tuple[AtLevel, ...] = ()
    reliability: dict[str, Reliability] = {}
    if record and labels:
        reliability = _reliability(measured, prompts, expected, record, labels, progress)
    elif given.metrics == "labels":
        levels = _levels(measured, prompts, expected, progress)
    same = sum(map(str.__eq__, answers, sides["drafted"].answers)) if index else None
    return Evaluated(
        model=str(given.source.folder),
        setting=given.setting,
        rows=len(prompts),
        too_long=len(given.test) - len(prompts),
        batch_rows=given.setup.rows,
        repeats=given.repeats,
        budget=_budget(given.source),
        renyi2_bits=_renyi(measured.tokenizer, given.train),
        quality=quality(answers, expected, given.metrics),
        sides=sides,
        identical=same,
        reference_tokens=_reference(measured.tokenizer, expected),
        precision_recall=levels,
        reliability=reliability,
    )


def _levels(
    measured: MeasuredModel,
    prompts: Sequence[Prompt],
    expected: Sequence[str],
    progress: StageProgress,
) -> tuple[AtLevel, ...]:
    """Answers the prompts again with token probabilities, untimed, and judges the labels."""
    found: dict[int, dict[str, float]] = {}
    measured.draft_from(None)
    for row, result in measured.answers(prompts, logprobs=True):
        pieces: list[Piece] = [
            (measured.tokenizer.token_bytes(each.token), each.logprob)
            for each in result.logprobs
            if each.token not in measured.tokenizer.eos_ids
        ]
        found[row] = confident_labels(pieces)
        progress("confidence", len(found), len(prompts))
    return precision_recall([found[p.row] for p in prompts], expected)


def _reliability(
    measured: MeasuredModel,
    prompts: Sequence[Prompt],
    expected: Sequence[str],
    record: TaskRecord,
    labels: GuideSpec,
    progress: StageProgress,
) -> dict[str, Reliability]:
    """Scores the labels behind each prompt, untimed, and judges their probabilities."""
    found: dict[int, LabelScores] = {}
    for row, scores in measured.scores(prompts, labels):
        found[row] = scores
        progress("confidence", len(found), len(prompts))
    rows = Scored.of([found[p.row] for p in prompts], expected)
    none = np.zeros(len(record.choices))
    scalings = {"uncalibrated": Scaling(1.0, none)}
    if (temperature := record.label_temperature) is not None:
        scalings["calibrated"] = Scaling(temperature, none + (record.label_biases or 0))
    return {
        name: Reliability.of(np.exp(scaling.log_shares(rows.logprobs)), rows.right)
        for name, scaling in scalings.items()
    }


def _budget(source: ModelSource) -> int:
    record = source.folder / RECORD
    if not record.is_file():
        return 0
    try:
        return len(json.loads(record.read_text())["tokens"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"{record} is damaged ({error!r}); copy it again from the folder that `tasc enrich` "
            "wrote"
        ) from error


def _reference(tokenizer: TaskTokenizer, expected: Sequence[str]) -> float:
    return sum(len(ids) + 1 for ids in tokenizer.encode_outputs(expected)) / len(expected)


def _renyi(tokenizer: TaskTokenizer, train: Sequence[CorpusRow]) -> float | None:
    counts = Counter(
        id_ for ids in tokenizer.encode_outputs([row.output for row in train]) for id_ in ids
    )
    return renyi2_bits(list(counts.values())) if counts else None


def _figures(side: Side) -> dict[str, Any]:
    found = asdict(side)
    del found["answers"]
    return {**found, "tokens_per_step": side.tokens_per_answer / side.steps_per_answer}


def evaluation_page(found: Evaluated) -> ReportDocument:
    """Returns the report: quality, costs and, for labels, the quality by confidence."""
    quality = tuple((name.replace("_", " "), 100 * value) for name, value in found.quality.items())
    tables = [
        Table.of(
            "Quality", ({"measure": name, "%": f"{percent:.1f}"} for name, percent in quality)
        ),
        Table.of(
            f"Cost at b = {found.batch_rows}, median of {found.repeats} runs",
            (_cost_row(side, costs) for side, costs in found.sides.items()),
        ),
    ]
    steps = tuple((side, costs.steps_per_answer) for side, costs in found.sides.items())
    ms = tuple((side, costs.ms_per_answer.median) for side, costs in found.sides.items())
    plots: list[Lines | Bars] = [
        Bars("Quality", "%", quality),
        Bars("Steps", "steps an answer", steps),
        Bars("Time", "milliseconds an answer", ms),
    ]
    if levels := found.precision_recall:
        tables.append(Table.of("Labels by the model's confidence in them", map(_level_row, levels)))
        recall = [100 * at.quality.recall for at in levels]
        precision = [100 * at.quality.precision for at in levels]
        line = Curve(found.setting, recall, precision)
        plots.append(Lines("Precision by recall of labels", "recall, %", "precision, %", (line,)))
    if found.reliability:
        more_tables, more_plots = reliability_parts(found.reliability)
        tables.extend(more_tables)
        plots.extend(more_plots)
    footer = f"{_FOOTER} {TERMS}" if found.reliability else _FOOTER
    title = f"Evaluation of {found.setting}"
    return ReportDocument(title, tuple(_summary(found)), tuple(tables), tuple(plots), footer)


def _summary(found: Evaluated) -> list[str]:
    left_out = f", {found.too_long} left out for long prompts" if found.too_long else ""
    lines = [f"{found.rows:,} rows answered{left_out}; {found.budget} new tokens; {found.model}"]
    tokens = found.sides["plain"].tokens_per_answer
    unlearnt = found.budget > 0 and tokens > _MUCH_LONGER * found.reference_tokens
    lines.append(
        f"expected answers have {found.reference_tokens:.1f} tokens, "
        f"the model's answers have {tokens:.1f}"
        + (": the model has not learnt its new tokens; train longer" if unlearnt else "")
    )
    if found.renyi2_bits is not None:
        lines.append(f"Renyi entropy of order 2 of the output tokens: {found.renyi2_bits:.3f} bits")
    if found.speed_up is not None:
        lines.append(
            f"drafting: {found.speed_up:.2f} x; {found.identical} of {found.rows} drafted answers "
            "equal the plain ones"
        )
    return lines


def _cost_row(side: str, costs: Side) -> dict[str, str]:
    ms = costs.ms_per_answer
    return {
        "": side,
        "ms an answer": f"{ms.median:.2f}",
        "minimum": f"{ms.min:.2f}",
        "maximum": f"{ms.max:.2f}",
        "tokens an answer": f"{costs.tokens_per_answer:.2f}",
        "steps an answer": f"{costs.steps_per_answer:.2f}",
        "tokens a step": f"{costs.tokens_per_answer / costs.steps_per_answer:.2f}",
    }


def _level_row(at: AtLevel) -> dict[str, str]:
    return {
        "confidence from": f"{at.level:.2f}",
        "precision %": f"{100 * at.quality.precision:.1f}",
        "recall %": f"{100 * at.quality.recall:.1f}",
        "F1 %": f"{100 * at.quality.f1:.1f}",
    }
