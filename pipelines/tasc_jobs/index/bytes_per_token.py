"""How large a draft index is by the token: one denominator for all reports. It builds nothing."""

from dataclasses import asdict, dataclass

from tasc_draft.index.draft_index import DraftIndex


@dataclass(frozen=True)
class IndexSize:
    """Bytes of an index's arrays, and what they are divided by.

    Attributes:
        output_tokens: Of the outputs in it, repeats counted, the mark SEP in front and
            end-of-sequence of each among them. No prompt is counted here.
        corpus_bytes: Of the corpus part, which holds these outputs.
        bytes: Of all parts, prompts among them.
    """

    output_tokens: int
    corpus_bytes: int
    bytes: int

    @classmethod
    def of(cls, index: DraftIndex) -> "IndexSize":
        return cls(index.corpus.tokens, index.corpus.nbytes, index.nbytes)

    @property
    def corpus_bytes_per_token(self) -> float | None:
        """None for an index of no outputs."""
        return self._per_token(self.corpus_bytes)

    @property
    def bytes_per_token(self) -> float | None:
        """Of all parts, for each token of outputs all the same; None for an index of no outputs."""
        return self._per_token(self.bytes)

    def figures(self) -> dict[str, float | None]:
        """All of it for machines."""
        return {
            **asdict(self),
            "corpus_bytes_per_token": self.corpus_bytes_per_token,
            "bytes_per_token": self.bytes_per_token,
        }

    @property
    def in_words(self) -> str:
        corpus, whole = self.corpus_bytes_per_token, self.bytes_per_token
        if corpus is None or whole is None:
            return f"{self.bytes:,} bytes, and no outputs in it"
        return (
            f"{corpus:.2f} bytes a token of outputs, SEP and EOS counted, in the corpus part; "
            f"{whole:.2f} for the same tokens with prompts and all other parts"
        )

    def _per_token(self, size: int) -> float | None:
        return size / self.output_tokens if self.output_tokens else None
