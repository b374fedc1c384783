"""Tests that every line of a file gives a row or a reason, for any content."""

import gzip
import hashlib
import json
import tracemalloc
from codecs import BOM_UTF8
from contextlib import suppress
from datetime import date

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_runtime.data.local_corpus import rows_of
from tasc_runtime.data.rows import BadRow, Fields, check_file, read_corpus, read_rows, row_writer
from tasc_runtime.errors import FileError
from tasc_store import CorpusRow

GOOD = b'{"id": "r", "input": "x", "output": "y"}'


def read(path, **settings):
    return list(read_rows(path, Fields(), **settings))


def read_corpus_and_bad(paths):
    bad = []
    return [*read_corpus(paths, Fields(), bad.append), *bad]


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
        (b'{"input": null, "output": "y"}', "field 'input' is null"),
        (b'{"input": "x", "output": null}', "field 'output' is null"),
        (b'{"input": NaN, "output": "y"}', "field 'input' is neither text nor JSON"),
        (b'{"input": "x", "output": ""}', "empty output"),
        (b'{"input": "x", "output": " \\n"}', "empty output"),
        (b'{"id": 1.5, "input": "x", "output": "y"}', "field 'id' is neither"),
        (b'{"id": true, "input": "x", "output": "y"}', "field 'id' is neither"),
        (b'{"id": 1e16, "input": "x", "output": "y"}', "field 'id' is neither"),
        (b'{"id": NaN, "input": "x", "output": "y"}', "field 'id' is neither"),
        (b'{"messages": []}', "field 'messages' is not a list of messages"),
        (b'{"messages": "x"}', "field 'messages' is not a list of messages"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "roles user; a row is "),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "roles assistant; a row is "),
        (
            b'{"messages": [{"role": "user", "content": null}, {"role": "assistant"}]}',
            "the content of message 0 is a string or a list",
        ),
        (b'{"id": "", "input": "x", "output": "y"}', "needs a key"),
        (b'{"id": "s", "input": "\\ud800", "output": "y"}', "lone surrogate"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_bad_line_is_named_and_the_surrounding_lines_are_read(tmp_path, name, line, reason):
    path = write(tmp_path, GOOD, line, GOOD, name=name)
    first, bad, last = read(path)
    assert first == last == CorpusRow("r", "x", "y")
    assert (bad.file, bad.line) == (str(path), 2)
    assert bad.reason.startswith(reason) or reason in bad.reason
    assert bad.text == line.decode(errors="replace")[:200]


def test_line_over_the_limit_is_refused_and_not_held_in_memory(tmp_path):
    path = write(tmp_path, GOOD, b"x" * (len(GOOD) + 1), b"x" * 300_000, GOOD)
    good, longer, longest, last = read(path, max_row_bytes=len(GOOD))
    assert good == last == CorpusRow("r", "x", "y")
    assert longer.reason == longest.reason == f"longer than {len(GOOD)} bytes"
    assert (longer.line, longest.line, longest.text) == (2, 3, "x" * (len(GOOD) + 1))
    path = write(tmp_path, b"x" * 30_000_000, GOOD, name="rows.jsonl.gz")
    tracemalloc.start()
    bad, good = read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (bad.reason, good) == (f"longer than {1 << 20} bytes", CorpusRow("r", "x", "y"))
    assert peak < 5_000_000


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_byte_order_mark_before_any_line_is_skipped(tmp_path, name):
    # Also before a later line: `cat` joins files that have a mark each.
    path = write(tmp_path, BOM_UTF8 + GOOD, GOOD, BOM_UTF8 + GOOD, BOM_UTF8, name=name)
    check_file(path, ("input", "output"))
    assert read(path) == [CorpusRow("r", "x", "y")] * 3
    # The mark does not count towards the bound of a line, and does not hide a longer one.
    assert read(path, max_row_bytes=len(GOOD)) == [CorpusRow("r", "x", "y")] * 3
    path = write(tmp_path, BOM_UTF8 + GOOD + b" ", GOOD, name=name)
    bad, good = read(path, max_row_bytes=len(GOOD))
    assert (bad.line, bad.reason, good.key) == (1, f"longer than {len(GOOD)} bytes", "r")


ARRAY = json.dumps([json.loads(GOOD)] * 2, indent=1).encode()
OTHER_KINDS = [
    *((GOOD.decode().encode(name), name.upper()) for name in ("utf-16-le", "utf-16-be", "utf-32")),
    ((GOOD + b"\r\n").decode().encode("utf-16"), "UTF-16"),
    *((mark + ARRAY, "JSON array") for mark in (b"", b"\n ", BOM_UTF8)),
    (b"[" + GOOD + b"]", "JSON array"),
    (json.dumps(json.loads(GOOD), indent=1).encode(), "several lines"),
    (b"PK\x03\x04", "ZIP"),
    (b"PAR1", "Parquet"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
@pytest.mark.parametrize(("content", "expected"), OTHER_KINDS, ids=range(len(OTHER_KINDS)))
def test_file_of_another_format_has_one_error_that_names_the_format(
    tmp_path, name, content, expected
):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with refused(FileError, str(path), expected):
        check_file(path)
    with refused(FileError, str(path), expected):
        list(read_corpus([path], Fields()))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_written_rows_are_read_back_and_appear_all_or_none(tmp_path, name):
    path = tmp_path / name
    schema = pa.schema([("id", pa.string()), ("input", pa.string()), ("output", pa.string())])
    rows = [{"id": f"r{n}", "input": "ü", "output": str(n)} for n in range(3)]
    with suppress(OSError), row_writer(path, schema) as write_row:
        write_row(rows[0])
        raise OSError("the disk is full")
    assert list(tmp_path.iterdir()) == []
    with row_writer(path, schema) as write_row:
        for row in rows:
            write_row(row)
        assert not path.exists()
    assert read(path) == [CorpusRow(row["id"], row["input"], row["output"]) for row in rows]
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_wide_rows_are_written_in_small_groups(tmp_path):
    wide = pa.array([b"x" * (16 << 20)])
    with row_writer(tmp_path / "rows.parquet", pa.schema([("wide", pa.binary())])) as write_row:
        for value in (wide, None, wide, wide, wide, wide):
            write_row({"wide": value})
    groups = pq.ParquetFile(tmp_path / "rows.parquet").metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [5, 1]


def test_row_keys_are_ids_or_file_hash_and_line(tmp_path):
    anonymous = b'{"input": "", "output": "y"}'
    path = write(tmp_path, b'{"id": 7, "input": "", "output": "y"}', b"", anonymous, anonymous)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert [row.key for row in read(path)] == ["7", f"{digest}:3", f"{digest}:4"]
    path = write(tmp_path, b'{"n": "k", "question": "q", "answer": "a", "input": 1}')
    assert list(read_rows(path, Fields("question", "answer", "n"))) == [CorpusRow("k", "q", "a")]
    path.write_bytes(GOOD + b"\r\n\r\n" + GOOD)  # the last line needs no line end
    assert read(path) == [CorpusRow("r", "x", "y")] * 2


@pytest.mark.parametrize(
    ("damage", "least", "expected"),
    [
        *((lambda content, cut=cut: content[:-cut], 1000, "") for cut in (1, 9, 1000)),
        (lambda content: content[:-6] + bytes([content[-6] ^ 1]) + content[-5:], 9000, "CRC"),
    ],
)
def test_damaged_gzip_gives_its_intact_lines_and_the_reason(tmp_path, damage, least, expected):
    lines = (b'{"input": "%d", "output": "y"}' % n for n in range(9000))
    path = write(tmp_path, *lines, name="r.jsonl.gz")
    path.write_bytes(damage(path.read_bytes()))
    *rows, bad = read(path)
    assert len(rows) >= least
    assert [row.input for row in rows] == [str(n) for n in range(len(rows))]
    assert bad == BadRow(str(path), len(rows) + 1, bad.reason, "")
    assert bad.reason.startswith("damaged gzip, the rest is lost: ")
    assert expected in bad.reason
    check_file(path)


@pytest.mark.parametrize("cut", [1, 9])
def test_truncated_small_gzip_gives_its_lines(tmp_path, cut):
    path = write(tmp_path, GOOD, name="r.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-cut])
    row, bad = read_corpus_and_bad([path])
    assert row == CorpusRow("r", "x", "y")
    assert bad.reason.startswith("damaged gzip")


@given(st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=8))
def test_invalid_bytes_never_stop_reading(tmp_path_factory, lines):
    path = write(tmp_path_factory.mktemp("any"), *lines, GOOD)
    found = read(path)
    assert found[-1] == CorpusRow("r", "x", "y")
    assert len(found) == 1 + sum(bool(line.removeprefix(BOM_UTF8).strip()) for line in lines)


TURNS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
PARTS = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]


@pytest.mark.parametrize(
    ("row", "input_", "output"),
    [
        ({"input": 42, "output": 0.5}, "42", "0.5"),
        (
            {"input": "x", "output": {"label": "naïve", "n": [1]}},
            "x",
            '{"label": "naïve", "n": [1]}',
        ),
        ({"input": ["a"], "output": True}, '["a"]', "true"),
        ({"messages": TURNS}, "x", "y"),
        ({"messages": PARTS}, "x", "y"),
        ({"messages": [{"role": "system", "content": "s"}, *TURNS]}, "x", "y"),
        ({"messages": TURNS[:1], "output": "z"}, "x", "z"),
        ({"input": "z", "output": "y", "messages": TURNS}, "z", "y"),
        ({"input": TURNS[:1], "output": TURNS[1:]}, "x", "y"),
    ],
)
def test_other_values_become_json_and_messages_become_a_row(tmp_path, row, input_, output):
    path = write(tmp_path, json.dumps(row).encode())
    assert [(found.input, found.output) for found in read(path)] == [(input_, output)]
    path = parquet(tmp_path, **{name: [value] for name, value in row.items()})
    check_file(path, ("input", "output"))
    assert [(found.input, found.output) for found in read(path)] == [(input_, output)]
    assert [(found.input, found.output) for found in rows_of([row])] == [(input_, output)]
    if row.keys() == {"input", "output"}:
        for table in (pd.DataFrame([row]), [(row["input"], row["output"])]):
            assert [(found.input, found.output) for found in rows_of(table)] == [(input_, output)]


def test_conversations_of_several_turns_and_values_without_json_are_refused(tmp_path):
    (bad,) = read(write(tmp_path, json.dumps({"messages": TURNS * 2}).encode()))
    assert "user, assistant, user, assistant" in bad.reason
    (bad,) = read(parquet(tmp_path, input=["x"], output=[date(2026, 1, 1)]))
    assert "field 'output'" in bad.reason
    assert [(row.input, row.output) for row in rows_of([TURNS, TURNS])] == [("x", "y")] * 2
    table = pa.table({"messages": [TURNS]})
    for same in (table, table.to_pandas()):
        assert [(row.input, row.output) for row in rows_of(same)] == [("x", "y")]


def test_messages_are_not_read_if_a_table_has_input_and_output(tmp_path):
    long = [{"role": "user", "content": "z" * 500}]
    path = parquet(tmp_path, id=["r"], input=["x"], output=["y"], messages=[long])
    assert read(path, max_row_bytes=100) == [CorpusRow("r", "x", "y")]


def test_each_kind_of_conversion_is_logged_once_per_file(tmp_path, caplog):
    system = {"role": "system", "content": "s"}
    rows = [{"input": "x", "output": 1}, {"messages": [system, *TURNS]}]
    path = write(tmp_path, *(json.dumps(row).encode() for row in rows * 3))
    assert len(read(path)) == 6
    as_json, left_out = caplog.messages
    assert all(str(path) in expected for expected in caplog.messages)
    assert "'output'" in as_json
    assert "--system-prompt" in left_out


def test_ids_that_pandas_made_floats_are_keys(tmp_path):
    path = tmp_path / "rows.parquet"
    pd.DataFrame({"id": [7, None, -1], "input": "x", "output": "y"}).to_parquet(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert [row.key for row in read(path)] == ["7", f"{digest}:2", "-1"]
    assert [
        row.key for row in read(write(tmp_path, b'{"id": 7.0, "input": "", "output": "y"}'))
    ] == ["7"]


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
    assert (null.line, null.reason) == (3, "field 'input' is null, not a text")
    assert (empty.line, empty.reason, len(empty.text)) == (4, "empty output", 200)
    assert json.loads(null.text) == {"id": "c", "input": None, "output": "y"}
    text = pa.StringArray.from_buffers(
        3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"x\xffz")
    )
    path = parquet(tmp_path, id=[1, 2, 3], input=text, output=["y", "y", "y" * 100])
    good, no_text, long = read(path, max_row_bytes=100)
    assert good == CorpusRow("1", "x", "y")
    assert (no_text.line, no_text.reason) == (2, "not UTF-8 in column 'input' at byte 0")
    assert long.line == 3
    assert all(part in long.reason for part in ("100 bytes", str(len(long.text)), "'output'"))
    path = parquet(tmp_path, input=pa.array([253402300800, 0], pa.timestamp("s")), output=["y"] * 2)
    assert [row.line for row in read(path) if "'input'" in row.reason] == [1, 2]


def test_damaged_parquet_row_group_is_reported_and_other_groups_are_read(tmp_path):
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
    assert (outputs, bad.line) == ([*range(1000), *range(2000, 2500)], 1001)
    assert bad.reason.startswith("damaged Parquet, lost up to row 2000: ")


def test_unusable_files_are_refused_before_reading(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"input,output\n")
    (tmp_path / "rows.jsonl.gz").write_bytes(GOOD)
    (tmp_path / "broken.parquet").write_bytes(GOOD)
    other = parquet(tmp_path, input=["x"], answer=["y"])
    for path, named in [
        (tmp_path / "rows.csv", ".jsonl.gz"),
        (tmp_path / "rows.jsonl.gz", "rows.jsonl.gz"),
        (tmp_path / "broken.parquet", "broken.parquet"),
        (tmp_path / "absent.jsonl", "absent.jsonl"),
        (other, "output"),
    ]:
        with refused(FileError, named):
            check_file(path, ("input", "output"))
    check_file(write(tmp_path), ("input", "output"))
