"""What a build of a draft index made, for people and for machines. It measures nothing."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tasc_draft.index.draft_index import DraftIndex
from tasc_store import Artifact

_SOURCES = ("corpus", "inputs", "aligned", "bigrams", "weights")


@dataclass(frozen=True)
class IndexReport:
    """One version of an index.

    Attributes:
        artifact: Its record in the store.
        rows: Of the corpus.
        distinct_outputs: Different ones among their outputs.
        tokens: Of all outputs, with the document mark and end-of-sequence of each.
        grams: Distinct n-grams of the greatest length.
        bytes_per_token: Of the whole file, for each of ``tokens``; prompts are indexed besides.
        part_bytes: Of each part that is in the index.
        seconds: Of each stage of the build.
    """

    artifact: Artifact
    rows: int
    distinct_outputs: int
    tokens: int
    grams: int
    bytes_per_token: float
    part_bytes: dict[str, int]
    seconds: dict[str, float]

    @classmethod
    def of(
        cls, artifact: Artifact, index: DraftIndex, seconds: Mapping[str, float]
    ) -> "IndexReport":
        parts = {name: getattr(index, name) for name in _SOURCES}
        corpus = index.corpus
        return cls(
            artifact=artifact,
            rows=corpus.documents,
            distinct_outputs=len(corpus.offsets) - 1,
            tokens=corpus.tokens,
            grams=len(corpus.order),
            bytes_per_token=round(artifact.size_bytes / corpus.tokens, 2),
            part_bytes={name: part.nbytes for name, part in parts.items() if part is not None},
            seconds={stage: round(spent, 3) for stage, spent in seconds.items()},
        )

    @property
    def as_json(self) -> dict[str, object]:
        """The fields, those of the artifact among them."""
        fields = asdict(self)
        return {**fields.pop("artifact"), **fields}

    @property
    def in_words(self) -> str:
        parts = ", ".join(f"{n} {size / 1e6:.1f} MB" for n, size in self.part_bytes.items())
        spent = ", ".join(f"{stage} {s:.1f} s" for stage, s in self.seconds.items())
        return (
            f"version {self.artifact.version} is current: {self.rows:,} rows, "
            f"{self.distinct_outputs:,} distinct outputs, {self.tokens:,} tokens of outputs\n"
            f"{self.artifact.size_bytes:,} bytes, {self.bytes_per_token} for each token of outputs;"
            f" in it: {parts}\n"
            f"took {sum(self.seconds.values()):.1f} s: {spent}"
        )
