"""Progress and stages go to their stream, never to stdout."""

import io

import pytest

from support import FakeClock
from tasc_jobs.batch.cost import Meter
from tasc_jobs.batch.generate import BatchProgress
from tasc_jobs.batch.work import JobProgress, JobReport
from tasc_runtime.progress import Clock, Stages, show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock(0.0)
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def test_progress_log_has_one_line_per_interval_and_a_last_line(clock):
    out = io.StringIO()
    with show_progress("count", None, "lines", every_s=5, stream=out) as progress:
        for clock.now in (1.0, 6.0, 8.0):
            progress.advance(2)
    lines = ["count: 4 lines, 0.67 lines/s", "count: 6 lines, 0.75 lines/s"]
    assert out.getvalue().splitlines() == lines


def test_time_left_excludes_the_time_before_the_first_item(clock):
    """The first item may be slow because it compiles code."""
    for times, left in (([], None), ([100.0], None), ([100.0, 101.0, 102.0], "3")):
        out, terminal = io.StringIO(), Terminal()
        for stream in (out, terminal):
            clock.now = 0.0
            with show_progress("learn", 6, "rounds", every_s=0, stream=stream) as progress:
                progress.advance(0)  # it does not count as the first item
                for clock.now in times:
                    progress.advance()
        bar = terminal.getvalue().rpartition("learn")[2]  # the last one drawn
        assert f"{len(times)}/6" in bar
        assert ("-:--:--" if left is None else f"0:00:0{left}") in bar
        assert out.getvalue().strip().endswith(f", {left} s left") == (left is not None)
        assert "\x1b" not in out.getvalue()


def test_clock_writes_seconds_since_its_creation_to_stderr(clock, capsys):
    made = Clock()
    made.note("store: here")
    clock.now = 12.34
    made.note("Ray: here")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "  0.0 s  store: here\n 12.3 s  Ray: here\n")


def test_resumed_items_count_as_progress_but_do_not_count_in_the_rate(clock):
    out, terminal = io.StringIO(), Terminal()
    for stream in (out, terminal):
        clock.now = 0.0
        with show_progress("answer", None, every_s=0, stream=stream) as progress:
            progress.resume(90)
            progress.set_total(100)
            for clock.now in (10.0, 12.0):
                progress.set_suffix(f"at {clock.now}")
                progress.advance()
    first, second, _ = out.getvalue().splitlines()
    assert first == "answer: 91/100 rows, 0.1 rows/s, at 10.0"
    assert second == "answer: 92/100 rows, 0.17 rows/s, at 12.0, 16 s left"
    bar = terminal.getvalue().rpartition("answer")[2]
    assert "92/100" in bar
    assert "at 12.0" in bar


def test_batch_progress_shows_rates_of_this_start_and_efficiency_of_all_rows() -> None:
    out, times = io.StringIO(), iter([0.0, 2.0])
    with show_progress("answer", None, every_s=0, stream=out) as bar:
        shown = BatchProgress(bar, Meter(None, lambda: next(times)))
        shown(JobProgress(JobReport(100, 0, 1000, 500, resumed=100), 300, engines=0))
        shown(JobProgress(JobReport(150, 2, 1600, 600, resumed=100), 300, engines=1))
    lines = out.getvalue().splitlines()
    assert lines[-1].startswith("answer: 150/300 rows, ")
    assert all(figure in lines[-1] for figure in (" 300 decoded tokens/s", " 4.05 ", " 2 errors"))


def test_progress_shows_no_rate_before_an_engine_runs() -> None:
    out = io.StringIO()
    with show_progress("answer", 10, every_s=0, stream=out) as bar:
        BatchProgress(bar, Meter(None))(JobProgress(JobReport(0, 0, 0, 0), None, engines=0))
    assert "engines" in out.getvalue()
    assert "tokens/s" not in out.getvalue()


def test_progress_of_rows_without_tokens_shows_rows_only() -> None:
    out, times = io.StringIO(), iter([0.0, 2.0])
    with show_progress("answer", None, every_s=0, stream=out) as bar:
        shown = BatchProgress(bar, Meter(None, lambda: next(times)))
        for rows in (0, 8):
            shown(JobProgress(JobReport(rows, 0, 0, 0), None, engines=1))
    assert " rows/s" in out.getvalue()
    assert "tokens" not in out.getvalue()


UNITS = {"read": "rows", "sort": "parts"}


def test_stages_show_total_unit_and_note_and_keep_seconds():
    out = io.StringIO()
    with Stages("index t", UNITS, notes={"sort": "takes long"}, stream=out) as stages:
        for done in (0, 3, 10):
            stages("read", done, 10)
        stages("sort", 0, 2)
        assert out.getvalue().splitlines()[1:] == ["index t: sort: takes long"]
        stages("sort", 1, 2)
    first, _, last = (line.split(", ")[0] for line in out.getvalue().splitlines())
    assert (first, last) == ("index t: read: 10/10 rows", "index t: sort: 1/2 parts")
    assert list(stages.seconds) == ["read", "sort"]
    assert all(spent > 0 for spent in stages.seconds.values())


def test_failed_stage_shows_how_much_was_done():
    out = io.StringIO()

    def fail():
        with Stages("index t", UNITS, stream=out) as stages:
            stages("read", 4, 10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert out.getvalue().startswith("index t: read: 4/10 rows")
    out = io.StringIO()
    with Stages("index t", UNITS, stream=out) as stages:
        pass
    assert (out.getvalue(), stages.seconds) == ("", {})
