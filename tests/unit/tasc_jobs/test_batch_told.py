"""What people read of a job: rates of this start, and what a dry run makes of the whole."""

import io

from tasc_jobs.batch.preview import Preview, Side
from tasc_jobs.batch.told import Told, preview_as_json, preview_in_words
from tasc_jobs.batch.work import JobProgress
from tasc_jobs.progress import Progress

PREVIEW = Preview(20, 1, 20, plain=Side(4.0, 400, 400), drafted=Side(1.0, 400, 100))


def test_progress_tells_rates_of_this_start_and_efficiency_of_the_whole() -> None:
    out, times = io.StringIO(), iter([0.0, 2.0])
    with Progress("answer", None, every_s=0, stream=out) as bar:
        told = Told(bar, lambda: next(times))
        told(JobProgress(100, 100, 300, 0, 1000, 500, engines=0))
        told(JobProgress(150, 100, 300, 2, 1600, 600, engines=1))
    lines = out.getvalue().splitlines()
    assert lines[-1].startswith("answer: 150/300 rows, ")
    assert lines[-1].endswith(" rows/s, 300 tokens/s, 2.67 tokens a step, 2 errors")


def test_until_an_engine_is_there_it_says_so() -> None:
    out = io.StringIO()
    with Progress("answer", 10, every_s=0, stream=out) as bar:
        Told(bar)(JobProgress(0, 0, None, 0, 0, 0, engines=0))
    assert "engines are coming up" in out.getvalue()


def test_a_preview_is_told_for_the_whole_job() -> None:
    said = preview_in_words(PREVIEW, 72_000, engines=2)
    assert "20 rows answered, 1 refused; 20 of 20 answers identical" in said
    assert "100 tokens/s,  1.00 tokens a step, 72000 rows in about 2 h 0 min" in said
    assert "400 tokens/s,  4.00 tokens a step, 72000 rows in about 30 min 0 s" in said
    assert said.endswith("speed-up by drafts: 4.00 x")
    found = preview_as_json(PREVIEW, 72_000, engines=2)
    assert found["speed_up"] == 4.0
    assert found["drafted"] == {
        "tokens_per_second": 400.0, "block_efficiency": 4.0, "job_seconds": 1800.0,
    }  # fmt: skip


def test_a_preview_of_rows_none_of_which_can_be_answered_promises_nothing() -> None:
    found = Preview(0, 20, 0, plain=Side(1.0, 0, 0), drafted=Side(1.0, 0, 0))
    assert preview_as_json(found, 9, 1)["plain"]["job_seconds"] is None
    assert "0 rows answered, 20 refused" in preview_in_words(found, 9, 1)
