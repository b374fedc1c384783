"""Tests that tables of rows hold what the rows of `read_corpus` hold, for any content of files."""

import gzip
import json
import random
from codecs import BOM_UTF8
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_runtime.data import rows as rows_module
from tasc_runtime.data.rows import BadRow, Fields, read_rows, read_tables

GOOD = [
    b'{"id": "r", "input": "x", "output": "y"}',
    b'{"id": "r", "input": "", "output": "caf\xc3\xa9 \\u00e9 \\ud83d\\ude00"}',
    b'{"input": "a\\u0000b\\n", "output": " y "}',
    b'{"output": "{}", "input": "}{", "id": "}\\n{"}',
    b'{"id": 7, "input": "x", "output": "y", "ok": true, "n": -0, "more": "z"}',
    b'{"id": null, "input": "x", "output": "y"}',
]
ODD = [
    b"",
    b" \t",
    b"\x0b",
    b"{}",
    b"[",
    b"}",
    b"{",
    b"[" * 100_000,
    b'{"input": "x", "output": "y", "deep": ' + b"[" * 100_000,
    b'{"input": "x", "output": "y", "deep": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"input": "x", "output": "y"}{"input": "x", "output": "y"}',
    b'{"input": "x", "output": "y"},{"input": "x", "output": "y"}',
    b'{"input": "x", "output": "y"}{"input": "x",',
    b'"output": "y"}',
    b'{"input": "x", "output": "y"}\x00',
    b'{"input": "x", "output": "y"}\x00}',
    b'{"input": "x\x00", "output": "y"}',
    b'{"input": "\xff", "output": "y"}',
    b'{"input": "\xed\xa0\x80", "output": "y"}',
    b'{"input": "x", "output": "y", "more": "\xff"}',
    b'{"input": "\\ud800", "output": "y"}',
    b'{"input": "\\udc00", "output": "y"}',
    b'{"input": "x", "output": "y", "more": "\\udc00"}',
    b'{"input": "x", "output": "y", "input": "z"}',
    b'{"input": "x", "output": "y", "n": Inf}',
    b'{"input": "x", "output": "y", "n": NaN}',
    b'{"input": "x", "output": "y", "n": ' + b"1" * 5000 + b"}",
    b'{"input": "x", "output": "y", "n": 007}',
    b'{"input": "x", "output": "y", "n": 99999999999999999999}',
    b'{"input": "x", "output": "y",}',
    b'{"input": "x", "output": "y"} // no',
    b'\x0c{"input": "x", "output": "y"}',
    b'{"input": 1, "output": [2]}',
    b'{"input": null, "output": "y"}',
    b'{"input": "x", "output": null}',
    b'{"input": "x"}',
    b'{"input": "x", "output": ""}',
    b'{"input": "x", "output": "\xe2\x80\x83\\u001c"}',
    b'{"id": "", "input": "x", "output": "y"}',
    b'{"id": true, "input": "x", "output": "y"}',
    b'{"id": 1.5, "input": "x", "output": "y"}',
    b'{"id": 2.0, "input": "x", "output": "y"}',
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
    BOM_UTF8 + b'{"input": "x", "output": "y"}',
    b'{"input": "long ' + b"x" * 300 + b'", "output": "y"}' + b" " * 100,
]


def expected(paths, fields=Fields(), **limits):
    rows = list(chain.from_iterable(read_rows(path, fields, **limits) for path in paths))
    bad = [row for row in rows if isinstance(row, BadRow)]
    return [(row.input, row.output) for row in rows if not isinstance(row, BadRow)], bad


def found(paths, fields=Fields()):
    bad, read = [], []
    tables = list(read_tables(paths, fields, bad.append, read.append))
    assert all(table.num_rows for table in tables)
    rows = [(row["input"], row["output"]) for table in tables for row in table.to_pylist()]
    assert sum(read) == len(rows)
    return rows, bad


@pytest.fixture
def only_tables(monkeypatch):
    """Makes rows that are read one by one fail the test."""

    def read_singly(path, fields):
        return lambda record: pytest.fail(f"{record} was read by itself")

    monkeypatch.setattr(rows_module, "_row_reader", read_singly)


