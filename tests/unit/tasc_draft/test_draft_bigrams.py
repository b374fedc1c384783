"""A bigram table comes back from its file as it was, and what is not whole is refused."""

import zipfile
from collections.abc import Callable
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


def changed(name: str, place: tuple[int, int], value: float) -> Callable[[], BigramTable]:
    def table() -> BigramTable:
        array = getattr(make(), name).copy()
        assert array[place] != value
        array[place] = value
        return replace(make(), **{name: array})

    return table


TAMPERINGS = {
    "a token below zero": changed("tokens", (2, 1), -1),
    "a token outside the vocabulary": changed("tokens", (2, 1), VOCAB),
    "the same token twice": changed("tokens", (1, 0), int(make().tokens[1, 2])),
    "a probability above one": changed("logp", (4, 0), 0.1),
    "a probability that is none": changed("logp", (4, 2), np.nan),
    "the likelier one later": changed("logp", (3, 2), -0.001),
    "another vocabulary": lambda: replace(make(), vocab_size=VOCAB + 1),
    "fewer probabilities": lambda: replace(make(), logp=make().logp[:, :-1].copy()),
    "no continuations": lambda: replace(
        make(), tokens=make().tokens[:, :0].copy(), logp=make().logp[:, :0].copy()
    ),
    "flat arrays": lambda: replace(
        make(), tokens=make().tokens[:, 0].copy(), logp=make().logp[:, 0].copy()
    ),
    "wide ids": lambda: replace(make(), tokens=make().tokens.astype(np.int64)),
    "wide probabilities": lambda: replace(make(), logp=make().logp.astype(np.float64)),
}


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    table, path = make(), tmp_path / "table.npz"
    write_bigrams(table, path)
    found = read_bigrams(path, FINGERPRINT)
    assert (found.model, found.fingerprint, found.vocab_size) == ("some model", FINGERPRINT, VOCAB)
    for left, right in zip(found.view, table.view, strict=True):
        assert left.dtype == right.dtype
        assert not left.flags.writeable
        np.testing.assert_array_equal(left, right)
    assert found.nbytes == VOCAB * TOP * 8
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_table_gives_the_same_bytes(tmp_path: Path) -> None:
    write_bigrams(make(), tmp_path / "one")
    write_bigrams(make(), tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_a_tampered_table_is_refused_when_checked_and_when_read(
    tampering: Callable[[], BigramTable], tmp_path: Path
) -> None:
    make().check_integrity()
    with refused(DraftError, "bigram table"):
        tampering().check_integrity()
    write_bigrams(tampering(), tmp_path / "table")
    with refused(DraftError, "bigram table", "table:"):
        read_bigrams(tmp_path / "table", FINGERPRINT)


def test_a_table_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_bigrams(make(), tmp_path / "table")
    with refused(DraftError, "f" * 32, "0" * 32):
        read_bigrams(tmp_path / "table", "0" * 32)


def test_any_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_bigrams(make(), path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with refused(DraftError, "model-bigrams"):
            read_bigrams(path, FINGERPRINT)


ANOTHER = pytest.mark.slow("another bit of each byte")


@pytest.mark.parametrize("flips", [0x01, pytest.param(0x20, marks=ANOTHER)])
def test_a_damaged_file_is_refused_or_still_holds_the_table(flips: int, tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_bigrams(make(), path)
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


@pytest.mark.parametrize("missing", ["model", "fingerprint", "vocab_size", "tokens", "logp"])
def test_a_file_without_one_of_the_parts_is_no_table(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_bigrams(make(), path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "other", "w") as other:
        for name in set(source.namelist()) - {f"{missing}.npy"}:
            other.writestr(name, source.read(name))
    with pytest.raises(DraftError, match=missing):
        read_bigrams(tmp_path / "other", FINGERPRINT)


@pytest.mark.parametrize(
    "part",
    [
        {"model": np.array(1)},
        {"vocab_size": np.array([5])},
        {"fingerprint": np.array(1.5)},
        {"tokens": np.array([{"a": 1}], object)},  # pickled
    ],
)
def test_a_part_of_another_kind_is_refused(part: dict[str, np.ndarray], tmp_path: Path) -> None:
    fields = {"model": "m", "fingerprint": FINGERPRINT, "vocab_size": VOCAB}
    arrays = make().arrays
    with (tmp_path / "table").open("wb") as file:
        np.savez(file, **(fields | arrays | part))
    with refused(DraftError, "model-bigrams"):
        read_bigrams(tmp_path / "table", FINGERPRINT)


@pytest.mark.parametrize(
    "content", [b"", b"no archive at all", b"{}", b"\x93NUMPY\x01\x00", b"\x80\x04N."]
)
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(content)
    with refused(DraftError, "model-bigrams"):
        read_bigrams(tmp_path / "table", FINGERPRINT)


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_folder_or_a_missing_file_is_refused(name: str, tmp_path: Path) -> None:
    with refused(DraftError, "model-bigrams"):
        read_bigrams(tmp_path / name, FINGERPRINT)


def test_a_single_array_is_no_table(tmp_path: Path) -> None:
    with (tmp_path / "table").open("wb") as file:
        np.save(file, make().tokens)
    with refused(DraftError, "model-bigrams"):
        read_bigrams(tmp_path / "table", FINGERPRINT)
