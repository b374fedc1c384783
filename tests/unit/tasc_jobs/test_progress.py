"""Progress goes to the stream it was given: lines in a log, a bar on a terminal, never stdout."""

import io

import pytest

from tasc_jobs.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_a_line_each_time_the_interval_is_over_and_one_at_the_end():
    out = io.StringIO()
    with Progress("ingest", 10, every_s=0, stream=out) as progress:
        progress.advance(4)
        progress.advance()
    lines = out.getvalue().splitlines()
    assert [line.split(", ")[0] for line in lines] == [
        "ingest: 4/10 rows",
        "ingest: 5/10 rows",
        "ingest: 5/10 rows",
    ]
    assert all(" rows/s" in line and " s left" in line for line in lines)


def test_within_the_interval_a_log_gets_only_the_last_line():
    out = io.StringIO()
    with Progress("count", None, "lines", every_s=1e9, stream=out) as progress:
        for _ in range(1000):
            progress.advance()
    (line,) = out.getvalue().splitlines()
    assert line.startswith("count: 1000 lines, ")
    assert "left" not in line


def test_a_terminal_gets_a_bar_with_done_total_and_unit():
    out = Terminal()
    with Progress("ingest", 10, stream=out) as progress:
        progress.advance(10)
    assert "ingest" in out.getvalue()
    assert "10/10" in out.getvalue()


def test_an_error_inside_still_writes_the_last_line_and_comes_out():
    out = io.StringIO()

    def fail():
        with Progress("ingest", 2, stream=out) as progress:
            progress.advance()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert out.getvalue().startswith("ingest: 1/2 rows")


def test_stdout_stays_clean(capsys):
    with Progress("ingest", 1) as progress:
        progress.advance()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ingest: 1/1 rows")
