"""Output and rejects appear whole, and are the same bytes each time."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tasc_jobs.batch.work import Record
from tasc_jobs.outputs import COLUMNS, write_files

CONTENT = {
    "text": "naïve\n", "tokens": [1, 2], "finish_reason": "stop", "model": "m", "adapter": None,
    "index_version": 3,
}  # fmt: skip


def records() -> list[Record]:
    good = [Record(i, f"r{i}", i + 1, None, CONTENT, None, 2, 1) for i in range(3)]
    return [*good, Record(3, "r3", 4, "f", None, "too long", 0, 0)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_good_rows_and_rejects_go_to_their_files(tmp_path: Path, name: str) -> None:
    output, reject = tmp_path / name, tmp_path / "no.jsonl"
    write_files(output, reject, iter(records()), True)
    first = output.read_bytes()
    if output.suffix == ".parquet":
        assert pq.read_schema(output).equals(COLUMNS)
        found = pq.read_table(output).to_pylist()
    else:
        found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert found == [{"id": f"r{i}", **CONTENT} for i in range(3)]
    assert json.loads(reject.read_text()) == {
        "file": "f", "line": 4, "id": "r3", "reason": "too long",
    }  # fmt: skip
    write_files(output, reject, iter(records()), True)
    assert output.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(("no.jsonl", name))


def test_of_a_job_that_was_ended_only_rejects_are_written(tmp_path: Path) -> None:
    output, reject = tmp_path / "out.parquet", tmp_path / "no.jsonl"
    write_files(output, reject, iter(records()), False)
    assert not output.exists()
    assert len(reject.read_text().splitlines()) == 1


def test_rejects_of_before_are_gone_where_there_are_none(tmp_path: Path) -> None:
    output, reject = tmp_path / "out.jsonl", tmp_path / "no.jsonl"
    reject.write_text("old")
    write_files(output, reject, iter(records()[:3]), True)
    assert not reject.exists()


def test_nothing_appears_when_a_record_cannot_be_had(tmp_path: Path) -> None:
    def broken() -> object:
        yield from records()
        raise OSError("gone")

    for name in ("out.jsonl", "out.parquet"):
        with pytest.raises(OSError, match="gone"):
            write_files(tmp_path / name, tmp_path / "no.jsonl", broken(), True)
        assert not (tmp_path / name).exists()
    assert not (tmp_path / "no.jsonl").exists()
