"""Tokens of answers are counted exactly, and rows come out of their file in their own order."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_draft.tokens import Tokens
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.drafter.rank_vocabulary import (
    Choice,
    RankJob,
    TokenCounts,
    add_tables,
    count_file,
    count_rows,
    open_tokens,
)
from tasc_jobs.errors import JobError, UsageError
from tasc_jobs.index.tokenise import TokenFile
from tasc_runtime.errors import FileError

WORDS = st.sampled_from(["turn on", "the light", " naïve", "日本", "intent: on", "NOUN VERB"])
ROWS = st.lists(st.tuples(st.sampled_from(["served:t:", "row:"]), st.text() | WORDS), max_size=30)


def table(rows: list[tuple[str, str]]) -> pa.Table:
    keys, outputs = [key for key, _ in rows], [output for _, output in rows]
    return pa.table({"key": pa.array(keys, pa.string()), "output": pa.array(outputs, pa.string())})


def plain(texts: list[str]) -> Counter:
    return Counter(id_ for ids in open_tokens(MODEL).encode_outputs(texts) for id_ in ids)


@given(rows=ROWS, cut=st.integers(0, 30), keys=st.sampled_from(["", "served:t:"]))
def test_parts_sum_up_to_the_whole(rows, cut, keys):
    counted = [count_rows(MODEL, keys, table(part)) for part in (rows[:cut], rows[cut:])]
    total = TokenCounts(open_tokens(MODEL).vocab_size)
    add_tables(total, pa.concat_tables(counted))
    kept = [output for key, output in rows if key.startswith(keys)]
    assert (total.read, total.rows) == (len(rows), len(kept))
    expected = plain(kept)
    assert {int(i): int(total.counts[i]) for i in np.flatnonzero(total.counts)} == dict(expected)
    eos_id = open_tokens(MODEL).eos_id
    ended = total.with_ends(eos_id)
    assert ended.sum() == sum(expected.values()) + len(kept)
    assert ended[eos_id] == expected[eos_id] + len(kept)


def test_a_file_is_counted_without_its_bad_lines(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"text": "turn on"}\nno\n{"text": ""}\n' + '{"text": "the light"}\n' * 600)
    told = []
    total = count_file(path, "text", MODEL, lambda *to: told.append(to))
    assert (total.read, total.rows) == (603, 601)
    assert total.counts.sum() == sum(plain(["turn on", *["the light"] * 600]).values())
    assert told == [("count", 500, None), ("count", 603, None)]
    with refused(FileError, "nowhere.jsonl"):
        count_file(tmp_path / "nowhere.jsonl", "text", MODEL, lambda *to: None)


def test_two_choices_drafts_without_a_file_and_an_end_that_is_none_are_refused():
    with refused(ValueError, "eos_token_id"):
        TokenCounts(7).with_ends(7)
    with refused(UsageError, "--top-k"):
        Choice(top_k=3, top_p=0.5)
    with refused(UsageError, "--answers"):
        RankJob("t", "draft")


TOKENS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=12)


def write(path, rows, batches):
    with TokenFile(path) as file:
        for batch in batches:
            tokens = Tokens.of([rows[i] for i in batch])
            file.append(batch, tokens.ids, tokens.lengths)
    return file


@st.composite
def rows_in_batches(draw):
    rows = draw(TOKENS)
    shuffled = draw(st.permutations(range(len(rows))))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    borders = [0, *cuts, len(rows)]
    return rows, [shuffled[a:b] for a, b in pairwise(borders)]


@given(case=rows_in_batches())
def test_rows_come_out_in_their_own_order(case, tmp_path_factory):
    rows, batches = case
    folder = tmp_path_factory.mktemp("tokens")
    found = write(folder / "ids", rows, batches).tokens(len(rows))
    assert (found.ids.dtype, found.lengths.dtype) == ("int32", "int64")
    assert found.lengths.tolist() == [len(row) for row in rows]
    assert found.ids.tolist() == [i for row in rows for i in row]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("batches", [[[0, 2]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], []])
def test_a_row_that_is_lost_or_doubled_is_an_error(tmp_path, batches):
    file = write(tmp_path / "ids", [[1], [2], [3], [4]], batches)
    with refused(JobError, "3 rows"):
        file.tokens(3)
