"""Tests that an index file is read unchanged as a memory map, and damage is refused by name."""

import dataclasses
import json
import mmap
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import draft_cases as dc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import refused
from tasc_draft import (
    DraftError,
    DraftIndex,
    DraftSettings,
    IndexFileError,
    IndexFormatError,
    read_index,
    write_index,
)
from tasc_draft.index.draft_index import FORMAT, MAGIC
from tasc_draft.index.weights import Weights

FIXTURE = [HealthCheck.function_scoped_fixture]
PARTS = [field.name for field in dataclasses.fields(DraftIndex)]


def whole_index() -> DraftIndex:
    """Returns an index with every part and with settings."""
    values = Weights.initial().values.copy()
    values[::7] = -1.5
    return dataclasses.replace(
        dc.full_index(),
        canonical=np.arange(dc.VOCAB + 1, dtype=np.int32)[::-1].copy(),
        weights=Weights(values),
        settings=DraftSettings(min_prob=0.4, sources=("corpus", "aligned")),
    )


def arrays_of(part: Any) -> dict[str, np.ndarray]:
    found = {"": part} | (vars(part) if dataclasses.is_dataclass(part) else {})
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def assert_same(one: DraftIndex, other: DraftIndex) -> None:
    for name in PARTS:
        left, right = getattr(one, name), getattr(other, name)
        assert type(left) is type(right) or isinstance(left, np.ndarray)
        arrays = arrays_of(left)
        assert arrays.keys() == arrays_of(right).keys()
        for key, array in arrays.items():
            twin = arrays_of(right)[key]
            assert (array.dtype, array.shape) == (twin.dtype, twin.shape), (name, key)
            np.testing.assert_array_equal(array, twin, err_msg=f"{name}.{key}")
        if dataclasses.is_dataclass(left):
            for field in dataclasses.fields(left):
                if field.name not in arrays:
                    assert getattr(left, field.name) == getattr(right, field.name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.tasc"
    write_index(dc.make_index([[1, 2, 3], [1, 2, 4]], [[5, 6], [5, 7]]), path)
    return path


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header and its end."""
    content = path.read_bytes()
    end = 16 + int.from_bytes(content[8:16], "little")
    return json.loads(content[16:end]), end


def write_header(path: Path, header: bytes) -> None:
    content, end = path.read_bytes(), header_of(path)[1]
    body = content[end + -end % 64 :]
    start = MAGIC + len(header).to_bytes(8, "little") + header
    path.write_bytes(start + bytes(-len(start) % 64) + body)


@settings(deadline=None, max_examples=40, suppress_health_check=FIXTURE)
@given(st.just(DraftIndex.empty("f", 7)) | dc.outputs.map(lambda o: dc.make_index(o, o[::-1])))
def test_index_survives_its_file(tmp_path: Path, index: DraftIndex) -> None:
    index.check_integrity()
    write_index(index, tmp_path / "index")
    assert_same(read_index(tmp_path / "index"), index)
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_index_parts_of_a_file_are_mapped_read_only_and_aligned(tmp_path: Path) -> None:
    index = whole_index()
    assert all(getattr(index, name) is not None for name in PARTS)
    write_index(index, tmp_path / "index")
    read = read_index(tmp_path / "index")
    assert_same(read, index)
    read.check_integrity()
    arrays = [array for name in PARTS for array in arrays_of(getattr(read, name)).values()]
    assert len(arrays) > 20
    assert read.nbytes == index.nbytes == sum(array.nbytes for array in arrays)
    assert not any(array.flags.writeable for array in arrays_of(index.aligned).values())
    for array in arrays:
        assert not array.flags.writeable
        assert array.ctypes.data % 64 == 0
        owner: Any = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner, mmap.mmap)


def test_drafts_from_file_and_memory_are_equal(tmp_path: Path) -> None:
    write_index(whole_index(), tmp_path / "index")
    drafted = []
    for index in (whole_index(), read_index(tmp_path / "index")):
        rows = [(prompt, output[:1]) for prompt, output in zip(*dc.tagged_rows(5, 3), strict=True)]
        proposer = dc.started(index, DraftSettings(min_prob=0.0), *rows)
        drafts = proposer.propose(dc.ids(range(3)), dc.ids([8] * 3))
        drafted.append([getattr(drafts, f.name).tolist() for f in dataclasses.fields(drafts)])
    assert drafted[0] == drafted[1]
    assert len(drafted[0][0]) > 10


def test_overwriting_a_file_keeps_the_old_mapping(path: Path) -> None:
    old = read_index(path)
    before = old.corpus.text.copy()
    write_index(dc.make_index([[4, 4, 4, 4]]), path)
    np.testing.assert_array_equal(old.corpus.text, before)
    assert read_index(path).corpus.tokens != old.corpus.tokens


def test_cut_or_foreign_index_file_is_refused(path: Path) -> None:
    content = path.read_bytes()
    assert len(content) > 500
    foreign = (b"PAR1" * 100, b"{}", MAGIC.lower() + bytes(200))
    cut = (content[:length] for length in range(len(content)))
    for damaged in (*cut, content + b"\0", *foreign):
        path.write_bytes(damaged)
        with pytest.raises(IndexFileError):
            read_index(path)


def mutated(content: bytes, header: int, rng: Random) -> bytes:
    """Returns content with bytes changed, inserted, removed, or cut or added at the end."""
    kind = rng.randrange(6)
    at = rng.randrange(header if rng.random() < 0.6 else len(content))
    some = rng.randbytes(rng.choice([1, 1, 1, 2, 5, 40]))
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content + some
    if kind == 2:
        return content[:at] + some + content[at:]
    if kind == 3:
        return content[:at] + content[at + len(some) :]
    if kind == 4:  # such as a header is made of, so that it may still be read
        some = rng.choice([b"0", b"9", b" ", b"-", b'"', b"[", b"e", b".", b"null", b"1e999"])
    return content[:at] + some + content[at + len(some) :]


def test_mutated_index_file_is_refused_or_equal(path: Path, everything: bool, seed: int) -> None:
    content, index = path.read_bytes(), read_index(path)
    header, rng, seen = header_of(path)[1], Random(seed), Counter[str]()
    other = path.with_name("mutated")
    for _ in range(10_000 if everything else 2_000):
        other.unlink(missing_ok=True)
        other.write_bytes(mutated(content, header, rng))
        try:
            assert_same(read_index(other), index)
            seen["same"] += 1
        except IndexFileError as error:
            seen[str(error).removeprefix(f"{other} ")[:18]] += 1
    assert seen["same"] > 10  # in the padding; about one in thirty
    assert len(seen) >= 5, seen


@pytest.mark.parametrize("version", [FORMAT + 1, 1])
def test_other_format_version_is_refused(path: Path, version: int) -> None:
    write_header(path, json.dumps({"format": version, "new": "fields"}).encode())
    with pytest.raises(IndexFormatError):
        read_index(path)


@pytest.mark.parametrize(
    "wrong",
    [
        *(b"", b"not json", b"\xff\xfe", b"[]", b"7", b'{"bytes": 6}'),
        *("parts", "arrays", "bytes", "sha256"),
        {"offset": 1 << 62, "shape": [4], "dtype": "<i4"},
        {"offset": 0, "shape": [10**30], "dtype": "<i4"},
        {"offset": 0, "shape": [1 << 32, 1 << 32], "dtype": "<i4"},
        {"offset": 0, "shape": [-3, -4], "dtype": "<i4"},
        {"offset": 0, "shape": [1], "dtype": "O"},
        {"offset": 0, "shape": [1], "dtype": "S4"},
        {"offset": 0.5, "shape": [1], "dtype": "<i4"},
        {"offset": 0, "shape": "4", "dtype": "<i4"},
        {"offset": 0, "shape": [4]},
        [],
    ],
)
def test_wrong_index_header_is_refused(path: Path, wrong: Any) -> None:
    """Bytes, the name of a field, or the stated place of an array is wrong."""
    header, _ = header_of(path)
    if isinstance(wrong, str):
        del header[wrong]
    else:
        header["arrays"]["corpus.text"] = wrong
    write_header(path, wrong if isinstance(wrong, bytes) else json.dumps(header).encode())
    with pytest.raises(IndexFileError):
        read_index(path)


@pytest.mark.parametrize(
    ("output", "prompts", "starts", "named"),
    [
        (1, [[1], [2]], None, ["2 prompts", "1 outputs"]),
        (dc.VOCAB, [[0]], None, ["12"]),
        (0, [[dc.VOCAB]], None, ["12"]),
        (0, [[-1]], None, ["-1"]),
        (1, [[1]], dc.STARTS[:-1], ["word_starts"]),
    ],
)
def test_inconsistent_rows_and_word_starts_are_refused(output, prompts, starts, named):
    with refused(DraftError, *named):
        dc.make_index([[output]], prompts, starts)
