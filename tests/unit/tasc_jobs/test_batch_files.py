"""Tests a job's rows with their order and places, its folder of finished rows, and its output."""

import base64
import gzip
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support import files_up_to, read_rows, refused, write_rows
from tasc_jobs.batch import generate
from tasc_jobs.batch.columns import ANSWER, LOGPROBS
from tasc_jobs.batch.folder import JobFolder
from tasc_jobs.batch.generate import write_files
from tasc_jobs.batch.inputs import (
    SeenIds,
    Source,
    check_places,
    files_of,
    open_files,
    open_input,
    reject_file,
)
from tasc_jobs.batch.work import JobBusy, JobChanged, JobUnreadable, Record
from tasc_jobs.errors import JobError, UsageError
from tasc_protocol import Request
from tasc_runtime.errors import FileError


def test_rows_of_a_folder_are_in_order_and_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('\n{"input": "2"}\n{"id": 7, "input": "3"}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"id": "x", "input": "1"}\n'))
    pq.write_table(pa.table({"input": ["4", None]}), tmp_path / "c.parquet")
    (tmp_path / "notes.txt").write_text("no rows")
    found = open_files([tmp_path], "input", "id")
    rows = list(found.rows())
    assert [(r.ordinal, r.id, r.payload, r.line, r.file, r.refused) for r in rows] == [
        (0, "x", "1", 1, "a.jsonl.gz", None),
        (1, "b.jsonl:2", "2", 2, "b.jsonl", None),
        (2, "7", "3", 3, "b.jsonl", None),
        (3, "c.parquet:1", "4", 1, "c.parquet", None),
        (4, "c.parquet:2", "", 2, "c.parquet", "field 'input' is null, not a text"),
    ]
    assert list(found.rows()) == rows
    assert found.total == 6  # a blank line too
    assert [pin["file"] for pin in found.pins] == ["a.jsonl.gz", "b.jsonl", "c.parquet"]


def test_invalid_rows_keep_their_place_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    bad = ['"text"', '{"id": 1.5, "input": "x"}', '{"question": "x"}', "{", '{"input": "\\ud800"}']
    path.write_text("\n".join(['{"id": "a", "input": "1"}', *bad, '{"id": "a", "input": "2"}']))
    found = open_files([path], "input", "id")
    assert found.total == 7
    rows = list(found.rows())
    assert [row.ordinal for row in rows] == list(range(7))
    reasons = (
        "not a JSON object",
        "field 'id' is neither a string nor a whole number",
        "no field 'input'",
        "not JSON: ",
        "lone surrogate",
        "id 'a' is also in line 1",
    )
    assert rows[0].refused is None
    assert all(why in str(row.refused) for row, why in zip(rows[1:], reasons, strict=True))
    assert [row.file for row in rows] == [None] * 7


def test_row_input_may_be_any_json_value_or_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [{"role": "user", "content": "hi"}]
    answered = [*asked, {"role": "assistant", "content": "ho"}]
    path = tmp_path / "in.jsonl"
    inputs: list[dict[str, object]] = [{"input": 42}, {"input": {"a": "ü"}}, {"messages": answered}]
    write_rows(path, [*inputs, {"input": asked}, {"messages": [*answered, *answered]}])
    *good, several = open_files([path], "input", "id").rows()
    assert [(row.payload, row.refused) for row in good] == [
        ("42", None), ('{"a": "ü"}', None), ("hi", None), ("hi", None),
    ]  # fmt: skip
    assert several.refused is not None
    (warning,) = caplog.messages
    assert warning.startswith(f"{path}: ")
    check_places(Source.of(path), tmp_path / "out.jsonl", tmp_path / "no.jsonl")


def test_ids_that_pandas_made_floats_are_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pd.DataFrame({"id": [7, None, 9], "input": ["a", "b", "c"]}).to_parquet(path)
    rows = list(open_files([path], "input", "id").rows())
    assert [(row.id, row.payload) for row in rows] == [("7", "a"), ("2", "b"), ("9", "c")]


