"""Tests that a ranked vocabulary has the requested tokens and EOS, and that damage is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_engine.drafting.neural.ranking import Ranking
from tasc_engine.errors import RankingError

ABOUT = {"fingerprint": "f" * 32, "origin": "target", "rows": 2, "corpus_rows": 40}


def ranking(*counts: int, eos_id: int = 0) -> Ranking:
    return Ranking.of(np.asarray(counts, np.int64), eos_id=eos_id, **ABOUT)


@given(
    counts=st.lists(st.integers(0, 9), min_size=2, max_size=30),
    k=st.integers(1, 30),
    p=st.floats(0.01, 1),
    least=st.integers(1, 10),
)
def test_ranking_choices_equal_the_reference(counts, k, p, least):
    counts[0] += 1
    found = ranking(*counts)
    seen = sorted((-count, id_) for id_, count in enumerate(counts) if count)
    assert found.ids.tolist() == [id_ for _, id_ in seen]
    assert found.counts.tolist() == [-count for count, _ in seen]
    k = min(k, len(counts))
    by_rank = found.top(k).tolist()
    assert len(by_rank) == min(k, len(seen))
    assert 0 in by_rank
    assert set(by_rank) - {0} <= {id_ for _, id_ in seen[:k]}
    frequent = {id_ for id_, count in enumerate(counts) if count >= least}
    assert set(found.at_least(least).tolist()) == frequent | {0}
    enough = next(
        n for n in range(1, len(seen) + 1)
        if -sum(c for c, _ in seen[:n]) >= p * sum(counts) - 1e-9
    )  # fmt: skip
    assert set(found.top_p(p).tolist()) == {id_ for _, id_ in seen[:enough]} | {0}


def test_ranking_choice_keeps_counts_and_totals():
    found = ranking(1, 5, 0, 3, 1)
    kept = found.only(found.top(2))
    assert (kept.ids.tolist(), kept.counts.tolist()) == ([1, 0], [5, 1])
    assert (kept.total, kept.coverage) == (10, 0.6)
    assert (kept.top(5).tolist(), kept.top_p(1.0).tolist()) == ([1, 0], [1, 0])


def test_invalid_ranking_choice_is_refused():
    shares = ("top_p", 0.0), ("top_p", 1.5), ("top_p", float("nan"))
    for choice, value in (("top", 0), ("top", 6), *shares, ("at_least", 0)):
        with pytest.raises(RankingError):
            getattr(ranking(1, 5, 0, 3, 1), choice)(value)


def test_ranking_survives_its_file(tmp_path):
    path, written = tmp_path / "ranked.npz", ranking(1, 5, 0, 3, 1)
    written.save(path)
    read = Ranking.load(path, ABOUT["fingerprint"])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    for name in ("ids", "counts"):
        assert np.array_equal(getattr(read, name), getattr(written, name))
        assert getattr(read, name).dtype == getattr(written, name).dtype
    for name in (*ABOUT, "vocab_size", "eos_id", "total"):
        assert getattr(read, name) == getattr(written, name)


def test_damaged_ranking_file_is_refused(tmp_path):
    path, other = tmp_path / "ranked.npz", tmp_path / "other.npz"
    ranking(1, 5).save(path)
    with refused(RankingError, "abc", ABOUT["fingerprint"]):
        Ranking.load(path, "abc")
    whole = path.read_bytes()
    path.unlink()
    np.savez(other, ids=np.arange(3))
    broken = b"", b"nothing", whole[:-40], whole[:60] + b"x" + whole[61:], other.read_bytes()
    for content in (None, *broken):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(RankingError):
            Ranking.load(path, ABOUT["fingerprint"])


def test_inconsistent_ranking_is_refused():
    ids = ({"ids": np.asarray(ids, np.int32)} for ids in ([1, 1], [1, 9], [1]))
    counts = ({"counts": np.asarray(counts)} for counts in ([1, 5], [5, 0], [500, 1]))
    for changed in (*ids, *counts, {"eos_id": 3}, {"origin": "elsewhere"}):
        with pytest.raises(RankingError):
            Ranking(**{**vars(ranking(1, 5, 0)), **changed})
