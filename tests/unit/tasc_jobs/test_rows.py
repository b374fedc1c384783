"""Files of rows: every line gives a row or a reason, whatever stands on it."""

import gzip
import hashlib
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_jobs.corpus_rows import BadRow, check_file, read_rows
from tasc_jobs.errors import FileError
from tasc_jobs.json_lines import read_json_lines
from tasc_store import CorpusRow

GOOD = b'{"id": "r", "input": "x", "output": "y"}'


def read(path, **settings):
    return list(read_rows(path, "input", "output", "id", **settings))


def write(tmp_path, *lines, name="rows.jsonl"):
    path = tmp_path / name
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def parquet(tmp_path, **columns):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"input": "\xff", "output": "y"}', "not UTF-8 at byte 11"),
        (b'{"input": "x", ', "not JSON: "),
        (b"[" * 100_000, "not JSON: nested too deep"),
        (b'["input", "output"]', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"output": "y"}', "no field 'input'"),
        (b'{"input": "x"}', "no field 'output'"),
        (b'{"input": 1, "output": "y"}', "field 'input' is not a string"),
        (b'{"input": "x", "output": null}', "field 'output' is not a string"),
        (b'{"input": "x", "output": ""}', "empty output"),
        (b'{"input": "x", "output": " \\n"}', "empty output"),
        (b'{"id": 1.5, "input": "x", "output": "y"}', "field 'id' is neither"),
        (b'{"id": true, "input": "x", "output": "y"}', "field 'id' is neither"),
        (b'{"id": "", "input": "x", "output": "y"}', "needs a key"),
        (b'{"id": "s", "input": "\\ud800", "output": "y"}', "lone surrogate"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_bad_line_is_named_and_the_lines_around_it_are_read(tmp_path, name, line, reason):
    path = write(tmp_path, GOOD, line, GOOD, name=name)
    first, bad, last = read(path)
    assert first == last == CorpusRow("r", "x", "y")
    assert (bad.file, bad.line) == (str(path), 2)
    assert bad.reason.startswith(reason) or reason in bad.reason
    assert bad.text == line.decode(errors="replace")[:200]


def test_a_line_over_the_bound_is_refused_and_one_at_the_bound_is_not(tmp_path):
    path = write(tmp_path, GOOD, b"x" * (len(GOOD) + 1), b"x" * 300_000, GOOD)
    good, longer, longest, last = read(path, max_line_bytes=len(GOOD))
    assert good == last == CorpusRow("r", "x", "y")
    assert longer.reason == longest.reason == f"longer than {len(GOOD)} bytes"
    assert (longer.line, longest.line, longest.text) == (2, 3, "x" * (len(GOOD) + 1))


def test_no_more_of_a_line_is_asked_for_than_the_bound(tmp_path, monkeypatch):
    asked = []

    class Watched(io.BytesIO):
        def readline(self, size=-1):
            asked.append(size)
            return super().readline(size)

    path = write(tmp_path, b"x" * 1_000_000)
    monkeypatch.setattr("tasc_jobs.json_lines._open", lambda path: Watched(path.read_bytes()))
    assert [r.reason for r in read_json_lines(path, 100)] == ["longer than 100 bytes"]
    assert len(asked) > 2
    assert all(0 < size <= 1 << 16 for size in asked)


def test_keys_are_ids_else_file_hash_and_line(tmp_path):
    anonymous = b'{"input": "", "output": "y"}'
    path = write(tmp_path, b'{"id": 7, "input": "", "output": "y"}', b"", anonymous, anonymous)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert [row.key for row in read(path)] == ["7", f"{digest}:3", f"{digest}:4"]


def test_fields_go_by_the_names_given(tmp_path):
    path = write(tmp_path, b'{"n": "k", "question": "q", "answer": "a", "input": 1}')
    assert list(read_rows(path, "question", "answer", "n")) == [CorpusRow("k", "q", "a")]


def test_the_last_line_needs_no_line_end_and_may_end_with_a_carriage_return(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\r\n\r\n" + GOOD)
    assert read(path) == [CorpusRow("r", "x", "y")] * 2


@pytest.mark.parametrize("cut", [1, 9, 1000])
def test_a_truncated_gzip_gives_its_whole_lines_and_then_the_reason(tmp_path, cut):
    path = write(
        tmp_path, *(b'{"input": "%d", "output": "y"}' % n for n in range(9000)), name="r.jsonl.gz"
    )
    path.write_bytes(path.read_bytes()[:-cut])
    *rows, bad = read(path)
    assert len(rows) > 1000
    assert [row.input for row in rows] == [str(n) for n in range(len(rows))]
    assert bad == BadRow(str(path), len(rows) + 1, bad.reason, "")
    assert bad.reason.startswith("damaged gzip, the rest is lost: ")


def test_a_flipped_byte_in_a_gzip_is_a_bad_row(tmp_path):
    path = write(tmp_path, *[GOOD] * 100, name="r.jsonl.gz")
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # in the checksum
    path.write_bytes(content)
    *rows, bad = read(path)
    assert len(rows) == 100
    assert "CRC" in bad.reason


@given(st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=8))
def test_no_bytes_at_all_stop_the_reading(tmp_path_factory, lines):
    path = write(tmp_path_factory.mktemp("any"), *lines, GOOD)
    found = read(path)
    assert found[-1] == CorpusRow("r", "x", "y")
    assert len(found) == 1 + sum(bool(line.strip()) for line in lines)


def test_parquet_rows_are_read_and_refused_like_lines(tmp_path):
    path = parquet(
        tmp_path,
        id=pa.array(["a", None, "c", "d"]).dictionary_encode(),
        input=pa.array(["x", "", None, "x" * 300], pa.large_string()),
        output=["y", "y", "y", " "],
        other=[1, 2, 3, 4],
    )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    first, second, null, empty = read(path)
    assert (first, second) == (CorpusRow("a", "x", "y"), CorpusRow(f"{digest}:2", "", "y"))
    assert (null.line, null.reason) == (3, "field 'input' is not a string")
    assert (empty.line, empty.reason, len(empty.text)) == (4, "empty output", 200)
    assert json.loads(null.text) == {"id": "c", "input": None, "output": "y"}


def test_parquet_cells_that_are_no_text_or_too_long_are_bad_rows(tmp_path):
    text = pa.StringArray.from_buffers(
        3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"x\xffz")
    )
    path = parquet(tmp_path, id=[1, 2, 3], input=text, output=["y", "y", "y" * 100])
    good, no_text, long = read(path, max_line_bytes=100)
    assert good == CorpusRow("1", "x", "y")
    assert (no_text.line, no_text.reason) == (2, "not UTF-8 in column 'input' at byte 0")
    assert (long.line, long.reason) == (3, "longer than 100 bytes")


