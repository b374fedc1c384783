"""Lines of a batch's file into rows, and finished rows into its two files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_jobs.batch.work import Record, Row
from tasc_jobs.worker.lines import BatchLines, Checked, fault_of, told
from tasc_jobs.worker.one_batch import Outputs
from tasc_serve.http_errors import ApiError
from tasc_serve.settings import LimitSettings
from tasc_store.batches.batch_store import Batch

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


def test_rows_are_numbered_without_gaps_and_lines_as_people_count_them(tmp_path: Path) -> None:
    found = lines(tmp_path, line("a"), "\n", "  \r\n", line("naïve 東京"), line("c").rstrip("\n"))
    assert found.check() == Checked(3, ())
    rows = list(found.rows())
    assert [(row.ordinal, row.id, row.line) for row in rows] == [
        (0, "a", 1), (1, "naïve 東京", 4), (2, "c", 5),
    ]  # fmt: skip
    assert [row.refused for row in rows] == [None] * 3
    assert {row.payload for row in rows} == {'{"model": "greet", "prompt": "hi"}'}
    assert list(found.rows()) == rows


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json_line"),
        ("[]", "invalid_json_line"),
        ("[" * 5000, "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        ("{}", "missing_custom_id"),
        (line(7), "missing_custom_id"),
        (line(""), "missing_custom_id"),
        (line("x" * 257), "missing_custom_id"),
        (line("\ud800"), "missing_custom_id"),
        (line("a"), "duplicate_custom_id"),
        (line("b", body={"model": "other"}), "mismatched_model"),
        (line("b", pad="x" * 9000), "line_too_long"),
    ],
)
def test_what_has_no_name_or_another_task_keeps_the_file_from_being_a_batch(
    tmp_path: Path, text: str | bytes, code: str
) -> None:
    found = lines(tmp_path, line("a"), text, b"\n", line("c"), max_body_bytes=4000)
    assert codes(found.check()) == [(code, 2)]


def test_faults_are_told_together_and_bounded(tmp_path: Path) -> None:
    found = lines(tmp_path, *(line("a") for _ in range(100))).check()
    assert codes(found) == [("duplicate_custom_id", i) for i in range(2, 22)]


def test_a_file_without_lines_and_one_with_too_many_are_no_batch(tmp_path: Path) -> None:
    assert codes(lines(tmp_path, "\n \n").check()) == [("empty_file", None)]
    many = lines(tmp_path, *(line(str(i)) for i in range(5)), max_batch_lines=3)
    assert codes(many.check()) == [("too_many_lines", 4)]


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"method": "GET"}, "method"),
        ({"url": "/v1/chat/completions"}, "url"),
        ({"url": "/v1/embeddings"}, "url"),
        ({"body": []}, "body"),
        ({"body": None}, "body"),
        ({"priority": 1}, "priority"),
    ],
)
def test_what_is_wrong_with_a_named_line_is_its_own_error(
    tmp_path: Path, said: dict[str, object], param: str
) -> None:
    found = lines(tmp_path, line("a"), line("b", **said), line("c"))
    assert found.check() == Checked(3, ())
    good, bad, other = found.rows()
    assert (good.refused, other.refused) == (None, None)
    assert bad.refused is not None
    answer = told(bad.refused)
    assert answer["status_code"] == 400
    assert answer["body"]["error"]["param"] == param


def test_an_error_goes_through_a_text_and_a_failure_of_the_engine_is_one_of_the_server() -> None:
    error = ApiError(400, 'n is 5 "answers"', "n")
    assert told(fault_of(error)) == {"status_code": 400, "body": error.body}
    for text in ("out of memory", "5", "[]", '{"http_error": 5}', "{}", "null"):
        answer = told(text)
        assert answer["status_code"] == 500
        assert answer["body"]["error"]["message"] == text


class Memory:
    """Files in memory, as far as outputs need them."""

    def __init__(self) -> None:
        self.written: list[bytearray] = []

    def begin(self) -> "Memory":
        other = Memory()
        other.written = self.written
        other.data = bytearray()
        self.written.append(other.data)
        return other

    def write(self, data: bytes) -> None:
        self.data += data


@given(st.lists(st.sampled_from(["answered", "refused", "missing"]), max_size=30))
def test_each_line_is_in_one_file_once_in_order(fates: list[str]) -> None:
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
    memory = Memory()
    outputs = Outputs(memory, BATCH)
    outputs.write(rows, iter(records), "expired")
    told_lines = [[json.loads(t) for t in data.splitlines()] for data in memory.written]
    found = sorted(
        (each for part in told_lines for each in part), key=lambda e: int(e["custom_id"][1:-1])
    )
    assert [each["custom_id"] for each in found] == [row.id for row in rows]
    for each, fate in zip(found, fates, strict=True):
        status = each["response"] and each["response"]["status_code"]
        code = each["error"] and each["error"]["code"]
        expected = {
            "answered": (200, None),
            "refused": (400, None),
            "missing": (None, "batch_expired"),
        }
        assert (status, code) == expected[fate]
    assert len({each["id"] for each in found}) == len(found)
    counts = outputs.counts
    sums = [fates.count(fate) for fate in ("answered", "refused")]
    assert [counts.total, counts.completed, counts.failed] == [len(fates), *sums]
