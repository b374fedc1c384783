"""An index file comes back as it was written, mapped; anything else is refused by name."""

import json
import mmap
from pathlib import Path

import numpy as np
import pytest
from draft_reference import make_index
from draft_strategies import documents
from hypothesis import given, settings

from tasc_draft import CorpusIndex, DraftError, IndexFileError, read_index, write_index
from tasc_draft.codec import FORMAT, MAGIC
from tasc_draft.index import ARRAYS

FIELDS = ("fingerprint", "vocab_size", "n_max", "p_min")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.tasc"
    write_index(make_index([[1, 2, 3], [1, 2, 4]], n_max=4, p_min=1), path)
    return path


def assert_same(one: CorpusIndex, other: CorpusIndex) -> None:
    assert [getattr(one, f) for f in FIELDS] == [getattr(other, f) for f in FIELDS]
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def header_of(path: Path) -> tuple[dict[str, object], int]:
    """The header and where it ends."""
    content = path.read_bytes()
    end = 16 + int.from_bytes(content[8:16], "little")
    return json.loads(content[16:end]), end


def write_header(path: Path, header: bytes) -> None:
    content, end = path.read_bytes(), header_of(path)[1]
    body = content[end + -end % 64 :]
    start = MAGIC + len(header).to_bytes(8, "little") + header
    path.write_bytes(start + bytes(-len(start) % 64) + body)


@settings(deadline=None, max_examples=40)
@given(documents)
def test_an_index_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("round") / "index"
    index = make_index(documents, n_max=3, p_min=2)
    write_index(index, path)
    assert_same(read_index(path), index)
    assert [p.name for p in path.parent.iterdir()] == ["index"]


def test_an_index_of_no_documents_survives_the_file(tmp_path: Path) -> None:
    write_index(CorpusIndex.empty("f", 7), tmp_path / "index")
    assert_same(read_index(tmp_path / "index"), CorpusIndex.empty("f", 7))


def test_arrays_are_memory_mapped_read_only_and_aligned(path: Path) -> None:
    index = read_index(path)
    for name in ARRAYS:
        array = getattr(index, name)
        assert array.dtype == np.int32
        assert not array.flags.writeable
        assert array.ctypes.data % 64 == 0
        owner = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner, mmap.mmap)


def test_a_file_that_is_overwritten_leaves_the_old_mapping_alone(path: Path) -> None:
    old = read_index(path)
    before = old.tokens.copy()
    write_index(make_index([[4, 4, 4, 4]]), path)
    np.testing.assert_array_equal(old.tokens, before)
    assert read_index(path).nodes != old.nodes


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    content = path.read_bytes()
    assert len(content) > 500
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(IndexFileError, match=path.name):
            read_index(path)


def test_a_file_with_something_behind_it_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(IndexFileError, match="its header says"):
        read_index(path)


def test_every_flipped_bit_of_header_and_arrays_is_refused(path: Path) -> None:
    content, end = path.read_bytes(), header_of(path)[1]
    padding = range(end, end + -end % 64)
    for place in set(range(len(content))) - set(padding):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(IndexFileError, match=path.name):
            read_index(path)


@pytest.mark.parametrize("content", [b"", b"PAR1" * 100, b"{}", MAGIC.lower() + bytes(200)])
def test_a_foreign_file_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(IndexFileError, match="no draft index; `tasc build-index`"):
        read_index(path)


def test_another_format_is_refused_with_both_numbers(path: Path) -> None:
    write_header(path, json.dumps({"format": FORMAT + 1, "new": "fields"}).encode())
    with pytest.raises(IndexFileError, match=f"format {FORMAT + 1}.*reads format {FORMAT}.*again"):
        read_index(path)


@pytest.mark.parametrize("header", [b"", b"not json", b"\xff\xfe", b"[]", b"7", b'{"n_max": 6}'])
def test_an_unreadable_header_is_refused(path: Path, header: bytes) -> None:
    write_header(path, header)
    with pytest.raises(IndexFileError, match="damaged header"):
        read_index(path)


@pytest.mark.parametrize("field", [*FIELDS, "arrays", "bytes", "sha256"])
def test_a_header_without_one_of_its_fields_is_refused(path: Path, field: str) -> None:
    header, _ = header_of(path)
    del header[field]
    write_header(path, json.dumps(header).encode())
    with pytest.raises(IndexFileError, match="fetch it again"):
        read_index(path)


def test_index_file_errors_are_draft_errors() -> None:
    assert issubclass(IndexFileError, DraftError)
    assert issubclass(DraftError, ValueError)
