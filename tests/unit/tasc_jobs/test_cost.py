"""Tests of the speed and cost of jobs, measured and estimated."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import FakeClock, refused, write_rows
from tasc_jobs.batch import generate
from tasc_jobs.batch.cost import Cost, DryRun, Meter
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.work import JobProgress, JobReport
from tasc_jobs.cli.generate import _check_report
from tasc_jobs.errors import JobError, UsageError
from tasc_jobs.preview import Preview, PreviewSide
from tasc_jobs.report.web_page import write_html
from tasc_protocol import Request, SamplingDefaults

PREVIEW = Preview(20, 1, 20, plain=PreviewSide(4.0, 400, 400), drafted=PreviewSide(1.0, 400, 100))
# A quarter of the compared rows repeat another; 72,000 rows take the time of 54,000.
DRY_RUN = DryRun(PREVIEW, 72_000, engines=2, compared=8000, repeats=2000, price_per_hour=3.0)


def progress(rows: int, tokens: int, steps: int, repeats: int, engines: int) -> JobProgress:
    return JobProgress(JobReport(rows, 0, tokens, steps, repeats=repeats), None, engines)


def test_only_this_start_counts_and_engine_hours_are_those_of_running_engines() -> None:
    clock = FakeClock(50.0)
    meter = Meter(4.0, clock)
    assert meter.cost == Cost(0, 0, 0, 0, 0.0, 0.0, 4.0)
    for clock.now, *state in (
        (100.0, 1000, 9000, 8000, 70, 0),  # of earlier starts
        (110.0, 1000, 9000, 8000, 70, 1),
        (120.0, 1100, 9200, 8100, 80, 2),
        (130.0, 1400, 9600, 8200, 90, 0),
    ):
        meter(progress(*state))
    assert meter.cost == Cost(400, 20, 600, 200, 30.0, 30 / 3600, 4.0)
    assert meter.cost.as_json == {
        "rows_per_second": 13.33333, "tokens_per_second": 20.0, "block_efficiency": 3.0,
        "repeats": 20, "seconds": 30.0, "engine_hours": 0.00833, "price": 0.03333,
        "price_per_million_rows": 83.33333,
    }  # fmt: skip
    assert meter.cost.in_words == (
        "0:00:30: 13.33 rows/s, 20 decoded tokens/s, block efficiency 3.00, 20 repeats, "
        "0.0083 engine-hours without loading, price 0.0333, 83.33 per million rows"
    )


def test_figures_without_rows_tokens_or_a_price_are_null_and_not_in_words() -> None:
    labels = Cost(10, 0, 0, 0, 2.0, 0.5)
    found = labels.as_json
    names = "tokens_per_second", "block_efficiency", "price", "price_per_million_rows"
    assert [found[name] for name in names] == [None] * 4
    assert labels.in_words == "0:00:02: 5.00 rows/s, 0.5000 engine-hours without loading"
    assert Cost(0, 0, 0, 0, 0.0, 0.0, 1.0).as_json["price_per_million_rows"] is None


def test_samples_are_bounded_evenly_apart_and_exact_at_both_ends() -> None:
    clock = FakeClock(0.0)
    meter = Meter(None, clock)
    for i in range(20_001):
        clock.now = i / 2
        meter(progress(3 * i, 0, 0, 0, engines=i % 2))
    seconds = [at for at, _, _ in meter.samples]
    assert 64 < len(seconds) <= 256
    assert (meter.samples[0], meter.samples[-1]) == ((0.0, 0, 0), (10_000.0, 60_000, 0))
    distances = {b - a for a, b in pairwise(seconds[:-1])}
    assert max(distances) <= 1.1 * min(distances)
    assert meter.cost.engine_hours == pytest.approx(5000 / 3600), "also of dropped samples"


def test_report_of_a_job_plots_rows_per_second_over_time(tmp_path: Path) -> None:
    clock = FakeClock(0.0)
    meter = Meter(None, clock)
    write_html(meter.page("t"), tmp_path / "empty.html")  # of a job that had finished before
    for clock.now, rows in ((0.0, 0), (10.0, 50), (20.0, 150), (20.0, 150)):
        meter(progress(rows, 0, 0, 0, engines=1))
    page = meter.page("t", "150 rows", "150 rows in 20 s")
    (plot,), (line,) = page.plots, page.plots[0].lines
    assert (plot.y_label, line.x, line.y) == ("rows/s", [10.0, 20.0, 20.0], [5.0, 7.5, 7.5])
    assert page.summary == ("150 rows", "150 rows in 20 s")
    write_html(page, tmp_path / "job.html")
    assert "150 rows in 20 s" in (tmp_path / "job.html").read_text("utf-8")


def test_dry_run_is_scaled_to_the_rows_that_the_whole_job_decodes(tmp_path: Path) -> None:
    page = DRY_RUN.page("t")
    first, repeats, plain, drafted, speed_up = page.summary
    for line, figures in (
        (first, ("20 rows answered, 1 refused; 20 of 20 answers identical",)),
        (repeats, ("25.0% of the first 8000 valid rows",)),
        (plain, ("72000 rows", " 1:30:00: 13.33 rows/s, 200 decoded tokens/s", " 20.00 forward")),
        (drafted, ("72000 rows", " 0:22:30: 53.33 rows/s, 800 decoded tokens/s", " 5.00 forward")),
        (drafted, ("block efficiency 4.00, 18,000 repeats, 0.7500 engine-hours without loading",)),
        (drafted, ("loading, price 2.2500", "31.25 per million rows")),
        (speed_up, ("4.00 x",)),
    ):
        assert all(figure in line for figure in figures), line
    found = DRY_RUN.as_json
    assert (found["repeats"], found["compared"], found["speed_up"]) == (2000, 8000, 4.0)
    assert found["drafted"] == {
        "seconds": 1350.0, "rows_per_second": 53.33333, "tokens_per_second": 800.0,
        "block_efficiency": 4.0, "repeats": 18_000, "engine_hours": 0.75, "price": 2.25,
        "price_per_million_rows": 31.25, "forwards_per_answer": 5.0,
    }  # fmt: skip
    assert found["plain"]["price_per_million_rows"] == 125.0
    write_html(page, tmp_path / "dry.html")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every task, in place of Redis."""
    client = SimpleNamespace(close=lambda: None)
    tasks = SimpleNamespace(get=lambda _: SimpleNamespace(sampling=SamplingDefaults()))
    monkeypatch.setattr(generate, "connect", lambda _: client)
    monkeypatch.setattr(generate, "TaskStore", lambda _: tasks)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("asked", "more", "repeats"),
    [
        ({}, {}, 30),
        ({"temperature": 1.0}, {}, 0),
        ({}, {"dedupe_bytes": 0}, 0),
        ({}, {"window_rows": 20}, 8),
    ],
    ids=["greedy", "sampled", "no dedupe", "more rows than are compared"],
)
def test_dry_run_counts_the_rows_that_the_job_would_copy(
    asked, more, repeats, tmp_path, monkeypatch
) -> None:
    """Rows without an input do not count, and only different rows are answered twice."""
    seen = []

    def preview_job(spec, rows, strategy) -> Preview:
        seen.extend(row.payload for row in rows)
        return PREVIEW

    monkeypatch.setattr(generate, "preview_job", preview_job)
    inputs = [{"input": f"{i % 12}"} for i in range(42)]
    source = Source.of(write_rows(tmp_path / "in.jsonl", [{"no": 1}, *inputs]))
    how = {"asked": Request(parameters=asked), "actors": 3, **more}
    found = generate.dry_run("redis://nowhere", "t", source, tmp_path / "out.jsonl", **how)
    assert (found.total, found.compared) == (43, more.get("window_rows", 42))
    assert (found.repeats, found.engines) == (repeats, 3)
    assert len(seen) == min(20, found.compared - repeats)
    assert (len(set(seen)) == len(seen)) == bool(repeats)


@pytest.mark.usefixtures("store")
def test_dry_run_fails_if_no_row_can_be_answered(tmp_path, monkeypatch) -> None:
    side = PreviewSide(1.0, 0, 0)
    found = Preview(0, 1, 0, plain=side, drafted=side, first_error="row 1: too long")
    monkeypatch.setattr(generate, "preview_job", lambda *_: found)
    source = Source.of(write_rows(tmp_path / "in.jsonl", [{"input": "1"}]))
    with refused(JobError, "row 1: too long"):
        generate.dry_run("redis://nowhere", "t", source, tmp_path / "out.jsonl")


@pytest.mark.parametrize("name", ["out.jsonl", "rows.html", "report.htm", "report.json"])
def test_report_that_would_overwrite_another_file_is_refused(name: str, tmp_path: Path) -> None:
    used = tmp_path / "rows.json", None, tmp_path / "out.jsonl"
    _check_report(None, *used)
    _check_report(tmp_path / "report.html", *used)
    with refused(UsageError, name):
        _check_report(tmp_path / name, *used)
