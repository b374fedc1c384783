"""Tests of the parts of an input: each row is in one part, and bad input has a clear error."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import write_rows
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.parts import Parts, PartWork, Plan
from tasc_jobs.batch.places import Place
from tasc_jobs.batch.work import JobReport, PartRecord
from tasc_jobs.errors import JobError, UsageError
from tasc_runtime.data.rows import read_raw_rows
from tasc_runtime.errors import FileError


def rows_of(source: Source, part_bytes: int) -> list[Any]:
    """The rows of all parts of an input, in order."""
    plan = Plan.of(source, part_bytes)
    work = PartWork(Place.of("/"), source, plan.suffix)
    rows = [row for part in plan.parts for row in work.rows(part, work.raw_rows(part))]
    ordinals = [row.ordinal for row in rows]
    assert ordinals == sorted(set(ordinals))
    return rows


@given(
    lines=st.lists(st.binary(max_size=40).filter(lambda raw: b"\n" not in raw)),
    end=st.sampled_from([b"", b"\n"]),
    part_bytes=st.integers(1, 60),
)
def test_each_line_is_in_one_part(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, part_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_bytes(b'{"input": "first"}\n' + b"\n".join(lines) + end)
    whole = [(row.value, row.reason) for row in read_raw_rows(path)]
    plan = Plan.of(Source.of(path), part_bytes)
    work = PartWork(Place.of("/"), Source.of(path), plan.suffix)
    cut = [(r.value, r.reason) for part in plan.parts for r in work.raw_rows(part)]
    assert repr(cut) == repr(whole)  # NaN equals itself so


@pytest.mark.parametrize("part_bytes", [1, 100, 1000, 1 << 20])
@pytest.mark.parametrize("group", [1, 7, 100])
def test_each_row_of_parquet_is_in_one_part(tmp_path: Path, part_bytes: int, group: int) -> None:
    inputs = [f"row {i}" for i in range(50)]
    table = pa.table({"input": inputs, "other": [{"a": i} for i in range(50)]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=group)
    rows = rows_of(Source.of(tmp_path / "in.parquet"), part_bytes)
    assert [row.payload for row in rows] == inputs
    assert [row.line for row in rows] == list(range(1, 51))


def test_row_without_an_id_gets_one_that_no_other_row_has(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(20)])
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.writelines(json.dumps({"input": f"b{i}"}).encode() + b"\n" for i in range(20))
    pq.write_table(pa.table({"input": [f"c{i}" for i in range(20)]}), tmp_path / "c.parquet")
    rows = rows_of(Source.of(tmp_path), 100)
    assert [row.payload for row in rows] == [f"{file}{i}" for file in "abc" for i in range(20)]
    assert len({row.id for row in rows}) == 60
    assert rows[0].id == "a.jsonl:1"


def test_folders_patterns_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    (tmp_path / "_done").mkdir()
    for name in ("day=1/a.jsonl", "b.jsonl", "_done/c.jsonl", ".d.jsonl", "e.txt"):
        write_rows(tmp_path / name, [{"input": name}])

    def found(given: str) -> list[str]:
        return sorted(row.payload for row in rows_of(Source.of(given), 1000))

    assert found(str(tmp_path)) == ["b.jsonl", "day=1/a.jsonl"]
    assert found(f"{tmp_path}/*.jsonl") == ["b.jsonl"]
    assert found(f"{tmp_path}/*/a*") == ["day=1/a.jsonl"]
    assert found(f"file://{tmp_path}/day=1") == ["day=1/a.jsonl"]


def test_bad_input_is_refused_with_a_reason(tmp_path: Path) -> None:
    def refused(error: type[Exception], reason: str, *inputs: Path | str, **more: Any) -> None:
        source = Source.of(*inputs, **more)
        with pytest.raises(error, match=reason):
            Plan.of(source, form="parquet" if source.keep_columns else None)

    refused(FileError, r"none has no .jsonl or .jsonl.gz or .parquet file", tmp_path / "none")
    refused(FileError, "cannot use nosuch URLs: Protocol not known: nosuch", "nosuch://b/x")
    refused(UsageError, "a corpus has no parts", "redis:task")
    write_rows(tmp_path / "a.jsonl", [{"input": "a"}])
    refused(UsageError, "a.jsonl is given twice", tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    refused(UsageError, "no types for Parquet", tmp_path / "a.jsonl", keep_columns=True)
    (tmp_path / "empty.jsonl").touch()
    refused(FileError, "empty.jsonl has no rows", tmp_path / "empty.jsonl")
    (tmp_path / "x.parquet").write_text("no Parquet")
    refused(FileError, "x.parquet", tmp_path / "x.parquet")
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table({"input": ["a"], "n": [1]}), tmp_path / "p" / "1.parquet")
    refused(FileError, "no column 'text'", tmp_path / "p", input_field="text")
    pq.write_table(pa.table({"input": ["a"], "n": ["x"]}), tmp_path / "p" / "2.parquet")
    refused(FileError, "columns of different types", tmp_path / "p", keep_columns=True)


def test_file_that_changes_or_disappears_in_mid_job_is_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"input": "a"}])
    plan = Plan.of(Source.of(path))
    work = PartWork(Place.of("/"), Source.of(path), plan.suffix)
    write_rows(path, [{"input": "other"}])
    with pytest.raises(FileError, match=r"a.jsonl has changed since the job began; put the old"):
        work.raw_rows(plan.parts[0])
    path.unlink()
    with pytest.raises(FileError, match=r"a.jsonl is gone since"):
        work.raw_rows(plan.parts[0])


def test_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = Plan.of(Source.of(write_rows(tmp_path / "a.jsonl", [{"input": "a"}])))
    out.mkdir()
    (out / "part-00000.jsonl").touch()
    with Parts.held(Place.of(str(out)), plan.parts, plan.suffix) as parts:
        with pytest.raises(JobError, match=r"out has files of something else, such as part-00000"):
            parts.begun()
        parts.discard()
    assert (out / "part-00000.jsonl").exists()


def test_manifest_lists_finished_parts_and_discard_deletes_them(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"input": "a"}] * 9)
    plan, place = Plan.of(Source.of(source), 40), Place.of(str(tmp_path / "out"))
    assert len(plan.parts) == 4

    def record(ordinal: int, is_whole: bool) -> PartRecord:
        return PartRecord(ordinal, plan.parts[ordinal].name, JobReport(2, 0, 5, 3), is_whole)

    with Parts.held(place, plan.parts, plan.suffix) as parts:
        assert parts.begun() is None
        parts.begin({"pin": 1}, 1, None)
        with parts.resumed():
            assert [part.ordinal for part in parts.take(3)] == [0, 1, 2]
            new = parts.finish([record(0, True), record(1, False)])
            place.write(f"{plan.parts[0].name}.jsonl", b"")
            parts.add(new)
            assert (parts.totals.rows, parts.totals.tokens) == (4, 10)
            assert parts.finish([record(0, True)]) == []
            parts.requeue([1, 2])
            assert parts.totals.rows == 2
            assert [part.ordinal for part in parts.take(9)] == [1, 2, 3]
    with Parts.held(place, plan.parts, plan.suffix) as parts:
        assert parts.begun().pins == {"pin": 1}
        with parts.resumed():
            assert parts.totals.rows == 2
            assert [part.ordinal for part in parts.take(9)] == [1, 2, 3]
        parts.discard()
        assert parts.begun() is None
    assert {path.name for path in Path(place.path).iterdir()} == {".lock"}