def test_a_damaged_parquet_row_group_gives_a_reason_and_the_groups_around_it_are_read(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pa.table({"input": ["x"] * 2500, "output": [f"{n:030d}" for n in range(2500)]})
    pq.write_table(table, path, row_group_size=1000, use_dictionary=False, compression="zstd")
    with pq.ParquetFile(path) as file:
        start = file.metadata.row_group(1).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 400] = b"\xff" * 400
    path.write_bytes(content)
    found = read(path)
    (bad,) = [row for row in found if isinstance(row, BadRow)]
    outputs = [int(row.output) for row in found if isinstance(row, CorpusRow)]
    assert outputs == [*range(1000), *range(2000, 2500)]
    assert bad.line == 1001
    assert bad.reason.startswith("damaged Parquet, lost up to row 2000: ")


def test_unusable_files_are_told_before_reading(tmp_path):
    columns = ("input", "output")
    for name, content, why in [
        ("rows.csv", b"input,output\n", r"none of \.jsonl, "),
        ("rows.jsonl.gz", GOOD, "cannot read rows"),
        ("rows.parquet", GOOD, "cannot read rows"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileError, match=why):
            check_file(tmp_path / name, columns)
    with pytest.raises(FileError, match="No such file"):
        check_file(tmp_path / "absent.jsonl", columns)
    with pytest.raises(FileError, match="no column 'output'; it has input, answer"):
        check_file(parquet(tmp_path, input=["x"], answer=["y"]), columns)
    check_file(write(tmp_path), columns)
