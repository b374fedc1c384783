"""Tests counts of n-grams against plain Python: each count, length and partition, on any text."""

import hashlib
import json
import random
import sys
import zlib
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import write_rows
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.statistics import ngrams as ngrams_module
from tasc_jobs.statistics.corpus_counts import TableSum, count_rows, split
from tasc_jobs.statistics.ngrams import NgramHistogram, NgramTotal, Units
from tasc_jobs.statistics.task_statistics import file_statistics, statistics_of
from tasc_jobs.words import SIDES, split_words, with_previous_words
from tasc_runtime.data import rows as rows_module
from tasc_runtime.data.rows import Fields, read_corpus
from tasc_text import TaskTokenizer
from tasc_text.template import last_words

SPACES = [c for c in map(chr, range(0x3001)) if c.isspace()]
TEXT = st.text(st.sampled_from([*"aab\x00é日\U0001f600\ufeff\u200b", *SPACES]), max_size=12)
ROWS = st.lists(st.tuples(TEXT, TEXT), max_size=9)
DATA = Path(str(files("tasc_jobs.demo"))) / "data"


def counted(rows, units):
    """Counts n-grams and lengths by side and unit, in the plain way."""
    tokenizer = units.tokenizer and TaskTokenizer.from_folder(MODEL)
    found = {}
    for side, texts in zip(SIDES, zip(*rows, strict=True), strict=True):
        for unit, n in units.orders.items():
            ngrams, lengths, before = Counter(), Counter(), []
            for text in texts:
                symbols = {
                    "words": text.split,
                    "texts": lambda t=text: [
                        hashlib.blake2b(t.encode(), digest_size=16).hexdigest()
                    ],
                    "tokens": lambda t=text: map(str, tokenizer.encode_outputs([t])[0]),
                }[unit]()
                running = [*before, *(symbols := list(symbols))]
                ngrams.update(
                    " ".join(running[i : i + n]) for i in range(max(len(running) - n + 1, 0))
                )
                lengths[len(symbols)] += 1
                if unit == "words" and units.across_rows:
                    before = running[max(len(running) - n + 1, 0) :]
            found[side, unit] = ngrams, lengths
    return found


def contents(table, units):
    """The n-grams with partitions, and the lengths, of a table of counts."""
    found = {(side, unit): (Counter(), Counter()) for side in SIDES for unit in units.orders}
    for row in table.to_pylist():
        ngrams, lengths = list(found.values())[row["total"]]
        if row["ngram"] is None:
            assert row["partition"] is None
            lengths[row["length"]] += row["count"]
        else:
            assert row["length"] is None
            assert row["partition"] == zlib.crc32(row["ngram"].encode()) % 7
            ngrams[row["ngram"]] += row["count"]
    return found


def table_of(rows, units):
    table = pa.table(list(zip(*rows, strict=True)), schema=schema())
    before = dict.fromkeys(SIDES, "")
    return with_previous_words(table, before, n)[0] if (n := units.words_before) else table


def schema():
    return pa.schema([(side, pa.string()) for side in SIDES])


def assert_counted(rows, units):
    """Compares the counts of rows, in one table and in many, with the plain ones."""
    plain = counted(rows, units)
    table = table_of(rows, units)
    assert contents(count_rows(units, 7, table), units) == plain
    parts = [count_rows(units, 7, table.slice(at, 2)) for at in range(0, len(rows), 2)]
    joined = pa.concat_tables(parts)  # as Ray does, with a length in several rows
    assert contents(joined, units) == plain
    whole = TableSum(units)
    whole.add(joined)
    histograms = {
        key: NgramHistogram(Counter(ngrams.values()), lengths)
        for key, (ngrams, lengths) in plain.items()
    }
    assert (whole.rows, whole.histograms()) == (len(rows), histograms)
    lengths, *by_partition = zip(*(split(part, 7) for part in parts), strict=True)
    for partition, tables in enumerate(by_partition):
        total = TableSum(units)
        for part in tables:
            total.add(part)
        for key, histogram in total.histograms().items():
            own = [c for n, c in plain[key][0].items() if zlib.crc32(n.encode()) % 7 == partition]
            assert histogram == NgramHistogram(Counter(own), {})
    only = TableSum(units)
    for part in lengths:
        only.add(part)
    assert only.rows == len(rows)


