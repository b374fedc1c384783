"""Tests of the parts of an input: each row is in one part, and bad input has a clear error."""

import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import read_rows, write_rows
from tasc_jobs.batch.generate import RowAnswers
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.parts import PartActor, Parts, PartSpec, Plan
from tasc_jobs.batch.places import Place
from tasc_jobs.batch.work import JobReport, PartRecord, Record, Row
from tasc_jobs.errors import JobError, UsageError
from tasc_protocol import Request
from tasc_runtime.data.rows import read_raw_rows
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import FileError


def rows_of(source: Source, part_bytes: int) -> list[Any]:
    """The rows of all parts of an input, in order."""
    rows = list(Plan.of(source, "/nowhere/", part_bytes).rows())
    assert [row.ordinal for row in rows] == list(range(len(rows)))
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
    plan = Plan.of(Source.of(path), "/nowhere/", part_bytes)
    work = plan.work
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
            Plan.of(source, "/nowhere/", form="parquet" if source.keep_columns else None)

    refused(FileError, r"none does not exist; correct the path", tmp_path / "none")
    (tmp_path / "bare").mkdir()
    no_rows = r"bare has no .jsonl or .jsonl.gz or .parquet file"
    refused(FileError, no_rows, tmp_path / "bare")
    (tmp_path / "bare" / "x.txt").touch()
    refused(FileError, no_rows, tmp_path / "bare")
    refused(FileError, "cannot use nosuch URLs: Protocol not known: nosuch", "nosuch://b/x")
    refused(UsageError, "a corpus has no parts", "redis:task")
    write_rows(tmp_path / "a.jsonl", [{"input": "a"}])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    refused(UsageError, "link.jsonl is also .*a.jsonl; name each", tmp_path)
    (tmp_path / "link.jsonl").unlink()
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
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(b"zeros")
    refused(FileError, "b.jsonl.gz: Not a gzipped file", zipped)
    zipped.write_bytes(gzip.compress(b'{"input": "a"}\n'))
    with zipped.open("ab") as file:
        file.truncate((16 << 20) + 1)
    refused(FileError, "b.jsonl.gz has 16777217 bytes, .*decompress it, or split it", zipped)
    secret = "s3://KEY:SECRET@bucket/a b"
    with pytest.raises(FileError, match="a URL of s3 cannot be read; encode") as caught:
        Place.of(secret)
    assert "SECRET" not in str(caught.value)
    assert Place.of(f"{secret[:-2]}?region=us-east-1").shown == "s3://bucket/a"


def test_files_of_an_output_are_no_input(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"input": "a"}])
    (tmp_path / "out").mkdir()
    write_rows(tmp_path / "out" / "part-0000000-0.jsonl", [{"input": "answer"}])
    plan = Plan.of(Source.of(tmp_path), str(tmp_path / "out"))
    assert [part.file.name for part in plan.parts] == ["a.jsonl"]
    with pytest.raises(UsageError, match=r"--output: .*out is the input; name another folder"):
        Plan.of(Source.of(tmp_path / "out"), str(tmp_path / "out"))


def test_files_with_equal_names_are_told_apart(tmp_path: Path) -> None:
    for name in ("a[1]", "b"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "x.jsonl", [{"input": name}])
    rows = rows_of(Source.of(tmp_path / "a[1]", tmp_path / "b"), 100)
    assert [row.payload for row in rows] == ["a[1]", "b"]
    assert len({row.id for row in rows}) == 2


def test_damaged_row_group_of_a_local_file_is_a_rejected_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"input": [f"row {i}" for i in range(40)]})
    pq.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    at = content.index(b"row 10")
    content[at - 4 : at] = b"\xff" * 4  # the length of a text
    path.write_bytes(content)
    rows = rows_of(Source.of(path), 60)
    good = [row.payload for row in rows if not row.refused]
    assert [f"row {i}" for i in range(10)] == good[:10]
    assert good[-20:] == [f"row {i}" for i in range(20, 40)]
    assert {"damaged Parquet" in row.refused for row in rows if row.refused} == {True}