def test_pins_depend_on_the_content_not_on_file_times(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    files = (write_rows(path, [{"input": text}]) for text in "112")
    first, again, other = (open_files([file], "input", "id").pins for file in files)
    assert first == again != other


def test_files_that_cannot_be_used_are_refused_and_named(tmp_path: Path) -> None:
    one, empty, none = tmp_path / "in.jsonl", tmp_path / "empty.jsonl", tmp_path / "none"
    write_rows(one, [{"input": "1"}])
    empty.touch()
    none.mkdir()
    for use, named in (
        (lambda: files_of([none]), "none"),
        (lambda: files_of([one, one]), "in.jsonl"),
        (lambda: files_of([tmp_path / "gone.jsonl"]), "gone.jsonl"),
        (lambda: open_files([empty], "input", "id"), "empty.jsonl"),
    ):
        with refused(FileError, named):
            use()


def test_error_of_an_unusable_path_names_its_option(tmp_path: Path) -> None:
    places, rows = tmp_path / "places", write_rows(tmp_path / "in.jsonl", [{"input": "1"}])
    out, no = places / "out", places / "no.jsonl"
    places.mkdir()
    corpus = Source.of("redis:t")
    check_places(Source.of(rows), out, no)
    check_places(corpus, out.with_suffix(".parquet"), no)
    for source, output, reject, named in (
        (Source.of(rows, tmp_path / "gone.jsonl"), out, no, ("--input", "gone.jsonl")),
        (Source.of("redis:t", rows), out, no, ("--input", "redis:t")),
        (Source.of(rows), rows, no, ("--output", "in.jsonl")),
        (Source.of(tmp_path), tmp_path / "out", no, ("--output", "out")),
        (Source.of(rows), out, rows, ("--reject", "in.jsonl")),
        (corpus, out, out, ("--reject", "out")),
        (corpus, places / "out.csv", no, ("--output", "out.csv")),
        (corpus, places, no, ("--output", "places")),
        (corpus, places / "gone" / "out", no, ("--output", "gone")),
        (corpus, out, places / "gone" / "no", ("--reject", "gone")),
    ):
        with refused(UsageError, *named):
            check_places(source, output, reject)
    assert corpus.files == []


def test_repeated_id_is_found_at_its_first_place() -> None:
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
def test_answers_and_rejected_rows_are_written_to_separate_files(tmp_path: Path, name: str) -> None:
    output, reject = tmp_path / name, tmp_path / "no.jsonl"
    write_files(output, reject, iter(records()), True)
    first = output.read_bytes()
    if output.suffix == ".parquet":
        assert pq.read_schema(output).equals(ANSWER)
        found = pq.read_table(output).to_pylist()
    else:
        found = read_rows(output)
    assert found == [{"id": f"r{i}", **CONTENT} for i in range(3)]
    assert json.loads(reject.read_text()) == {
        "output": name, "file": "f", "line": 4, "id": "r3", "reason": "too long",
    }  # fmt: skip
    write_files(output, reject, iter(records()), True)
    assert output.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(("no.jsonl", name))
    output.unlink()
    write_files(output, reject, iter(records()), False)  # of a job that ended early
    assert not output.exists()
    assert len(read_rows(reject)) == 1
    write_files(output, reject, iter(records()[:3]), True)
    assert not reject.exists()


def test_rejected_rows_of_two_outputs_never_share_a_file(tmp_path: Path) -> None:
    one, other = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    assert reject_file(one) != reject_file(other)
    source = Source.of(write_rows(tmp_path / "in.jsonl", [{"input": "1"}]))
    reject = tmp_path / "no.jsonl"
    for output in (one, other):
        check_places(source, output, reject)  # two jobs begin
    write_files(one, reject, records(), True)
    first = reject.read_bytes()
    with refused(JobError, str(reject), "out.jsonl", "--reject"):
        write_files(other, reject, records(), True)
    with refused(UsageError, "--reject", "out.jsonl"):
        check_places(source, other, reject)
    assert (reject.read_bytes(), other.exists()) == (first, False)
    write_files(other, tmp_path / "others.jsonl", records(), True)
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    check_places(Source.of(moved / "in.jsonl"), moved / one.name, moved / reject.name)
    write_files(moved / one.name, moved / reject.name, records()[:3], True)
    assert not (moved / reject.name).exists()


@pytest.mark.parametrize("content", ["notes\n", '{"id": 1}\n', "[1]\n", "{}"])
def test_reject_file_never_replaces_another_file(tmp_path: Path, content: str) -> None:
    source = Source.of(write_rows(tmp_path / "in.jsonl", [{"input": "1"}]))
    reject, output = tmp_path / "notes", tmp_path / "out.jsonl"
    reject.touch()
    check_places(source, output, reject)  # nothing is lost with an empty file
    reject.write_text(content)
    with refused(UsageError, "--reject", str(reject)):
        check_places(source, output, reject)


TOKEN = {"token": "n", "logprob": -0.5, "bytes": [110]}
LOGPROBS_OF = [{**TOKEN, "top_logprobs": [TOKEN]}]


def written(source: Source, output: Path, logprobs: object = None) -> list[dict[str, object]]:
    """Writes the answers of two rows with the user's columns; returns the written rows."""
    content = CONTENT if logprobs is None else {**CONTENT, "logprobs": logprobs}
    found = [Record(i, f"r{i}", i + 1, None, content, None) for i in range(2)]
    columns = ANSWER if logprobs is None else ANSWER.append(LOGPROBS)
    own = open_input(source, "redis://nowhere").own
    write_files(output, output.with_name("no"), found, True, columns=columns, own=own)
    if output.suffix == ".parquet":
        return pq.read_table(output).to_pylist()
    return read_rows(output)


def answered(ordinal: int, **own: object) -> dict[str, object]:
    return {"id": f"r{ordinal}", **CONTENT, **own}


def test_user_columns_are_written_beside_the_answers(tmp_path: Path) -> None:
    """A name that the answers also have gets a prefix; names stay unique."""
    first = {"id": 7, "text": "hi", "input_text": "ho", "n": 1, "tags": ["a", 2], "big": 2**70}
    second = {"text": "x", "n": 0.5, "ok": True, "logprobs": None, "odd": "\ud800", "\ud801": {}}
    rows = write_rows(tmp_path / "in.jsonl", [first, second])
    source = Source.of(rows, input_field="text", keep_columns=True)
    own = {"input_text": "hi", "input_input_text": "ho", "n": 1, "tags": ["a", 2], "big": 2**70}
    others = {"n": 0.5, "ok": True, "input_logprobs": None, "odd": "\ud800", r"\ud801": {}}
    found = written(source, tmp_path / "out.jsonl")
    assert found == [answered(0, **own), answered(1, input_text="x", **others)]

    table = written(source, tmp_path / "out.parquet")
    kinds = {field.name: str(field.type) for field in pq.read_schema(tmp_path / "out.parquet")}
    assert (kinds["n"], kinds["ok"], kinds["tags"]) == ("double", "bool", "string")
    texts = {"tags": '["a", 2]', "big": str(2**70), "odd": '"\\ud800"', r"\ud801": "{}"}
    for row, kept in zip(table, found, strict=True):
        assert {k: v for k, v in row.items() if v is not None} == {
            name: texts.get(name, value) for name, value in kept.items() if value is not None
        }

    keyed = Source.of(rows, input_field="text", id_field="n", keep_columns=True)
    assert [row.get("input_id") for row in written(keyed, tmp_path / "out.jsonl")] == [7, None]
    assert open_input(Source.of(rows, input_field="text"), "redis://nowhere").own is None


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([2**53 + 1, 2], pa.int64()),
        ([2**53 + 1, None], pa.int64()),
        ([2**53, 0.5], pa.float64()),
        ([2**53 + 1, 0.5], pa.string()),
        ([0.5, -(2**53) - 1], pa.string()),
        ([2**53 + 1, "a"], pa.string()),
    ],
)
def test_whole_numbers_stay_exact(tmp_path: Path, values: list[object], type_: object) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"input": "a", "n": one} for one in values])
    found = written(Source.of(rows, keep_columns=True), tmp_path / "out.parquet")
    assert pq.read_schema(tmp_path / "out.parquet").field("n").type == type_
    kept = [row["n"] for row in found]
    assert [json.loads(n) for n in kept] == values if type_ == pa.string() else kept == values


