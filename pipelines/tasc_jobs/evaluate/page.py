"""The report of an evaluation. It evaluates nothing."""

from collections.abc import Sequence

from tasc_jobs.evaluate.evaluation import Evaluated
from tasc_jobs.evaluate.quality import AtLevel
from tasc_jobs.evaluate.runs import Side
from tasc_jobs.report.document import Bars, Curve, Lines, ReportDocument, Table

_COSTS = (
    "", "ms an answer", "least", "most", "tokens an answer", "steps an answer", "tokens a step",
)  # fmt: skip

_FOOTER = (
    "A step is one forward of the model for a row; an answer in fewer, longer tokens, or with "
    "accepted drafts, takes fewer. Milliseconds are those of one row's share of a full batch. "
    "Quality is that of the plain answers; drafted ones are the same."
)
_MUCH_LONGER = 1.5


def evaluation_page(found: Evaluated) -> ReportDocument:
    """Quality, costs and, for labels, precision and recall."""
    tables = [
        Table("Quality", ("measure", "%"), tuple(map(_quality_row, found.quality.items()))),
        Table(
            f"Cost at b = {found.batch_rows}, median of {found.repeats} runs",
            _COSTS,
            tuple(_cost_row(side, costs) for side, costs in found.sides.items()),
        ),
    ]
    if found.precision_recall:
        tables.append(_levels_table(found.precision_recall))
    levels = (_levels_plot(found),) if found.precision_recall else ()
    plots = (*_plots(found), *levels)
    title = f"Evaluation of {found.setting}"
    return ReportDocument(title, tuple(_summary(found)), tuple(tables), plots, _FOOTER)


def _plots(found: Evaluated) -> tuple[Bars, Bars, Bars]:
    quality = tuple((_named(name), 100 * value) for name, value in found.quality.items())
    steps = tuple((side, costs.steps_per_answer) for side, costs in found.sides.items())
    ms = tuple((side, costs.ms_per_answer.median) for side, costs in found.sides.items())
    return (
        Bars("Quality", "%", quality),
        Bars("Steps", "steps an answer", steps),
        Bars("Time", "milliseconds an answer", ms),
    )


def _summary(found: Evaluated) -> list[str]:
    left_out = f", {found.too_long} left out for long prompts" if found.too_long else ""
    lines = [f"{found.rows:,} rows answered{left_out}; {found.budget} new tokens; {found.model}"]
    took = found.sides["plain"].tokens_per_answer
    lines.append(
        f"expected answers have {found.reference_tokens:.1f} tokens, the model's took {took:.1f}"
        + (": it has not learnt its new tokens, train longer" if _unlearnt(found, took) else "")
    )
    if found.renyi2_bits is not None:
        lines.append(f"Renyi entropy of order 2 of the output tokens: {found.renyi2_bits:.3f} bits")
    if found.speed_up is not None:
        lines.append(
            f"drafting: {found.speed_up:.2f} x; {found.identical} of {found.rows} drafted answers "
            "are the plain ones"
        )
    return lines


def _unlearnt(found: Evaluated, took: float) -> bool:
    return found.budget > 0 and took > _MUCH_LONGER * found.reference_tokens


def _quality_row(measure: tuple[str, float]) -> tuple[str, str]:
    name, value = measure
    return _named(name), f"{100 * value:.1f}"


def _named(measure: str) -> str:
    return measure.replace("_", " ")


def _cost_row(side: str, costs: Side) -> tuple[str, ...]:
    ms = costs.ms_per_answer
    return (
        side,
        *(f"{value:.2f}" for value in (ms.median, ms.least, ms.most)),
        f"{costs.tokens_per_answer:.2f}",
        f"{costs.steps_per_answer:.2f}",
        f"{costs.tokens_per_answer / costs.steps_per_answer:.2f}",
    )


def _levels_table(levels: Sequence[AtLevel]) -> Table:
    rows = tuple(
        (
            f"{at.level:.2f}",
            *(f"{100 * v:.1f}" for v in (at.quality.precision, at.quality.recall, at.quality.f1)),
        )
        for at in levels
    )
    columns = ("least confidence", "precision %", "recall %", "F1 %")
    return Table("Labels by the model's confidence in them", columns, rows)


def _levels_plot(found: Evaluated) -> Lines:
    recall = [100 * at.quality.recall for at in found.precision_recall]
    precision = [100 * at.quality.precision for at in found.precision_recall]
    line = Curve(found.setting, recall, precision)
    return Lines("Precision by recall of labels", "recall, %", "precision, %", (line,))