def test_damage_behind_a_part_is_no_row_of_the_part(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"input": [f"row {i:04}" for i in range(1000)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, data_page_size=1000)
    content = bytearray(path.read_bytes())
    at = content.index(b"row 0600")
    content[at - 4 : at] = b"\xff" * 4  # the length of a text
    path.write_bytes(content)
    for first, last in ((0, 256), (0, 512), (256, 300)):
        found = [row.line for row in read_raw_rows(path, between=(first, last))]
        assert found == [*range(first + 1, last + 1)]
    for first, last in ((512, 700), (700, 1000)):
        *_, row = read_raw_rows(path, between=(first, last))
        assert "damaged Parquet" in row.reason
        assert first < row.line <= last


class Instant:
    """Stands in for an engine: answers each row with its input, a few at a time."""

    def __init__(self) -> None:
        self.rows = list[Row]()

    def work(self, rows: Sequence[Row]) -> list[Record]:
        self.rows += rows
        done, self.rows = self.rows[:5], self.rows[5:]
        return [Record.of(row, {"text": row.payload}, None, 1, 1) for row in reversed(done)]


def actor_of(plan: Plan) -> PartActor:
    plan.place.make()
    spec = PartSpec("", "", None, EngineSettings(rows=2), RowAnswers(Request(), True), 0.0,
                    parts=plan.work, dedupe_bytes=1 << 20)  # fmt: skip
    actor = PartActor(spec)
    actor.begin(Instant())
    return actor


@pytest.mark.parametrize("part_bytes", [60, 150, 400, 5000])
def test_each_part_has_its_rows_in_order(tmp_path: Path, part_bytes: int) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        inputs = [f"{name}{i}" for i in range(100)]
        pq.write_table(pa.table({"input": inputs}), tmp_path / "in" / f"{name}.parquet")
        lines = [{"input": f"{name}{i % 50}j"} for i in range(100)]
        write_rows(tmp_path / "in" / f"{name}.jsonl", [*lines, [1]])
    plan = Plan.of(Source.of(tmp_path / "in"), str(tmp_path / "out"), part_bytes, "jsonl")
    actor = actor_of(plan)
    todo, done = list(plan.parts), set[int]()
    while len(done) < len(plan.parts):
        some, todo = todo[:1], todo[1:]
        found = actor.work(some)
        done |= {record.ordinal for record in found if record.is_whole}
    for part in plan.parts:
        wanted = [row.payload for row in plan.work.rows(part, plan.work.raw_rows(part))]
        written = read_rows(Path(plan.place.path, f"{part.name}.jsonl"))
        assert [row["text"] for row in written] == [text for text in wanted if text]
    rejected = [read_rows(path)[0] for path in Path(plan.place.path, "_rejected").iterdir()]
    assert [row["reason"] for row in rejected] == ["not a JSON object"] * 3
    assert rejected[0]["output"].startswith("../part-")


def test_part_that_cannot_be_written_ends_the_job_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source.of(write_rows(tmp_path / "a.jsonl", [{"input": "a"}]))
    plan = Plan.of(source, str(tmp_path / "out"))
    actor = actor_of(plan)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(FileError, match="part-0000000-.* folder for temporary files .* TMPDIR"):
        list(map(actor.work, [plan.parts, (), ()]))
    assert not list(Path(plan.place.path).iterdir())


def test_file_that_changes_or_disappears_in_mid_job_is_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"input": "a"}])
    plan = Plan.of(Source.of(path), "/nowhere/")
    work = plan.work
    write_rows(path, [{"input": "other"}])
    with pytest.raises(FileError, match=r"a.jsonl has changed since the job began; put the old"):
        work.raw_rows(plan.parts[0])
    path.unlink()
    with pytest.raises(FileError, match=r"a.jsonl is gone since"):
        work.raw_rows(plan.parts[0])


def test_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = Plan.of(Source.of(write_rows(tmp_path / "a.jsonl", [{"input": "a"}])), str(out))
    out.mkdir()
    (out / "part-00000.jsonl").touch()
    has_other_rows = r"out has other rows, such as part-00000"
    with pytest.raises(JobError, match=has_other_rows), Parts.held(plan):
        pass
    assert [path.name for path in out.iterdir()] == ["part-00000.jsonl"]
    plan.place.write("_manifest.json", b"{}")
    for work in (Parts.begun, Parts.discard):
        with Parts.held(plan) as parts, pytest.raises(JobError, match=has_other_rows):
            work(parts)
    assert {"_manifest.json", "part-00000.jsonl"} <= {path.name for path in out.iterdir()}


def test_rejected_rows_of_a_job_without_a_manifest_are_no_other_jobs(tmp_path: Path) -> None:
    source = Source.of(write_rows(tmp_path / "a.jsonl", [{"input": "a"}]))
    plan = Plan.of(source, str(tmp_path / "out"))
    plan.place.make()
    plan.place.write(f"_rejected/{plan.parts[0].name}.jsonl", b"{}")
    refused = pytest.raises(JobError, match="has other rows, such as _rejected/part-")
    with refused, Parts.held(plan):
        pass


def test_manifest_lists_finished_parts_and_discard_deletes_them(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"input": "a"}] * 9)
    plan = Plan.of(Source.of(source), str(tmp_path / "out"), 40)
    place = plan.place
    assert len(plan.parts) == 4

    def record(ordinal: int, is_whole: bool) -> PartRecord:
        return PartRecord(ordinal, JobReport(2, 0, 5, 3), is_whole)

    with Parts.held(plan) as parts:
        assert parts.begun() is None
        parts.begin({"pin": 1}, 1, None)
        parts.resumed()
        assert [part.ordinal for part in parts.take(3)] == [0, 1, 2]
        new = parts.finish([record(0, True), record(1, False)])
        place.write(f"{plan.parts[0].name}.jsonl", b"")
        parts.add(new)
        assert (parts.totals.rows, parts.totals.tokens) == (4, 10)
        assert parts.finish([record(0, True)]) == []
        parts.requeue([1, 2])
        assert parts.totals.rows == 2
        assert [part.ordinal for part in parts.take(9)] == [1, 2, 3]
    (tmp_path / "out" / ".part-0.jsonl.abc.partial").touch()
    with Parts.held(plan) as parts:
        assert parts.begun().pins == {"pin": 1}
        parts.resumed()
        assert parts.totals.rows == 2
        assert [part.ordinal for part in parts.take(9)] == [1, 2, 3]
        parts.discard()
        assert parts.begun() is None
    assert {path.name for path in Path(place.path).iterdir()} == {".lock"}