def test_columns_of_parquet_keep_their_types(tmp_path: Path) -> None:
    day = datetime(2026, 1, 2, 3, tzinfo=UTC)
    table = pa.table(
        {
            "input": pa.array(["a", "b"]).dictionary_encode(),
            "day": pa.array([day, None], pa.timestamp("ms", "UTC")),
            "small": pa.array([1, 2], pa.int8()),
            "model": pa.array([[1.5], [math.nan]], pa.list_(pa.float32())),
            "raw": [b"\xff", None],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    source = Source.of(tmp_path / "in.parquet", keep_columns=True)
    written(source, tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.select(["day", "small", "raw"]).equals(table.select(["day", "small", "raw"]))
    assert found.schema.field("input_model").type == pa.list_(pa.float32())
    assert found.column("model").to_pylist() == ["m", "m"]
    whole = pa.schema([pa.field("input", pa.string()), pa.field("n", pa.int8(), nullable=False)])
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"input": ["a"], "n": [1]}, whole), tmp_path / "in" / "1.parquet")
    pq.write_table(pa.table({"input": ["a"]}), tmp_path / "in" / "2.parquet")
    both = written(Source.of(tmp_path / "in", keep_columns=True), tmp_path / "out.parquet")
    assert [row["n"] for row in both] == [1, None]
    lines = written(source, tmp_path / "out.jsonl")
    own = {"input": "a", "day": "2026-01-02T03:00:00+00:00", "small": 1, "raw": "/w=="}
    assert lines[0] == answered(0, **own, input_model=[1.5])
    assert lines[1]["input_model"] == [None]


