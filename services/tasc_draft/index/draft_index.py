"""A task's draft index: its parts, their build in one process, and their file.

Layout of the file: 8 bytes magic, 8 bytes header length (little-endian), the JSON header, padding
to 64 bytes, then each array at a 64-byte boundary. The header holds the format version, the scalar
fields of each part, the place of each array, and the SHA-256 of these entries and of the arrays.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import flat, within
from tasc_draft.drafts import DraftError, IndexFileError, IndexFormatError, Int32, Int64, Tokens
from tasc_draft.files import whole_file
from tasc_draft.index.aligned import AlignedTable, build_aligned
from tasc_draft.index.bigrams import BigramTable
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.corpus_build import Documents, distinct, index_documents, require_ids
from tasc_draft.index.inputs import InputIndex, build_inputs
from tasc_draft.index.weights import Weights
from tasc_draft.labels import LabelTrie
from tasc_draft.settings import DraftSettings


@dataclass(frozen=True)
class DraftIndex:
    """The parts of a task's draft index. All parts but the corpus are optional.

    Attributes:
        corpus: All n-grams of the outputs.
        inputs: The prompts, to search for similar prompts.
        aligned: Next tokens by aligned word, for tasks whose answers follow the prompt word by
            word.
        word_starts: ``bool[vocab_size + 1]`` whether a token begins a word; goes with ``aligned``.
        canonical: ``int32[vocab_size + 1]`` the id of each token's text without a leading space.
            By canonical ids, tokens of prompt and answer match regardless of a leading space.
        bigrams: The target's own continuations of each token.
        weights: Weights learnt on held-out rows; None for the initial weights.
        settings: Settings chosen on held-out rows; None for the settings of the task's record.
    """

    corpus: CorpusIndex
    inputs: InputIndex | None = None
    aligned: AlignedTable | None = None
    word_starts: NDArray[np.bool_] | None = None
    canonical: Int32 | None = None
    bigrams: BigramTable | None = None
    weights: Weights | None = None
    settings: DraftSettings | None = None

    @classmethod
    def empty(cls, fingerprint: str, vocab_size: int) -> "DraftIndex":
        """An index without documents. Drafts then come from prompts and answers only."""
        return cls(CorpusIndex.empty(fingerprint, vocab_size))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer that made the ids."""
        return self.corpus.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def nbytes(self) -> int:
        found = (*self._parts, self.word_starts, self.canonical)
        return sum(each.nbytes for each in found if each is not None)

    @property
    def _parts(self) -> list[CorpusIndex | InputIndex | AlignedTable | BigramTable | Weights]:
        parts = (self.corpus, self.inputs, self.aligned, self.bigrams, self.weights)
        return [part for part in parts if part is not None]

    def rows_by_label(self, trie: LabelTrie, label: Int32) -> Int64:
        """``int64[labels]``, the number of rows whose output begins with each label and its end.

        Of several labels in an output, the longest counts. All are 0 in an index without prompts,
        since the rows of an output are known only from the rows of the prompts.

        Args:
            trie: The tokens of the labels, with their ends.
            label: ``int32[nodes]``, the label that ends at a node; -1 for none.
        """
        found = trie.labels_at(self.corpus.text, self.corpus.offsets[:-1] + np.int64(1), label)
        labels = found[self.inputs.documents if self.inputs else np.zeros(0, np.int32)]
        return np.bincount(labels[labels >= 0], minlength=int(label.max()) + 1)

    def check_integrity(self) -> None:
        """Raise DraftError unless compiled code stays in the arrays and the parts fit together."""
        for part in self._parts:
            part.check_integrity()
        ids, fits = self.vocab_size + 1, True
        if self.inputs is not None:
            fits &= within(self.inputs.documents, len(self.corpus.offsets) - 1)
        if self.aligned is not None:
            starts = self.word_starts
            fits &= starts is not None and flat(np.bool_, starts) and len(starts) == ids
            fits &= self.aligned.vocab_size == self.vocab_size
        if self.canonical is not None:
            fits &= flat(np.int32, self.canonical) and len(self.canonical) == ids
            fits &= within(self.canonical, ids)
        if self.bigrams is not None:
            fits &= self.bigrams.fingerprint == self.fingerprint
            fits &= self.bigrams.vocab_size == self.vocab_size
        if not fits:
            raise DraftError("the parts of the index do not fit together; build the index again")


