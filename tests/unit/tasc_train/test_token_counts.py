"""Tests the counts of the tokens of answers, and what is kept of them."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_engine.drafting.neural.ranking import Ranking
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.errors import UsageError
from tasc_runtime.errors import FileError
from tasc_store import Artifact
from tasc_train.cli.rank_vocabulary import in_words
from tasc_train.drafter.rank_vocabulary import (
    Choice,
    RankJob,
    TokenCounts,
    add_tables,
    count_file,
    count_rows,
    open_tokens,
)

WORDS = st.sampled_from(["turn on", "the light", " naïve", "日本", "intent: on", "NOUN VERB"])
ROWS = st.lists(st.tuples(st.sampled_from(["served:t:", "row:"]), st.text() | WORDS), max_size=30)


def table(rows: list[tuple[str, str]]) -> pa.Table:
    keys, outputs = [key for key, _ in rows], [output for _, output in rows]
    return pa.table({"key": pa.array(keys, pa.string()), "output": pa.array(outputs, pa.string())})


def plain(texts: list[str]) -> Counter:
    return Counter(id_ for ids in open_tokens(MODEL).encode_outputs(texts) for id_ in ids)


@given(rows=ROWS, cut=st.integers(0, 30), keys=st.sampled_from(["", "served:t:"]))
def test_counts_of_parts_sum_to_counts_of_all_rows(rows, cut, keys):
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


def test_lines_without_an_answer_are_skipped(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"text": "turn on"}\nno\n{"text": ""}\n' + '{"text": "the light"}\n' * 600)
    calls = []
    total = count_file(path, "text", MODEL, lambda *to: calls.append(to))
    assert (total.read, total.rows) == (603, 601)
    assert total.counts.sum() == sum(plain(["turn on", *["the light"] * 600]).values())
    assert calls == [("count", 500, None), ("count", 603, None)]
    with refused(FileError, "nowhere.jsonl"):
        count_file(tmp_path / "nowhere.jsonl", "text", MODEL, lambda *to: None)


def test_impossible_choices_and_eos_tokens_are_refused():
    with refused(ValueError, "eos_token_id"):
        TokenCounts(7).with_ends(7)
    with refused(UsageError, "--top-k"):
        Choice(top_k=3, top_p=0.5)
    with refused(UsageError, "--answers"):
        RankJob("t", "draft")


@pytest.mark.parametrize(("top_k", "kept"), [(None, 1500), (1500, 1500), (40, 40), (1501, 1500)])
def test_ranking_with_fewer_tokens_than_top_k_is_noted(top_k, kept):
    counts = np.arange(2000, 0, -1)
    counts[1500:] = 0
    ranking = Ranking.of(counts, eos_id=0, fingerprint="f", origin="raw", rows=9)
    artifact = Artifact("t", "f", 3, 1, "0", 1, 9, 0.0)
    text = in_words(artifact, ranking.only(ranking.top(top_k or 1500)), top_k)
    assert f"{kept:,} of 2,000" in text
    assert ("1,501" in text) == (top_k == 1501)