def test_parquet_values_are_copied_unchanged(tmp_path: Path) -> None:
    """Years and fractions beyond Python's, and values that differ between row groups."""
    late, nested = 253402300800_000000, pa.list_(pa.struct([("at", pa.timestamp("us"))]))
    table = pa.table(
        {
            "input": ["a", "b"],
            "late": pa.array([late, None], pa.timestamp("us")),
            "zone": pa.array([late, 0], pa.timestamp("us", "Europe/Berlin")),
            "day": pa.array([2932897, None], pa.date32()),
            "clock": pa.array([1, 2], pa.time64("ns")),
            "fine": pa.array([1, -1], pa.timestamp("ns", "UTC")),
            "took": pa.array([1, None], pa.duration("ns")),
            "span": pa.array([90_000, None], pa.duration("s")),
            "nested": pa.array([[{"at": late}, None], None], nested),
            "map": pa.array([[("k", late)], []], pa.map_(pa.string(), pa.timestamp("us"))),
            "kind": pa.array(["x", "y"], pa.dictionary(pa.int8(), pa.string())),
            "list": pa.array([None, [1.5, 2.5]], pa.list_(pa.float32(), 2)),
            "key": pa.array([UUID(int=5).bytes, None], pa.uuid()),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=1)
    source = Source.of(tmp_path / "in.parquet", keep_columns=True)
    own = open_input(source, "redis://nowhere").own
    found = [Record(i, f"r{i}", i + 1, None, CONTENT, None) for i in range(2)]
    write_files(tmp_path / "out.parquet", tmp_path / "no", found, True, own=own)
    copied = pq.read_table(tmp_path / "out.parquet").select(table.column_names)
    assert copied.cast(table.schema).equals(table)
    assert copied.schema.field("kind").type.value_type == pa.string()
    first, second = written(source, tmp_path / "out.jsonl")
    assert first == answered(
        0,
        input="a",
        late="10000-01-01T00:00:00.000000",
        zone="10000-01-01T01:00:00.000000+01:00",
        day="10000-01-01",
        clock="00:00:00.000000001",
        fine="1970-01-01T00:00:00.000000001+00:00",
        took="1 ns",
        span="1 day, 1:00:00",
        nested=[{"at": "10000-01-01T00:00:00.000000"}, None],
        map=[["k", "10000-01-01T00:00:00.000000"]],
        kind="x",
        list=None,
        key=str(UUID(int=5)),
    )
    assert (second["zone"], second["map"]) == ("1970-01-01T01:00:00+01:00", [])

    (tmp_path / "both").mkdir()
    pq.write_table(table, tmp_path / "both" / "1.parquet")
    write_rows(tmp_path / "both" / "2.jsonl", [{"input": "c", "list": [1]}])
    mixed = Source.of(tmp_path / "both", keep_columns=True)
    row, _ = written(mixed, tmp_path / "mixed.parquet")
    assert (row["late"], row["clock"], row["list"]) == (first["late"], first["clock"], None)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_kept_columns_do_not_count_towards_the_row_limit(tmp_path: Path, name: str) -> None:
    images = [bytes(range(256)) * 8000, b"x"]  # 2 MB
    table = pa.table({"input": ["a", "a" * (1 << 20)], "image": images})
    pq.write_table(table, tmp_path / "in.parquet")
    opened = open_input(Source.of(tmp_path / "in.parquet", keep_columns=True), "redis://nowhere")
    rows = list(opened.rows())
    assert rows[0].refused is None
    assert all(part in str(rows[1].refused) for part in ("1048576", "1048589", "'input'"))
    found = [Record.of(row, None if row.refused else CONTENT, row.refused) for row in rows]
    write_files(tmp_path / name, tmp_path / "no", found, True, own=opened.own)
    if name == "out.parquet":
        assert pq.read_table(tmp_path / name).column("image").to_pylist() == images[:1]
    else:
        (row,) = read_rows(tmp_path / name)
        assert base64.b64decode(row["image"]) == images[0]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_log_probabilities_are_a_column_of_the_answers(tmp_path: Path, name: str) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [{"input": "a", "logprobs": 3}] * 2)
    found = written(Source.of(rows, keep_columns=True), tmp_path / name, LOGPROBS_OF)
    assert found[1] == answered(1, logprobs=LOGPROBS_OF, input="a", input_logprobs=3)


