"""A worker counts what it did itself, once, whatever earlier starts did and whatever is told."""

from prometheus_client import CollectorRegistry

from tasc_jobs.batch import JobProgress
from tasc_jobs.worker.counting import Counting
from tasc_serve.batch_metrics import BatchMetrics


class Counted:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = BatchMetrics(self.registry)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tasc_batch_{name}", {"task": "t", **labels})

    @property
    def requests(self) -> tuple[float | None, float | None, float | None]:
        completed = self("requests_total", result="completed")
        return completed, self("requests_total", result="failed"), self("tokens_total")


def progress(done: int, errors: int, tokens: int, running: int = 3) -> JobProgress:
    return JobProgress(done, 0, None, errors, tokens, 1, 1, running)


def test_what_earlier_starts_did_is_not_counted_again() -> None:
    counted = Counted()
    with Counting(counted.metrics, "t") as counting:
        assert counted.requests == (0, 0, 0)
        for told in ((100, 10, 500), (100, 10, 500), (104, 11, 520), (110, 11, 560)):
            counting.told(progress(*told))
        assert counted.requests == (9, 1, 60)
        assert (counted("in_progress"), counted("rows_running")) == (1, 3)
    assert (counted("in_progress"), counted("rows_running")) == (0, 0)


def test_a_job_that_begins_anew_takes_nothing_back_and_counts_on() -> None:
    counted = Counted()
    with Counting(counted.metrics, "t") as counting:
        for told in ((0, 0, 0), (8, 2, 80), (0, 0, 0), (5, 1, 50)):
            counting.told(progress(*told))
    assert counted.requests == (6 + 4, 2 + 1, 130)
