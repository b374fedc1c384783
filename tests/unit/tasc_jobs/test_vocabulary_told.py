"""What `tasc rank-vocabulary` says of a ranking, and of one that has less than was asked for."""

import numpy as np
import pytest

from tasc_engine.drafting.neural.ranking import Ranking
from tasc_jobs.cli.rank_vocabulary import in_words
from tasc_store import Artifact

SEEN = 1_500


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    """Of 2,000 tokens, of which three in four were seen."""
    counts = np.arange(2_000, 0, -1)
    counts[SEEN:] = 0
    return Ranking.of(counts, eos_id=0, fingerprint="f", origin="raw", rows=9)


@pytest.mark.parametrize(("top_k", "kept"), [(None, SEEN), (SEEN, SEEN), (40, 40)])
def test_as_many_as_were_asked_for_need_no_word(
    ranking: Ranking, top_k: int | None, kept: int
) -> None:
    said = in_words(artifact(), ranking.only(ranking.top(top_k or SEEN)), top_k)
    assert f"is current: {kept:,} of 2,000 tokens are " in said
    assert said.endswith("9 answers (raw)")


def test_fewer_than_were_asked_for_are_said_to_be_all_there_were(ranking: Ranking) -> None:
    said = in_words(artifact(), ranking.only(ranking.top(1_501)), 1_501)
    assert "is current: 1,500 of 2,000 tokens are 100.00% of " in said
    assert said.endswith("9 answers (raw), and fewer than the 1,501 asked for were seen")


def artifact() -> Artifact:
    return Artifact("t", "f", 3, 1, "0", 1, 9, 0.0)