def test_job_resumes_only_with_the_same_columns(tmp_path: Path, monkeypatch) -> None:
    pins = list[object]()
    monkeypatch.setattr(generate, "run_job", lambda spec, *_, **__: pins.append(spec.pins))
    rows = write_rows(tmp_path / "in.jsonl", [{"input": "a"}])
    for source, asked in (
        (Source.of(rows), Request()),
        (Source.of(rows, keep_columns=True), Request()),
        (Source.of(rows), Request(logprobs=0)),
        (Source.of(rows), Request(logprobs=1)),
    ):
        generate.generate("redis://nowhere", "t", source, tmp_path / "out.jsonl", asked=asked)
    assert all(pins.count(one) == 1 for one in pins)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("changed", ["ba", "a", "abc", None])
@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_changed_input_is_refused_before_columns_are_mixed(
    tmp_path: Path, name: str, changed: str | None, late: bool
) -> None:
    """The input changes before its columns are read, or meanwhile."""
    file, output = tmp_path / name, tmp_path / "out.jsonl"

    def write(inputs: str) -> None:
        rows = [{"input": one, "n": one} for one in inputs]
        if name == "in.jsonl":
            write_rows(file, rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), file)

    def change() -> None:
        if changed is None:
            file.unlink()
        else:
            write(changed)

    answers = [Record(i, f"r{i}", i + 1, None, CONTENT, None) for i in range(2)]

    def then_changed() -> Iterator[Record]:
        yield from answers
        change()

    write("ab")
    own = open_input(Source.of(file, keep_columns=True), "redis://nowhere").own
    if not late:
        change()
    with refused(JobError, "--restart"):
        found = then_changed() if late else answers
        write_files(output, tmp_path / "no", found, True, own=own)
    assert not output.exists()
    file.unlink(missing_ok=True)
    write("ab")
    write_files(output, tmp_path / "no", answers, True, own=own)
    assert [row["n"] for row in read_rows(output)] == ["a", "b"]


