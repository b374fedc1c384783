"""Tests the counts of the tokens of answers, and what is kept of them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_engine.drafting.neural.ranking import Ranking
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.errors import UsageError
from tasc_store import Artifact
from tasc_text import TaskTokenizer
from tasc_train.cli.rank_vocabulary import in_words
from tasc_train.drafter.rank_vocabulary import (
    Choice,
    RankJob,
    TokenCounts,
    count_tokens,
)

WORDS = st.sampled_from(["turn on", "the light", " naïve", "日本", "intent: on", "NOUN VERB"])
TOKENIZER = TaskTokenizer.from_folder(MODEL)


def plain(texts: list[str]) -> Counter:
    return Counter(id_ for ids in TOKENIZER.encode_outputs(texts) for id_ in ids)


@given(answers=st.lists(st.text() | WORDS | st.none(), max_size=30))
def test_each_token_of_an_answer_and_its_end_are_counted(answers):
    found = count_tokens(TOKENIZER, answers)
    kept = [text for text in answers if text is not None]
    assert (found.read, found.rows) == (len(answers), len(kept))
    expected = plain(kept)
    assert {int(i): int(found.counts[i]) for i in np.flatnonzero(found.counts)} == dict(expected)
    ended = found.with_ends(TOKENIZER.eos_id)
    assert ended.sum() == sum(expected.values()) + len(kept)
    assert ended[TOKENIZER.eos_id] == expected[TOKENIZER.eos_id] + len(kept)


def test_answers_are_counted_in_batches():
    calls = []
    answers = ["turn on", None, None, *["the light"] * 600]
    found = count_tokens(TOKENIZER, answers, 603, lambda *to: calls.append(to))
    assert (found.read, found.rows) == (603, 601)
    assert found.counts.sum() == sum(plain(["turn on", *["the light"] * 600]).values())
    assert calls == [("count", 500, 603), ("count", 603, 603)]


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
