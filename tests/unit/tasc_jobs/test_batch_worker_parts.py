"""Tests a worker's parts: rows of lines, files of answers, counts, leases and paused tasks."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry

from support import FakeClock, eventually
from tasc_jobs.batch.work import JobProgress, JobReport, Read, Record, Row
from tasc_jobs.errors import ClusterError
from tasc_jobs.worker.batch_worker import Counting, TaskBackoff
from tasc_jobs.worker.lines import BatchLines, Checked, LineAnswers, fault_of, response_of
from tasc_jobs.worker.one_batch import HeldLease, Outputs
from tasc_protocol import Request
from tasc_serve.http_errors import ApiError
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.settings import LimitSettings
from tasc_store import StoreUnreachable
from tasc_store.batches.batch_store import Batch
from tasc_store.batches.leases import Counts
from tasc_store.errors import LeaseLost

BATCH = Batch(
    "batch-1", "/v1/completions", "file-1", "24h", 1000, 2000, "in_progress", "greet", 3600, {}, "",
    {},
)  # fmt: skip


def line(name: object, **said: object) -> str:
    body = {"model": "greet", "prompt": "hi"}
    content = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps({**content, **said}) + "\n"


def lines(tmp_path: Path, *texts: str | bytes, **limits: int) -> BatchLines:
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"".join(t.encode() if isinstance(t, str) else t for t in texts))
    return BatchLines(path, BATCH, LimitSettings(**limits))


def codes(checked: Checked) -> list[tuple[str, int | None]]:
    return [(fault.code, fault.line) for fault in checked.faults]


def test_rows_are_numbered_without_gaps_and_keep_line_numbers(tmp_path: Path) -> None:
    found = lines(tmp_path, line("a"), "\n", "  \r\n", line("naïve 東京"), line("c").rstrip("\n"))
    assert found.check() == Checked(3, ())
    rows = list(found.rows())
    assert [(row.ordinal, row.id, row.line) for row in rows] == [
        (0, "a", 1), (1, "naïve 東京", 4), (2, "c", 5),
    ]  # fmt: skip
    assert [row.refused for row in rows] == [None] * 3
    assert {row.payload for row in rows} == {'{"model": "greet", "prompt": "hi"}'}
    assert list(found.rows()) == rows


def test_byte_order_marks_are_removed_from_lines(tmp_path: Path) -> None:
    found = lines(tmp_path, "\ufeff", line("a"), "\ufeff", line("b"))
    assert found.check() == Checked(2, ())
    assert [(row.id, row.refused) for row in found.rows()] == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("invalid_json_line", ["{", "[]", "[" * 5000, b"\xff\xfe", line("b").encode("utf-16-be")]),
        ("missing_custom_id", ["{}", line(7), line(""), line("x" * 257), line("\ud800")]),
        ("duplicate_custom_id", [line("a")]),
        ("mismatched_model", [line("b", body={"model": "other"})]),
        ("line_too_long", [line("b", pad="x" * 9000)]),
    ],
)
def test_invalid_id_or_task_of_a_line_fails_the_batch(tmp_path, code, texts):
    for text in texts:
        found = lines(tmp_path, line("a"), text, b"\n", line("c"), max_body_bytes=4000)
        assert codes(found.check()) == [(code, 2)], text


def test_faults_are_reported_together_up_to_a_limit(tmp_path: Path) -> None:
    found = lines(tmp_path, *(line("a") for _ in range(100))).check()
    assert codes(found) == [("duplicate_custom_id", i) for i in range(2, 22)]
    assert codes(lines(tmp_path, "\n \n").check()) == [("empty_file", None)]
    many = lines(tmp_path, *(line(str(i)) for i in range(5)), max_batch_lines=3)
    assert codes(many.check()) == [("too_many_lines", 4)]


WRONG = [
    *(("method", "GET"), ("url", "/v1/chat/completions"), ("url", "/v1/embeddings")),
    *(("body", []), ("body", None), ("priority", 1)),
]


@pytest.mark.parametrize(("param", "value"), WRONG)
def test_line_with_an_invalid_field_has_its_own_error(
    tmp_path: Path, param: str, value: object
) -> None:
    found = lines(tmp_path, line("a"), line("b", **{param: value}), line("c"))
    assert found.check() == Checked(3, ())
    good, bad, other = found.rows()
    assert (good.refused, other.refused) == (None, None)
    assert bad.refused is not None
    answer = response_of(bad.refused)
    assert (answer["status_code"], answer["body"]["error"]["param"]) == (400, param)


def test_line_with_several_prompts_makes_n_requests_per_prompt() -> None:
    strategy = LineAnswers("batch-1", "/v1/completions", "greet", 1000, LimitSettings())

    def request(call: Request) -> Request:
        if call.prompt == "bad":
            raise ValueError("no tokens")
        return structs.replace(call, max_tokens=5)

    builder = SimpleNamespace(reader=SimpleNamespace(request=request))

    def calls(*prompts: str) -> Sequence[Read]:
        body = json.dumps({"model": "greet", "prompt": prompts, "n": 2})
        return strategy.requests(Row(3, "a", body, 4), cast(Any, builder))

    found = [(c.prompt, c.prompt_index, c.choice_index) for c, _ in calls("hi", "ho")]
    assert found == [("hi", 0, 0), ("hi", 0, 1), ("ho", 1, 0), ("ho", 1, 1)]
    with pytest.raises(ValueError, match=r"prompt\.1") as fault:
        calls("hi", "bad")
    assert response_of(str(fault.value))["body"]["error"]["param"] == "prompt.1"


def test_http_error_survives_storage_and_engine_failure_is_500() -> None:
    error = ApiError(400, 'n is 5 "answers"', "n")
    assert response_of(fault_of(error)) == {"status_code": 400, "body": error.body}
    for text in ("out of memory", "5", "[]", '{"http_error": 5}', "{}", "null"):
        answer = response_of(text)
        assert (answer["status_code"], answer["body"]["error"]["message"]) == (500, text)


@given(st.lists(st.sampled_from(["answered", "refused", "missing"]), max_size=30))
def test_each_line_is_in_one_output_file_once_in_order(fates: list[str]) -> None:
    rows = [Row(i, f"r{i}\ud83d", "", i + 1) for i in range(len(fates))]
    records = [
        Record(
            row.ordinal, row.id, row.line, None,
            {"text": "naïve \ud83d"} if fate == "answered" else None,
            fault_of(ApiError(400, "no", "n")) if fate == "refused" else None, 1, 1,
        )
        for row, fate in zip(rows, fates, strict=True)
        if fate != "missing"
    ]  # fmt: skip
    written: list[list[bytes]] = []

    def begin() -> SimpleNamespace:
        written.append([])
        return SimpleNamespace(write=written[-1].append)

    outputs = Outputs(SimpleNamespace(begin=begin), BATCH)
    outputs.write(rows, iter(records), "expired")
    found = [json.loads(text) for file in written for text in b"".join(file).splitlines()]
    found.sort(key=lambda each: int(each["custom_id"][1:-1]))
    assert [each["custom_id"] for each in found] == [row.id for row in rows]
    for each, fate in zip(found, fates, strict=True):
        status = each["response"] and each["response"]["status_code"]
        code = each["error"] and each["error"]["code"]
        expected = {"answered": (200, None), "refused": (400, None)}
        assert (status, code) == expected.get(fate, (None, "batch_expired"))
    assert len({each["id"] for each in found}) == len(found)
    counts = outputs.counts
    sums = [fates.count(fate) for fate in ("answered", "refused")]
    assert [counts.total, counts.completed, counts.failed] == [len(fates), *sums]


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


@pytest.mark.parametrize(
    ("progress", "requests"),
    [
        (((100, 10, 500), (100, 10, 500), (104, 11, 520), (110, 11, 560)), (9, 1, 60)),
        (((0, 0, 0), (8, 2, 80), (0, 0, 0), (5, 1, 50)), (6 + 4, 2 + 1, 130)),
    ],
    ids=["earlier starts", "begun anew"],
)
def test_batch_progress_is_counted_once(progress: Any, requests: tuple[int, int, int]) -> None:
    counted = Counted()
    with Counting(counted.metrics, "t") as counting:
        assert counted.requests == (0, 0, 0)
        for done, errors, tokens in progress:
            counting.count(JobProgress(JobReport(done, errors, tokens, 1), None, 1, 3))
        assert counted.requests == requests
        assert (counted("in_progress"), counted("rows_running")) == (1, 3)
    assert (counted("in_progress"), counted("rows_running")) == (0, 0)


class FakeLease:
    """Returns the items of a script, and repeats the last one."""

    seconds = 0.01

    def __init__(self, *script: str | Exception, expires_in: float = 3600) -> None:
        self.batch = SimpleNamespace(id="batch-1", expires_at=time.time() + expires_in)
        self.script = list(script)
        self.renewed = 0

    def renew(self) -> str:
        self.renewed += 1
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(said, Exception):
            raise said
        return said

    def report(self, counts: Counts, status: str | None = None) -> str:
        return self.renew()


def test_lease_is_renewed_only_during_the_block() -> None:
    lease = FakeLease("in_progress")
    with HeldLease(lease) as hold:
        eventually(lambda: lease.renewed > 5)
        assert (hold.stop, threads_of_leases()) == (None, 1)
    assert threads_of_leases() == 0


def threads_of_leases() -> int:
    return [thread.name for thread in threading.enumerate()].count("batch-lease")


def test_cancelled_expired_and_lost_batches_stop_the_job() -> None:
    away = StoreUnreachable("away")
    for lease, stop in (
        (FakeLease("in_progress", away, "cancelling"), "cancelled"),
        (FakeLease("in_progress", expires_in=0.05), "expired"),
        (FakeLease(away, LeaseLost("another's")), "lost"),
        (FakeLease("cancelling", LeaseLost("another's")), "lost"),
    ):
        with HeldLease(lease) as hold:
            eventually(lambda hold=hold, stop=stop: hold.stop == stop)
            assert hold.stopped


def test_progress_report_during_an_outage_is_dropped() -> None:
    hold = HeldLease(FakeLease(StoreUnreachable("away"), "in_progress", LeaseLost("another's")))
    hold.report(Counts(3))
    hold.report(Counts(3, 1))
    assert hold.stop is None
    hold.report(Counts(3, 2))
    assert hold.stop == "lost"


def test_failures_pause_a_task_and_too_many_consecutive_failures_end_the_worker() -> None:
    clock = FakeClock()
    backoff, pauses = TaskBackoff(3, 5.0, clock), list[float]()
    for _ in range(6):
        pauses.append(backoff.failed("a", "why"))
        assert backoff.failed("b", "why") == 5
        backoff.worked("b")
        assert backoff.paused == ["a", "b"]
        clock.now += pauses[-1]
        assert backoff.paused == []
    assert pauses == [5, 10, 20, 40, 60, 60]  # a minute at most
    backoff = TaskBackoff(3, 5.0, FakeClock())
    backoff.failed("a", "why")
    backoff.failed("b", "why")
    with pytest.raises(ClusterError):
        backoff.failed("c", "no disk")