def test_records_that_cannot_be_read_leave_no_output(tmp_path: Path) -> None:
    def broken() -> object:
        yield from records()
        raise OSError("gone")

    for name in ("out.jsonl", "out.parquet"):
        with pytest.raises(OSError, match="gone"):
            write_files(tmp_path / name, tmp_path / "no.jsonl", broken(), True)
        assert not (tmp_path / name).exists()
    assert not (tmp_path / "no.jsonl").exists()


def finished(first: int, stop: int) -> list[Record]:
    return [
        Record(i, f"r{i}", i + 1, None, {"text": f"ü{i}\ud83d"}, None, 2, 1, repeat=i % 5 == 0)
        if i % 3
        else Record(i, f"r{i}", i + 1, "a", None, "bad", 0, 0)
        for i in range(first, stop)
    ]


def test_records_are_read_in_order_with_their_sums(tmp_path: Path) -> None:
    path = tmp_path / "job"
    with JobFolder.held(path) as folder:
        assert (folder.begun(), folder.resume()) == (None, (0, set()))
        begun = folder.begin({"rows": (1, 2)}, 3, None)
        for part in (finished(4, 6), finished(1, 3), finished(0, 1), finished(8, 11)):
            folder.add(part)
    with JobFolder.held(path) as folder:
        assert folder.begun() == begun
        assert begun.pins == {"rows": [1, 2]}
        assert folder.resume() == (3, {4, 5, 8, 9, 10})
        assert list(folder.records()) == [*finished(0, 3), *finished(4, 6), *finished(8, 11)]
        totals = folder.totals
        assert (totals.rows, totals.errors, totals.tokens, totals.steps) == (8, 2, 12, 6)
        assert totals.report(0).repeats == 2
        assert totals.first_error == "row 1: bad"


@given(st.integers(0, 400), st.binary(max_size=20))
@example(256, b"]")  # a record without its counts
def test_rows_after_a_damaged_record_are_answered_again(cut: int, junk: bytes) -> None:
    with TemporaryDirectory() as path, JobFolder.held(Path(path)) as folder:
        folder.add(finished(0, 8))
        (file,) = folder.path.glob("records*")
        whole = file.read_bytes()
        file.write_bytes(whole[:cut] + junk.replace(b"\n", b"") + (b"\n" if junk else b""))
        first, behind = folder.resume()
        assert behind == set()
        assert first >= whole[:cut].count(b"\n")
        folder.add(finished(first, 8))
        assert list(folder.records()) == finished(0, 8)
        assert folder.resume() == (8, set())