def build_index(
    outputs: Tokens,
    prompts: Tokens | None = None,
    *,
    fingerprint: str,
    vocab_size: int,
    eos_id: int,
    word_starts: NDArray[np.bool_] | None = None,
    canonical: Int32 | None = None,
    max_bytes: int | None = None,
) -> DraftIndex:
    """Index a task's outputs and, if given, its prompts.

    Args:
        outputs: Token ids of each row's output, without end-of-sequence.
        prompts: Token ids of the same rows' rendered prompts, as the target will see them.
        fingerprint: The fingerprint of the tokenizer that made the ids.
        eos_id: Appended to each output.
        word_starts: ``bool[vocab_size + 1]`` whether a token begins a word; None for an index
            without an aligned table.
        canonical: ``int32[vocab_size + 1]`` the id of each token's text without a leading space.
        max_bytes: Maximum bytes of the corpus part. Outputs with the lowest expected gain are left
            out.

    Raises:
        DraftError: An id is outside the vocabulary, the numbers of prompts and outputs differ, or a
            size is out of range.
    """
    documents = distinct(outputs, vocab_size=vocab_size, eos_id=eos_id)
    corpus, kept = index_documents(
        documents, fingerprint=fingerprint, vocab_size=vocab_size, max_bytes=max_bytes
    )
    return with_prompts(
        corpus, kept, outputs, prompts, eos_id=eos_id, word_starts=word_starts, canonical=canonical
    )


def with_prompts(
    corpus: CorpusIndex,
    documents: Documents,
    outputs: Tokens,
    prompts: Tokens | None,
    *,
    eos_id: int,
    word_starts: NDArray[np.bool_] | None,
    canonical: Int32 | None = None,
) -> DraftIndex:
    """Add the parts that are built from prompts to a corpus index; see `build_index`."""
    if prompts is None or not len(prompts):
        return DraftIndex(corpus, canonical=canonical)
    if not len(prompts) == len(outputs) == len(documents.rows):
        raise DraftError(
            f"there are {len(prompts)} prompts for {len(outputs)} outputs; give one per output"
        )
    require_ids(prompts, corpus.vocab_size)
    if word_starts is not None and len(word_starts) != corpus.vocab_size + 1:
        raise DraftError(
            f"word_starts has {len(word_starts)} entries, but a vocabulary of "
            f"{corpus.vocab_size} needs {corpus.vocab_size + 1}; take them from the tokenizer"
        )
    held = np.flatnonzero(documents.rows >= 0)
    if len(held) < len(prompts):
        prompts, outputs = prompts.take(held), outputs.take(held)
    inputs = build_inputs(prompts, outputs, documents.rows[held])
    aligned = word_starts is not None and build_aligned(
        prompts, outputs, word_starts=word_starts, vocab_size=corpus.vocab_size, eos_id=eos_id
    )
    if not aligned:
        return DraftIndex(corpus, inputs, canonical=canonical)
    return DraftIndex(corpus, inputs, aligned, word_starts, canonical)


INDEX_FILE = "index.tasc"  # name in a folder that was exported or saved
MAGIC = b"TASCNGRM"
FORMAT = 3
_ALIGN = 64
_PREFIX = len(MAGIC) + 8
_MAX_HEADER = 1 << 20
HEAD_BYTES = _PREFIX + _MAX_HEADER
_DTYPES = ("<i4", "<u4", "<f4", "|u1")
_PARTS: dict[str, Any] = {
    "corpus": CorpusIndex,
    "inputs": InputIndex,
    "aligned": AlignedTable,
    "bigrams": BigramTable,
    "weights": Weights,
    "settings": DraftSettings,
}


def write_index(index: DraftIndex, path: str | Path) -> None:
    """Write an index file. The file appears at ``path`` once it is complete."""
    parts, arrays = _split(index)
    layout, size = _layout(arrays)
    header = {"format": FORMAT, "parts": parts, "arrays": layout, "bytes": size}
    header["sha256"] = _checksum(header, arrays)
    encoded = json.dumps(header, sort_keys=True).encode()
    with whole_file(Path(path), sync=False) as file:
        file.write(MAGIC + len(encoded).to_bytes(8, "little") + encoded)
        _pad(file)
        for array in arrays.values():
            file.write(array.data)
            _pad(file)


