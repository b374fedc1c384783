"""Tests the file in which an index job keeps the tokens of rows."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_draft.drafts import Tokens
from tasc_jobs.errors import JobError
from tasc_jobs.index.tokenise import TokenFile

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
def test_token_file_returns_rows_in_order(case, tmp_path_factory):
    rows, batches = case
    folder = tmp_path_factory.mktemp("tokens")
    found = write(folder / "ids", rows, batches).tokens(len(rows))
    assert (found.ids.dtype, found.lengths.dtype) == ("int32", "int64")
    assert found.lengths.tolist() == [len(row) for row in rows]
    assert found.ids.tolist() == [i for row in rows for i in row]
    assert len(list(folder.iterdir())) == 1


def test_token_ids_are_mapped_from_the_file_and_read_only(tmp_path):
    found = write(tmp_path / "ids", [[1, 2], [3]], [[0, 1]]).tokens(2)
    assert not found.ids.flags.owndata
    assert not found.ids.flags.writeable


@pytest.mark.parametrize("batches", [[[0, 2]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], []])
def test_lost_or_repeated_row_is_an_error(tmp_path, batches):
    file = write(tmp_path / "ids", [[1], [2], [3], [4]], batches)
    with refused(JobError, "3 rows"):
        file.tokens(3)
