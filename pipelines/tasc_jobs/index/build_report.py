"""What a build of a draft index made, for people and for machines. It measures nothing."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tasc_draft.index.draft_index import DraftIndex
from tasc_jobs.index.bytes_per_token import IndexSize
from tasc_store import Artifact

_SOURCES = ("corpus", "inputs", "aligned", "bigrams", "weights")


@dataclass(frozen=True)
class IndexReport:
    """One version of an index.

    Attributes:
        artifact: Its record in the store.
        rows: Whose outputs are in it; all ``corpus_rows`` of the artifact, but for a cap.
        distinct_outputs: Different ones among their outputs.
        grams: Distinct n-grams of the greatest length.
        size: Tokens of these outputs, and bytes.
        part_bytes: Of each part that is in the index.
        seconds: Of each stage of the build.
        max_bytes: The cap of the corpus part, if there was one.
    """

    artifact: Artifact
    rows: int
    distinct_outputs: int
    grams: int
    size: IndexSize
    part_bytes: dict[str, int]
    seconds: dict[str, float]
    max_bytes: int | None

    @classmethod
    def of(
        cls,
        artifact: Artifact,
        index: DraftIndex,
        seconds: Mapping[str, float],
        max_bytes: int | None = None,
    ) -> "IndexReport":
        parts = {name: getattr(index, name) for name in _SOURCES}
        corpus = index.corpus
        return cls(
            artifact=artifact,
            rows=corpus.documents,
            distinct_outputs=len(corpus.offsets) - 1,
            grams=len(corpus.order),
            size=IndexSize.of(index),
            part_bytes={name: part.nbytes for name, part in parts.items() if part is not None},
            seconds={stage: round(spent, 3) for stage, spent in seconds.items()},
            max_bytes=max_bytes,
        )

    @property
    def as_json(self) -> dict[str, object]:
        """The fields, those of the artifact among them; bytes a token as `IndexSize` has them."""
        fields = asdict(self)
        del fields["size"]
        return {
            **fields.pop("artifact"),
            **fields,
            "tokens": self.size.output_tokens,
            "corpus_bytes_per_token": self.size.corpus_bytes_per_token,
            "bytes_per_token": self.size.bytes_per_token,
        }

    @property
    def in_words(self) -> str:
        parts = ", ".join(f"{n} {size / 1e6:.1f} MB" for n, size in self.part_bytes.items())
        spent = ", ".join(f"{stage} {s:.1f} s" for stage, s in self.seconds.items())
        return (
            f"version {self.artifact.version} is current: {self.rows:,} rows, "
            f"{self.distinct_outputs:,} distinct outputs, {self.size.output_tokens:,} tokens of "
            f"outputs\n{self._kept}"
            f"a file of {self.artifact.size_bytes:,} bytes; in it: {parts}\n{self.size.in_words}\n"
            f"took {sum(self.seconds.values()):.1f} s: {spent}"
        )

    @property
    def _kept(self) -> str:
        if self.max_bytes is None:
            return ""
        return (
            f"kept the outputs of {self.rows:,} of {self.artifact.corpus_rows:,} rows: the corpus "
            f"part may take {self.max_bytes:,} bytes and takes {self.size.corpus_bytes:,}\n"
        )