def read_index(path: str | Path, *, mapped: bool = True) -> DraftIndex:
    """Map an index file read-only and verify its checksum.

    `DraftIndex.check_integrity` checks the contents of the arrays.

    Args:
        mapped: Whether the file is mapped, so that processes share its memory; it must then not be
            overwritten in place. Otherwise, it is copied into memory.

    Raises:
        IndexFileError: The file is not a draft index, is truncated or damaged, or has another
            format version.
    """
    path = Path(path)
    with path.open("rb") as file:
        header, begin = _read_header(file, path)
    size, promised = path.stat().st_size - begin, header.get("bytes")
    if size != promised:
        raise IndexFileError(
            f"{path} has {size} bytes of arrays, but its header says {promised}; fetch it again"
        )
    body: Any = np.zeros(0, np.uint8)
    if size and mapped:
        body = np.memmap(path, np.uint8, "r", offset=begin)
    elif size:
        body = np.fromfile(path, np.uint8, offset=begin)
    try:
        arrays = {name: _view(body, place) for name, place in header["arrays"].items()}
        if _checksum(header, arrays) != header.get("sha256"):
            raise IndexFileError(f"{path} is damaged: its checksum does not match; fetch it again")
        return _join(header["parts"], arrays)
    except IndexFileError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IndexFileError(f"{path} has a damaged header; fetch it again") from error


def settings_in(head: bytes, name: str) -> DraftSettings | None:
    """Read an index's settings from its first HEAD_BYTES bytes; None if it has no settings.

    Args:
        name: The name of the index, for messages.

    Raises:
        IndexFileError: See `read_index`.
    """
    header, _ = _read_header(BytesIO(head), name)
    try:
        found = header["parts"].get("settings")
        return None if found is None else DraftSettings(**found)
    except (KeyError, TypeError, AttributeError) as error:
        raise IndexFileError(f"{name} has a damaged header; build the index again") from error


def _split(index: DraftIndex) -> tuple[dict[str, Any], dict[str, Any]]:
    """The scalar fields of each part, and all arrays by ``part.field``."""
    parts: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    if index.word_starts is not None:
        arrays["word_starts"] = index.word_starts.view(np.uint8)
    if index.canonical is not None:
        arrays["canonical"] = index.canonical
    for name in _PARTS:
        part = getattr(index, name)
        if part is None:
            continue
        parts[name] = {}
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, np.ndarray):
                little = value.dtype.newbyteorder("<")
                arrays[f"{name}.{field.name}"] = np.ascontiguousarray(value, little)
            else:
                parts[name][field.name] = value
    # The checksum takes arrays in the order of the header, whose keys are sorted.
    return parts, dict(sorted(arrays.items()))


def _join(parts: dict[str, Any], arrays: dict[str, Any]) -> DraftIndex:
    starts = arrays.pop("word_starts", None)
    made: dict[str, Any] = {"word_starts": None if starts is None else starts.view(bool)}
    made["canonical"] = arrays.pop("canonical", None)
    for name, numbers in parts.items():
        own = {key.partition(".")[2]: a for key, a in arrays.items() if key.startswith(f"{name}.")}
        made[name] = _PARTS[name](**numbers, **own)
    return DraftIndex(**made)


def _layout(arrays: dict[str, Any]) -> tuple[dict[str, Any], int]:
    layout: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        layout[name] = {"offset": offset, "shape": array.shape, "dtype": array.dtype.str}
        offset += array.nbytes + -array.nbytes % _ALIGN
    return layout, offset


def _checksum(header: dict[str, Any], arrays: dict[str, Any]) -> str:
    fields = {name: value for name, value in header.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for array in arrays.values():
        digest.update(array.data)
    return digest.hexdigest()


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % _ALIGN))


def _read_header(file: IO[bytes], path: Path | str) -> tuple[dict[str, Any], int]:
    prefix = file.read(_PREFIX)
    if prefix[: len(MAGIC)] != MAGIC:
        raise IndexFileError(f"{path} is not a draft index; `tasc build-index` makes one")
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    encoded = file.read(min(length, _MAX_HEADER))
    try:
        header = json.loads(encoded)
        version = header["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IndexFileError(f"{path} has a damaged header; fetch it again") from error
    if version != FORMAT:
        raise IndexFormatError(
            f"{path} has format {version}, but this program reads format {FORMAT}; "
            "build the index again with this version"
        )
    begin = _PREFIX + length
    return header, begin + -begin % _ALIGN


def _view(body: Any, place: dict[str, Any]) -> Any:
    """One array of a mapped file, not copied; raises ValueError if it is not in the file."""
    if place["dtype"] not in _DTYPES:
        raise ValueError(f"{place} has none of the types {_DTYPES}")
    kind, shape, begin = np.dtype(place["dtype"]), tuple(place["shape"]), place["offset"]
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if begin < 0 or size < 0 or begin + size > len(body):
        raise ValueError(f"{place} lies outside the {len(body)} bytes of arrays")
    return np.asarray(body[begin : begin + size]).view(kind).reshape(shape)
