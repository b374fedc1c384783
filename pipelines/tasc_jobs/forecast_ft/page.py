"""Reports of a forecast of fine-tuning, and of the test of such forecasts. They find nothing."""

from tasc_jobs.forecast_ft.check import Agreement, Check
from tasc_jobs.forecast_ft.forecast import Forecast, Point
from tasc_jobs.report.document import Curve, Lines, ReportDocument, Table

_POINTS = (
    "budget", "new tokens", "H2, bits", "shorter, train", "shorter, held out", "steps an answer",
    "ms an answer", "speed-up",
)  # fmt: skip
_CHECKS = (
    "setting", "runs", "lines", "tau, H2 and time", "tau, H2 and steps", "H2 rises", "time falls",
)  # fmt: skip


def forecast_page(found: Forecast) -> ReportDocument:
    """What to expect of each token budget."""
    first, points = found.points[0], found.points
    budgets = [point.budget for point in points]
    shorter = Curve("held out", budgets, [point.length_reduction for point in points])
    trained = Curve("train", budgets, [point.train_reduction for point in points])
    entropy = Curve(found.name, budgets, [point.renyi2_bits for point in points])
    return ReportDocument(
        f"Forecast of fine-tuning for {found.name}",
        _summary(found),
        (
            Table(
                f"What to expect of new tokens, without drafts, b = {found.batch_rows}",
                _POINTS,
                tuple(_row(point, first) for point in points),
            ),
        ),
        (
            Lines("Length of outputs", "new tokens, at most", "times shorter", (shorter, trained)),
            Lines("Entropy of output tokens", "new tokens, at most", "H2, bits", (entropy,)),
        ),
    )


def check_page(found: Check) -> ReportDocument:
    """What entropy told of runs that were measured."""
    share = found.right_share
    if share is None:
        right = "no setting has two budgets of different entropy, and with fewer there is no rank"
    else:
        right = f"time falls at {100 * share:.0f} % of the rises of entropy"
    return ReportDocument(
        "Entropy and measured time",
        (
            f"mean tau of entropy and time {_tau(found.mean_tau)}, of entropy and steps "
            f"{_tau(found.mean_tau_steps)}",
            right,
        ),
        (Table("Kendall's tau by setting", _CHECKS, tuple(map(_check_row, found.settings))),),
        (),
    )


def _summary(found: Forecast) -> tuple[str, ...]:
    lines = [f"lengths are those of {found.rows:,} held-out outputs; a step a token, one the end"]
    if found.price:
        price = found.price
        lines.append(
            f"measured at b = {found.batch_rows}: {price.prompt_ms:.2f} ms for an answer's prompt, "
            f"{price.step_ms:.3f} ms for each of its steps"
        )
    if found.points[-1].new_tokens < found.points[-1].budget:
        lines.append(f"the outputs give {found.points[-1].new_tokens} new tokens and no more")
    return tuple(lines)


def _row(point: Point, first: Point) -> tuple[str, ...]:
    ms, before = point.ms_per_answer, first.ms_per_answer
    return (
        str(point.budget),
        str(point.new_tokens),
        f"{point.renyi2_bits:.3f}",
        f"{point.train_reduction:.2f} x",
        f"{point.length_reduction:.2f} x",
        f"{point.steps_per_answer:.2f}",
        "not measured" if ms is None else f"{ms:.2f}",
        "not measured" if ms is None or before is None else f"{before / max(ms, 1e-9):.2f} x",
    )


def _check_row(each: Agreement) -> tuple[str, ...]:
    return (
        each.setting,
        str(each.runs),
        str(each.lines),
        _tau(each.tau),
        _tau(each.tau_steps),
        str(each.rises),
        str(each.right),
    )


def _tau(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.3f}"