@settings(max_examples=400, deadline=None)
@given(
    lines=st.lists(st.sampled_from([*GOOD * 4, *ODD]), max_size=12),
    end=st.sampled_from([b"\n", b"\r\n", b"\n\n", b" \n"]),
    last=st.sampled_from([b"", b"\n"]),
    block=st.sampled_from([1, 50, 200, 1 << 20]),
    most=st.sampled_from([45, 333, 1 << 20]),
    packed=st.booleans(),
)
def test_tables_of_any_lines_have_the_rows_of_the_lines(
    tmp_path_factory, lines, end, last, block, most, packed
):
    path = tmp_path_factory.mktemp("lines") / ("rows.jsonl.gz" if packed else "rows.jsonl")
    content = GOOD[0] + b"\n" + end.join(lines) + last
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_BLOCK_BYTES", block)
        patch.setattr(rows_module, "MAX_ROW_BYTES", most)
        assert found([path]) == expected([path], max_row_bytes=most)


@pytest.mark.parametrize("line", [*GOOD, *ODD])
def test_an_odd_line_among_many_rows_is_read_as_by_itself(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([*GOOD[:1] * 50, line, *GOOD[:1] * 50]))
    assert found([path]) == expected([path])
    assert found([path], Fields("output", "input", "more")) == expected(
        [path], Fields("output", "input", "more")
    )


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_lines_with_changed_bytes_are_read_alike(tmp_path_factory, seed):
    rng = random.Random(seed)
    content = bytearray(b"\n".join(rng.choices(GOOD, k=4)) + b"\n")
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(2)] = rng.choice(
            [b"\n", b"\r", b'"', b"\\", b"{", b"}", b",", b":", b" ", b"\x00", b"0", b"\xc3", b"["]
        )
    path = tmp_path_factory.mktemp("changed") / "rows.jsonl"
    path.write_bytes(b'{"input": "x", "output": "y"}\n' + content)
    assert found([path]) == expected([path])


@pytest.mark.parametrize("cut", [300, 5_000, 30_000, -9, -1])
def test_lines_before_the_damage_of_a_gzip_file_are_read(tmp_path, cut):
    rng = random.Random(cut)
    rows = [{"input": f"{rng.random()}", "output": "y"} for _ in range(5_000)]
    content = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content[:cut])
    whole, bad = expected([path])
    assert found([path]) == (whole, bad)
    assert len(bad) == 1
    path.write_bytes(content[: len(content) // 2] + b"\xff" * 50 + content[len(content) // 2 :])
    assert found([path]) == expected([path])


def test_plain_rows_of_several_files_are_read_in_tables_only(tmp_path, only_tables):
    rows = [
        {"id": n, "input": f"in {n}", "output": f"out {n}", "hard": n % 2 > 0} for n in range(9)
    ]
    lines, spaced = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    lines.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    spaced.write_bytes(gzip.compress(lines.read_bytes().replace(b"\n", b"\r\n") + b"\n \n"))
    pairs = [(row["input"], row["output"]) for row in rows]
    assert found([lines, spaced]) == (pairs * 2, [])


@pytest.mark.parametrize(
    "columns",
    [
        {"input": ["a", "b"], "output": ["c", "d"]},
        {"input": ["a", ""], "output": ["c", " \u2003"]},
        {"input": ["a", None], "output": ["c", "d"]},
        {"input": ["a", "b"], "output": ["c", None]},
        {"input": [1, 2], "output": [["c"], ["d"]]},
        {"input": ["a", "b\x00\n"], "output": ["c", "x" * (1 << 20)]},
        {"input": ["a", "b"], "output": ["c", "d"], "id": [1, None]},
        {"input": ["a", "b"], "output": ["c", "d"], "id": [1.0, 1.5]},
        {"input": ["a", "b"], "output": ["c", "d"], "id": ["k", ""]},
        {"input": ["a", "b"], "output": ["c", "d"], "id": [True, None]},
        {"input": pa.array(["a", "b"]).dictionary_encode(), "output": ["c", "d"]},
        {"input": pa.array(["a", "b"], pa.large_string()), "output": ["c", "d"]},
        {"input": pa.array([b"a", b"\xff"]).view(pa.string()), "output": ["c", "d"]},
        {"input": ["a"], "messages": [[{"role": "assistant", "content": "y"}]]},
        {"input": pa.array([], pa.string()), "output": pa.array([], pa.string())},
    ],
)
def test_tables_of_parquet_columns_have_the_rows_of_the_file(tmp_path, columns):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=1)
    assert found([path]) == expected([path])


def test_memory_for_lines_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        for n in range(120):
            file.write(json.dumps({"input": f"{n} " * 60_000, "output": "y"}).encode() + b"\n")
    sizes = [table.nbytes for table in read_tables([path], Fields())]
    assert sum(sizes) > 20 << 20
    assert max(sizes) < 4 << 20
