"""Draft indexes as versions in the store, their size, and the report of a build."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tasc_draft import DraftError, DraftIndex, DraftSettings, read_index
from tasc_draft.index.draft_index import HEAD_BYTES, INDEX_FILE, settings_in
from tasc_jobs.errors import JobError
from tasc_store import Artifact, ArtifactStore

_SOURCES = ("corpus", "inputs", "aligned", "bigrams", "weights")
KEPT_VERSIONS = 5


def current_index(store: ArtifactStore) -> DraftIndex | None:
    """Returns the current index; None if there is none.

    Raises:
        DraftError: The index is damaged, or has a format that this program does not read.
        StoreError: Redis fails.
    """
    artifact = store.current()
    if artifact is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tasc-index-") as folder:
        # The mapped file remains valid after it is unlinked.
        return _downloaded(store, artifact, Path(folder) / "index")


def export(store: ArtifactStore, artifact: Artifact, folder: Path) -> Path:
    """Writes a version into a folder as `INDEX_FILE`, once it is checked.

    Readers of the folder see either the file that was there before or the whole new file.

    Raises:
        JobError: The index is damaged, or has a format that this program does not read.
        StoreError: Redis fails.
        OSError: The folder cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=".tasc-index-", dir=folder) as beside:
        path = Path(beside) / INDEX_FILE
        try:
            _downloaded(store, artifact, path)
        except DraftError as error:
            raise JobError(
                f"version {artifact.version} of the index of {store.task} cannot be used "
                f"({error}); name another version, or build the index again"
            ) from error
        return path.replace(folder / INDEX_FILE)


def _downloaded(store: ArtifactStore, artifact: Artifact, path: Path) -> DraftIndex:
    store.download(artifact, path)
    index = read_index(path)
    index.check_integrity()
    return index


@dataclass(frozen=True)
class Tuned:
    """Draft settings that `tasc tune` chose, and the version of the index that has them."""

    index_version: int
    settings: DraftSettings


def tuned(store: ArtifactStore) -> Tuned | None:
    """Returns the draft settings that replace the record's; reads only the head of the index.

    Raises:
        DraftError: The index is damaged, or has a format that this program does not read.
        StoreError: Redis fails.
    """
    if (artifact := store.current()) is None:
        return None
    settings = settings_in(store.head(artifact, HEAD_BYTES), f"index version {artifact.version}")
    return None if settings is None else Tuned(artifact.version, settings)


def publish_file(
    store: ArtifactStore,
    write: Callable[[Path], None],
    corpus_rows: int | None,
    stored: Callable[[], None] = lambda: None,
    *,
    forecast: float | None = None,
    after: int | None = None,
    keep: int = KEPT_VERSIONS,
) -> Artifact:
    """Store a file as the next version, make it current and delete old versions.

    Args:
        write: Writes an index, or another artifact of the store, to a path.
        corpus_rows: The file was built from rows ``[0, corpus_rows)``; None if unknown.
        stored: Called when the version is complete in the store and not yet current.
        forecast: Tokens per step with this version on rows that it does not have.
        after: The version that must be current before the change, or 0 for none; None accepts any.
        keep: Number of the newest versions that are kept.

    Raises:
        IndexChanged: Another version has become current; the new one is stored nevertheless.
        StoreError: Redis fails.
    """
    with tempfile.TemporaryDirectory(prefix="tasc-publish-") as folder:
        path = Path(folder) / "file"
        write(path)
        artifact = store.publish(path, corpus_rows, forecast=forecast)
    stored()
    store.announce(artifact.version, after=after)
    store.prune(keep)
    return artifact


