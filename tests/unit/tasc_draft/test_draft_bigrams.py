"""Tests that a bigram table is unchanged after writing and reading, and damage is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support import refused
from tasc_draft import DraftError
from tasc_draft.index.bigrams import BigramTable, read_bigrams, write_bigrams

VOCAB, TOP = 5, 3
FINGERPRINT = "f" * 32


def make() -> BigramTable:
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(VOCAB)[:TOP] for _ in range(VOCAB)]).astype(np.int32)
    chances = np.sort(rng.dirichlet(np.ones(VOCAB), VOCAB))[:, : VOCAB - TOP - 1 : -1]
    logp = np.log(chances).astype(np.float32)
    return BigramTable("some model", FINGERPRINT, VOCAB, tokens, logp)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A written table."""
    write_bigrams(make(), tmp_path / "table")
    return tmp_path / "table"


def test_bigram_table_survives_its_file_only_for_its_tokenizer(path: Path) -> None:
    table, found = make(), read_bigrams(path, FINGERPRINT)
    assert (found.model, found.fingerprint, found.vocab_size) == ("some model", FINGERPRINT, VOCAB)
    for left, right in zip(found.view, table.view, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    assert list(path.parent.iterdir()) == [path]
    write_bigrams(table, path.with_name("other"))
    assert path.read_bytes() == path.with_name("other").read_bytes()
    with refused(DraftError, "f" * 32, "0" * 32):
        read_bigrams(path, "0" * 32)


def test_reading_an_inconsistent_bigram_table_is_refused(path: Path) -> None:
    """`test_draft_damage` covers the other inconsistencies of a table."""
    table = make()
    table.check_integrity()
    write_bigrams(replace(table, tokens=table.tokens[:, :0], logp=table.logp[:, :0]), path)
    with refused(DraftError, "bigram table", "table:"):
        read_bigrams(path, FINGERPRINT)


ANOTHER = pytest.mark.slow("another bit of each byte")


@pytest.mark.parametrize("flips", [0x01, pytest.param(0x20, marks=ANOTHER)])
def test_damaged_bigram_file_is_refused_or_unchanged(flips: int, path: Path) -> None:
    whole = path.read_bytes()
    refused = set()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flips]) + whole[place + 1 :])
        try:
            found = read_bigrams(path, FINGERPRINT)
        except DraftError:
            refused.add(place)
        else:
            assert all((a == b).all() for a, b in zip(found.view, make().view, strict=True))
    logp = whole.index(make().logp.tobytes())
    assert refused >= set(range(logp, logp + make().logp.nbytes))


FIELDS = {"model": "m", "fingerprint": FINGERPRINT, "vocab_size": VOCAB, **make().arrays}


@pytest.mark.parametrize(
    ("part", "named"),
    [
        *(({missing: None}, missing) for missing in FIELDS),
        ({"model": np.array(1)}, "model-bigrams"),
        ({"vocab_size": np.array([5])}, "model-bigrams"),
        ({"fingerprint": np.array(1.5)}, "model-bigrams"),
        ({"tokens": np.array([{"a": 1}], object)}, "model-bigrams"),  # pickled
    ],
)
def test_missing_or_wrong_bigram_arrays_are_refused(part, named, path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **{k: v for k, v in (FIELDS | part).items() if v is not None})
    with refused(DraftError, named):
        read_bigrams(path, FINGERPRINT)