@pytest.mark.parametrize("damaged", range(5))
def test_no_output_is_written_if_a_record_is_damaged(tmp_path: Path, damaged: int) -> None:
    output, reject = tmp_path / "out.jsonl", tmp_path / "reject.jsonl"
    output.write_text("before")
    with JobFolder.held(tmp_path / "job") as folder:
        folder.add([*finished(1, 5), *finished(0, 1)])
        (file,) = folder.path.glob("records*")
        lines = file.read_bytes().splitlines(keepends=True)
        lines[damaged] = b"\0" * (len(lines[damaged]) - 1) + b"\n"
        file.write_bytes(b"".join(lines))
        with refused(JobError, str(file), "0 of 5", "run the job again"):
            write_files(output, reject, folder.records(whole=True), True)
        assert output.read_text() == "before"
        assert not reject.exists()
        first, behind = folder.resume()
        assert (first, len(behind)) == (0, damaged)
        folder.add([record for record in finished(0, 5) if record.ordinal not in behind])
        assert list(folder.records(whole=True)) == finished(0, 5)


def test_full_disk_loses_only_the_record_being_written(tmp_path: Path) -> None:
    with JobFolder.held(tmp_path / "job") as folder:
        folder.add(finished(0, 3))
        (file,) = folder.path.glob("records*")
        with files_up_to(file.stat().st_size + 10), pytest.raises(OSError):  # noqa: PT011
            folder.add(finished(3, 4))
        assert not file.read_bytes().endswith(b"\n")
        assert folder.resume() == (3, set())
        folder.add(finished(3, 5))
        assert list(folder.records(whole=True)) == finished(0, 5)


def test_finished_job_keeps_only_its_report(tmp_path: Path) -> None:
    with JobFolder.held(tmp_path / "job") as folder:
        folder.add(finished(0, 4))
        begun = folder.begin({"a": 1}, 2, None)
        folder.add(finished(0, 4))
        folder.end(begun, {"rows": 4})
        content = json.loads((folder.path / "job.json").read_text())
        assert (content["record_version"], content["report"]) == (2, {"rows": 4})
        assert sorted(p.name for p in folder.path.iterdir()) == ["job.json", "lock"]
        assert folder.resume() == (0, set())
        folder.discard()
        assert folder.begun() is None


def hold(path: Path, parent: Connection) -> None:
    with JobFolder.held(path):
        parent.send("held")
        signal.pause()


def test_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    """The first process is a fork, because the imports of a new one take seconds."""
    path, forks = tmp_path / "job", get_context("fork")
    child, parent = forks.Pipe()
    first = forks.Process(target=hold, args=(path, parent))
    first.start()
    try:
        assert child.poll(300)
        with pytest.raises(JobBusy), JobFolder.held(path):
            pass
    finally:
        first.kill()
        first.join()
    with JobFolder.held(path):
        pass


def test_error_of_changed_pins_names_the_pins_and_a_solution(tmp_path: Path) -> None:
    with JobFolder.held(tmp_path / "job") as folder:
        begun = folder.begin({"seed": 0, "input": ["x" * 100], "same": (1,)}, 1, 1)
    folder.require_same(begun, {"seed": 0, "input": ["x" * 100], "same": (1,)})
    with refused(JobChanged, "input", "seed", "--restart") as changed:
        folder.require_same(begun, {"seed": 1, "input": 3, "same": [1]})
    assert "same was" not in str(changed.value)
    assert "x" * 60 not in str(changed.value)
    files = [{"file": name, "bytes": 1, "changed": 7} for name in "abc"]
    begun = replace(begun, pins={"input": files})
    for now, said in (
        ([*files[:1], {**files[1], "changed": 8}, files[2]], "input: b has changed"),
        (files[1:], "input: a is gone"),
        ([*files, {**files[0], "file": "d"}], "input: d is new"),
        (files[::-1], "input was"),
    ):
        with refused(JobChanged, said, "--restart"):
            folder.require_same(begun, {"input": now})


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1}', '{"format": 2, "x": 1}'])
def test_unreadable_job_folder_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with refused(JobUnreadable, "--restart"):
        JobFolder(tmp_path).begun()
    with pytest.raises(FileError), JobFolder.held(tmp_path / "no" / "job"):
        pass