@dataclass(frozen=True)
class IndexSize:
    """Bytes of an index's arrays, and the number of output tokens, for ratios of the two.

    Attributes:
        output_tokens: Number of tokens of the outputs in the index. Repetitions count, and so do
            the mark SEP and the end-of-sequence of each output. Prompts do not count.
        corpus_bytes: Bytes of the corpus part, which has these outputs.
        bytes: Bytes of all parts, including prompts.
    """

    output_tokens: int
    corpus_bytes: int
    bytes: int

    @classmethod
    def of(cls, index: DraftIndex) -> "IndexSize":
        return cls(index.corpus.tokens, index.corpus.nbytes, index.nbytes)

    @property
    def corpus_bytes_per_token(self) -> float | None:
        """Bytes of the corpus part per token of outputs; None for an index without outputs."""
        return self._per_token(self.corpus_bytes)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of all parts per token of outputs; None for an index without outputs."""
        return self._per_token(self.bytes)

    def figures(self) -> dict[str, float | None]:
        """All figures as JSON values."""
        return {
            **asdict(self),
            "corpus_bytes_per_token": self.corpus_bytes_per_token,
            "bytes_per_token": self.bytes_per_token,
        }

    @property
    def in_words(self) -> str:
        corpus, whole = self.corpus_bytes_per_token, self.bytes_per_token
        if corpus is None or whole is None:
            return f"{self.bytes:,} bytes, without outputs"
        return (
            f"{self.output_tokens:,} tokens of outputs, SEP and EOS counted, at {corpus:.2f} bytes "
            f"a token in the corpus part and {whole:.2f} in the whole index"
        )

    def _per_token(self, size: int) -> float | None:
        return size / self.output_tokens if self.output_tokens else None


@dataclass(frozen=True)
class IndexReport:
    """One version of an index.

    Attributes:
        artifact: Record of the version in the store.
        seconds: Seconds of each stage of the build.
        max_bytes: Cap of the corpus part, if there was one.
    """

    artifact: Artifact
    index: DraftIndex
    seconds: Mapping[str, float]
    max_bytes: int | None = None

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of each part that is in the index."""
        parts = {name: getattr(self.index, name) for name in _SOURCES}
        return {name: part.nbytes for name, part in parts.items() if part is not None}

    @property
    def as_json(self) -> dict[str, object]:
        """The artifact's fields, counts, and the bytes per token of `IndexSize`.

        ``rows`` is the number of rows with outputs in the index: without a cap, all ``corpus_rows``
        of the artifact. ``grams`` is the number of distinct n-grams of the maximum length.
        """
        corpus, size = self.index.corpus, IndexSize.of(self.index)
        return {
            **asdict(self.artifact),
            "rows": corpus.documents,
            "distinct_outputs": len(corpus.offsets) - 1,
            "grams": len(corpus.order),
            "part_bytes": self.part_bytes,
            "seconds": {stage: round(spent, 3) for stage, spent in self.seconds.items()},
            "max_bytes": self.max_bytes,
            "tokens": size.output_tokens,
            "corpus_bytes_per_token": size.corpus_bytes_per_token,
            "bytes_per_token": size.bytes_per_token,
        }

    @property
    def in_words(self) -> str:
        corpus, size = self.index.corpus, IndexSize.of(self.index)
        parts = ", ".join(f"{n} {size / 1e6:.1f} MB" for n, size in self.part_bytes.items())
        spent = ", ".join(f"{stage} {s:.1f} s" for stage, s in self.seconds.items())
        kept = ""
        if self.max_bytes is not None:
            kept = (
                f"kept the outputs of {corpus.documents:,} of {self.artifact.rows_in_words}: the "
                f"corpus part may take {self.max_bytes:,} bytes and takes {corpus.nbytes:,}\n"
            )
        return (
            f"version {self.artifact.version} is current: {corpus.documents:,} rows, "
            f"{len(corpus.offsets) - 1:,} distinct outputs, {size.output_tokens:,} tokens of "
            f"outputs\n{kept}"
            f"a file of {self.artifact.size_bytes:,} bytes; in it: {parts}\n{size.in_words}\n"
            f"took {sum(self.seconds.values()):.1f} s: {spent}"
        )
