"""A job's input gives each row once with its id and place; its output appears whole."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasc_jobs.batch.generate import COLUMNS, write_files
from tasc_jobs.batch.inputs import (
    SeenIds,
    Source,
    check_files,
    check_output,
    files_of,
    open_files,
    reject_file,
)
from tasc_jobs.batch.work import Record
from tasc_runtime.errors import FileError


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_rows_of_a_folder_are_in_order_and_those_without_an_id_named_by_file_and_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "b.jsonl").write_text("\n" + lines({"input": "2"}, {"id": 7, "input": "3"}))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines({"id": "x", "input": "1"}).encode()))
    pq.write_table(pa.table({"input": ["4", None]}), tmp_path / "c.parquet")
    (tmp_path / "notes.txt").write_text("no rows")
    found = open_files([tmp_path], "input", "id")
    rows = list(found.rows())
    assert [(r.ordinal, r.id, r.payload, r.line, r.file, r.refused) for r in rows] == [
        (0, "x", "1", 1, "a.jsonl.gz", None),
        (1, "b.jsonl:2", "2", 2, "b.jsonl", None),
        (2, "7", "3", 3, "b.jsonl", None),
        (3, "c.parquet:1", "4", 1, "c.parquet", None),
        (4, "c.parquet:2", "", 2, "c.parquet", "no string field 'input'"),
    ]
    assert list(found.rows()) == rows
    assert found.total == 6  # a blank line too
    assert [pin["file"] for pin in found.pins] == ["a.jsonl.gz", "b.jsonl", "c.parquet"]


def test_each_bad_row_keeps_its_place_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    bad = ['"text"', '{"id": 1.5, "input": "x"}', '{"input": 3}', "{", '{"input": "\\ud800"}']
    path.write_text("\n".join(['{"id": "a", "input": "1"}', *bad, '{"id": "a", "input": "2"}']))
    found = open_files([path], "input", "id")
    assert found.total == 7
    rows = list(found.rows())
    assert [row.ordinal for row in rows] == list(range(7))
    reasons = [row.refused or "" for row in rows]
    assert reasons[0] == ""
    for reason, said in zip(
        reasons[1:],
        (
            "not a JSON object",
            "field 'id' is neither a string nor a whole number",
            "no string field 'input'",
            "not JSON: ",
            "lone surrogate",
            "id 'a' is that of line 1",
        ),
        strict=True,
    ):
        assert said in reason
    assert [row.file for row in rows] == [None] * 7


def test_another_content_is_another_input_and_another_time_is_not(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(lines({"input": "1"}))
    first = open_files([path], "input", "id").pins
    path.write_text(lines({"input": "1"}))
    assert open_files([path], "input", "id").pins == first
    path.write_text(lines({"input": "2"}))
    assert open_files([path], "input", "id").pins != first


def test_a_damaged_gzip_gives_what_stands_before_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    text = lines(*({"input": f"{i} {i * 7919 % 9973}"} for i in range(3000)))
    path.write_bytes(gzip.compress(text.encode())[:-2000])
    found = open_files([path], "input", "id")
    rows = list(found.rows())
    assert rows[-1].refused is not None
    assert "damaged gzip" in rows[-1].refused
    assert len(rows) > 100
    assert all(row.refused is None for row in rows[:-1])


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    one, empty, none = tmp_path / "in.jsonl", tmp_path / "empty.jsonl", tmp_path / "none"
    one.write_text(lines({"input": "1"}))
    empty.touch()
    none.mkdir()
    for use, named in (
        (lambda: files_of([none]), "none"),
        (lambda: files_of([one, one]), "in.jsonl"),
        (lambda: files_of([tmp_path / "gone.jsonl"]), "gone.jsonl"),
        (lambda: open_files([empty], "input", "id"), "empty.jsonl"),
        (lambda: check_files([one], "input", [one]), "in.jsonl"),
        (lambda: check_files([tmp_path], "input", [tmp_path / "out.jsonl"]), "out.jsonl"),
        (lambda: Source.of("redis:t", one).check(), "redis:t"),
        (lambda: check_output(tmp_path / "out.csv"), "out.csv"),
        (lambda: check_output(tmp_path), str(tmp_path)),
        (lambda: check_output(tmp_path / "no" / "out"), "no"),
    ):
        with pytest.raises(FileError) as refusal:
            use()
        assert named in str(refusal.value)
    assert Source.of("redis:t").files == []
    assert reject_file(tmp_path / "out.jsonl") == tmp_path / "out.rejected.jsonl"


def test_ids_are_known_by_where_they_were_first() -> None:
    with SeenIds() as seen:
        places = [seen.first(f"id{i % 700}", i) for i in range(2000)]
    assert places == [i % 700 for i in range(2000)]


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