@settings(max_examples=40, deadline=None)
@given(ROWS.filter(bool), st.integers(1, 4), st.booleans())
def test_counts_and_partitions_of_any_texts_equal_plain_ones(rows, n, across):
    assert_counted(rows, Units(n, across_rows=across))


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_counts_of_extreme_rows_equal_plain_ones(n, across):
    rng = random.Random(n)
    long = " ".join(f"w{rng.randrange(300)}" for _ in range(60_000))
    rows = [
        (long, "label"),
        ("", " "),
        ("x" * 300_000, "one"),
        *[("same words again", "same words again")] * 50,
        ("\x00 \x00\n\x00", "a\nb\tc\x1cd\u2028e"),
        ("end", long[:1000]),
    ]
    assert_counted(rows, Units(n, across_rows=across))


@pytest.mark.parametrize("across", [False, True])
def test_counts_of_tokens_and_shipped_rows_equal_plain_ones(across):
    rows = list(read_corpus([DATA / "massive_en.test.jsonl.gz"], Fields()))[:60]
    assert_counted(
        [(row.input, row.output) for row in rows], Units.of(2, MODEL, across_rows=across)
    )


@settings(max_examples=40, deadline=None)
@given(ROWS.filter(bool), st.integers(1, 4), st.booleans(), st.integers(1, 60))
def test_statistics_of_files_equal_plain_ones_however_they_are_read(
    tmp_path_factory, rows, n, across, block
):
    rows = [(i, f"{o}.") for i, o in rows]
    units = Units(n, across_rows=across)
    plain = {
        key: NgramHistogram(Counter(ngrams.values()), lengths)
        for key, (ngrams, lengths) in counted(rows, units).items()
    }
    folder = tmp_path_factory.mktemp("rows")
    lines = write_rows(folder / "rows.jsonl", ({"input": i, "output": o} for i, o in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_BLOCK_BYTES", block)
        patch.setattr(ngrams_module, "_UNSUMMED", block)
        assert file_statistics([lines], units) == statistics_of(plain, units)
    lines.write_text(
        lines.read_text() + "no row\n" + json.dumps({"input": 1, "output": "."}) + "\n"
    )
    with_odd = file_statistics([lines], units)
    assert with_odd == statistics_of(
        {
            key: NgramHistogram(Counter(ngrams.values()), lengths)
            for key, (ngrams, lengths) in counted([*rows, ("1", ".")], units).items()
        },
        units,
        1,
    )


def test_white_space_is_that_of_python():
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    words = split_words(pa.array([f"a{c}b{c}" for c in characters], pa.large_string()))
    assert words.value_lengths().to_numpy().tolist() == [1 + c.isspace() for c in characters]
    spaced = [f"{c}a{c}{c}b{d}" for c in SPACES for d in SPACES]
    assert split_words(pa.array(spaced, pa.large_string())).to_pylist() == [["a", "b"]] * len(
        spaced
    )
    assert split_words(pa.array(["", *SPACES], pa.large_string())).flatten().to_pylist() == []


@given(ROWS, st.integers(1, 4), TEXT)
def test_words_before_each_row_are_the_last_ones(rows, most, first):
    before = dict.fromkeys(SIDES, last_words(first, most))
    columns = zip(*rows, strict=True) if rows else [[], []]
    table, after = with_previous_words(pa.table([*columns], schema=schema()), before, most)
    for side in SIDES:
        running = before[side]
        for row in table.to_pylist():
            assert row[f"previous_{side}"] == running
            running = last_words(f"{running} {row[side]}", most)
        assert after[side] == running


def test_repeated_ngrams_are_summed_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(ngrams_module, "_UNSUMMED", 100)
    total, sizes = NgramTotal(), []
    words = pa.array([f"w{n}" for n in range(60)], pa.large_string())
    for _ in range(500):
        total.add_ngrams(words, pa.array([1] * 60))
        sizes.append(sum(len(part) for part in total._counts))
    assert max(sizes) <= 100 + 2 * 60
    assert set(total.ngrams()["count"].to_pylist()) == {500}
    assert total.histogram().frequencies == {500: 60}
