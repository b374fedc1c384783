"""Ingest into a real Redis: nothing lost, nothing twice, and every refused line accounted for."""

import gzip
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import failing, read_rows, refused, write_rows
from tasc_jobs.index.ingest import IngestReport, ingest
from tasc_runtime.errors import FileError
from tasc_store import CorpusStore

pytestmark = pytest.mark.redis


def rows_of(client, task):
    store = CorpusStore(client, task)
    return store.read(0, len(store))


def numbered(path, count, **extra):
    return write_rows(path, ({"input": f"i{n}", "output": f"o{n}", **extra} for n in range(count)))


def test_rows_of_all_formats_arrive_in_order(client, task, tmp_path):
    plain, zipped, columns = (tmp_path / f"r.{kind}" for kind in ("jsonl", "jsonl.gz", "parquet"))
    plain.write_text('{"id": "a", "input": "1", "output": "x"}\n')
    zipped.write_bytes(gzip.compress(b'{"id": 2, "input": "2", "output": "x"}\n'))
    pq.write_table(pa.table({"id": [3], "input": ["3"], "output": ["x"]}), columns)
    report = ingest(client, task, [columns, plain, zipped], reject=tmp_path / "bad.jsonl")
    assert report == IngestReport(added=3, known=0, rejected=0, reject_file=None)
    assert [(r.key, r.input) for r in rows_of(client, task)] == [("3", "3"), ("a", "1"), ("2", "2")]
    assert not (tmp_path / "bad.jsonl").exists()


def test_rows_with_outputs_outside_the_labels_are_counted(client, task, tmp_path):
    path, reject = numbered(tmp_path / "rows.jsonl", 5), tmp_path / "bad.jsonl"
    for labels, outside in ((("o1", "o3"), 3), ((), 0)):
        report = ingest(client, task, [path], reject=reject, labels=labels)
        assert report.outside_labels == outside
    assert len(CorpusStore(client, task)) == 5


def test_next_ingest_completes_an_interrupted_ingest(client, task, tmp_path):
    path, reject = numbered(tmp_path / "rows.jsonl", 2500), tmp_path / "bad.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ingest(client, task, [path], reject=reject, progress=failing(KeyboardInterrupt()))
    assert len(CorpusStore(client, task)) == 1000
    for report in (IngestReport(1500, 1000, 0, None), IngestReport(0, 2500, 0, None)):
        assert ingest(client, task, [path], reject=reject) == report
    assert [row.input for row in rows_of(client, task)] == [f"i{n}" for n in range(2500)]


def test_refused_lines_are_listed_with_file_line_reason_and_text(client, task, tmp_path):
    good = '{"id": "%d", "input": "x", "output": "y"}\n'
    plain = tmp_path / "\udcff.jsonl"  # a file name that is no UTF-8
    plain.write_text(good % 1 + "{\n" + good % 2 + '{"input": "ä"}\n')
    columns, reject = tmp_path / "rows.parquet", tmp_path / "bad.jsonl"
    pq.write_table(pa.table({"input": ["x", "x"], "output": ["y", ""]}), columns)
    for known in (0, 3):
        rows = []
        report = ingest(client, task, [plain, columns], reject=reject, progress=rows.append)
        first = report.first_rejected
        assert report == IngestReport(3 - known, known, 3, str(reject), first)
        assert all(part in str(first) for part in ("\\udcff.jsonl", "line 2: not JSON"))
        assert sum(rows) == 6
    assert [(bad["file"], bad["line"], bad["text"]) for bad in read_rows(reject)] == [
        (str(plain), 2, "{"),
        (str(plain), 4, '{"input": "ä"}'),
        (str(columns), 2, '{"input": "x", "output": ""}'),
    ]


def test_refused_lines_are_replaced_per_file(client, task, tmp_path):
    one, other, reject = (tmp_path / f"{name}.jsonl" for name in ("one", "other", "bad"))

    def listed(*files):
        ingest(client, task, files, reject=reject)
        return [Path(bad["file"]).stem for bad in read_rows(reject)] if reject.exists() else None

    one.write_text("{\n{\n")
    other.write_text("{\n")
    assert listed(one) == ["one"] * 2
    assert listed(other) == ["one"] * 2 + ["other"]
    assert listed(one) == ["other", "one", "one"]
    assert listed(numbered(one, 1)) == ["other"]
    assert listed(numbered(other, 1)) is None


def test_file_is_recognised_by_any_path(client, task, tmp_path, monkeypatch):
    reject = tmp_path / "bad.jsonl"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("{\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in" / "a.jsonl")
    for folder, name in ((".", "in/a.jsonl"), ("in", "a.jsonl"), ("in", "../in/a.jsonl")):
        monkeypatch.chdir(tmp_path / folder)
        ingest(client, task, [Path(name)], reject=reject)
        assert [bad["file"] for bad in read_rows(reject)] == [str(tmp_path / "in" / "a.jsonl")]
    monkeypatch.chdir(tmp_path)
    ingest(client, task, [Path("link.jsonl")], reject=reject)
    assert len(read_rows(reject)) == 1


def test_refused_lines_of_other_files_are_not_held_in_memory(client, task, tmp_path):
    one, reject = numbered(tmp_path / "one.jsonl", 1), tmp_path / "bad.jsonl"
    other = {"file": "/other", "line": 1, "reason": "long", "text": "x" * 200}
    write_rows(reject, [other] * 3000)
    before = reject.read_bytes()
    tracemalloc.start()
    try:
        ingest(client, task, [one], reject=reject)
        assert tracemalloc.get_traced_memory()[1] < len(before) / 2
    finally:
        tracemalloc.stop()
    assert reject.read_bytes() == before


def test_long_rows_are_sent_in_smaller_batches(client, task, tmp_path):
    path = numbered(tmp_path / "rows.jsonl", 12, input="x" * 1_000_000)
    reported = []
    assert (
        ingest(client, task, [path], reject=tmp_path / "bad", progress=reported.append).added == 12
    )
    assert max(reported) < 12
    assert sum(reported) == 12


@pytest.mark.parametrize(
    ("files", "reject", "why"),
    [
        ([], "bad.jsonl", "no files"),
        (["good.jsonl", "absent.jsonl"], "bad.jsonl", "absent.jsonl"),
        (["good.jsonl", "rows.txt"], "bad.jsonl", "is none of"),
        (["good.jsonl"], "absent/bad.jsonl", "for refused rows does not exist"),
        (["good.jsonl"], "good.jsonl", "is an input; name another file"),
        (["good.jsonl"], "no.jsonl", "would be overwritten"),
    ],
)
def test_unusable_files_are_refused_before_ingesting(client, task, tmp_path, files, reject, why):
    good = numbered(tmp_path / "good.jsonl", 3)
    (tmp_path / "rows.txt").write_text("")
    write_rows(tmp_path / "no.jsonl", [{"output": "out", "file": "f", "line": 1, "reason": "long"}])
    content = good.read_bytes()
    with refused(FileError, why):
        ingest(client, task, [tmp_path / name for name in files], reject=tmp_path / reject)
    assert (len(CorpusStore(client, task)), good.read_bytes()) == (0, content)
