"""Tokens of one tokenizer, ranked by their frequency in answers, and their file format.

See FR-Spec, arXiv 2502.14856, and VocabTrim, arXiv 2506.22694, which found that ranking the tokens
of the target's own answers works best. This module does not count tokens and needs neither torch
nor a store.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np

from tasc_draft.drafts import DraftError, Int32, Int64
from tasc_draft.index.arrays import read_arrays, write_arrays
from tasc_engine.errors import RankingError

Origin: TypeAlias = Literal["raw", "target", "draft"]
_MAKE = "make it with `tasc rank-vocabulary`"


@dataclass(frozen=True, eq=False)
class Ranking:
    """Counted tokens, the most frequent first; the smaller id first if counts are equal.

    Attributes:
        ids: ``int32[n]``, including the end of sequence.
        counts: ``int64[n]``, each at least 1.
        fingerprint: Fingerprint of the tokenizer.
        vocab_size: One above the tokenizer's largest id.
        eos_id: The tokenizer's end of sequence, counted once per answer and part of every
            selection.
        origin: Source of the answers: raw outputs of the task, the target, or a draft model.
        total: Number of counted tokens, including tokens that a selection left out.
        rows: Number of counted answers.
        corpus_rows: The answers come from rows ``[0, corpus_rows)`` of the corpus; 0 if they come
            from a file.

    Raises:
        RankingError: The parts are inconsistent.
    """

    ids: Int32
    counts: Int64
    fingerprint: str
    vocab_size: int
    eos_id: int
    origin: Origin
    total: int
    rows: int
    corpus_rows: int = 0

    def __post_init__(self) -> None:
        ids, counts = self.ids, self.counts
        plain = ids.ndim == counts.ndim == 1 and len(ids) == len(counts) > 0
        ok = plain and ids.dtype == np.int32 and counts.dtype == np.int64
        ok = ok and 0 <= ids.min() <= ids.max() < self.vocab_size
        ok = ok and len(np.unique(ids)) == len(ids) and self.eos_id in ids
        ok = ok and counts[-1] > 0 and bool((np.diff(counts) <= 0).all())
        if not (ok and counts.sum() <= self.total and self.origin in get_args(Origin)):
            raise RankingError(f"the ranked vocabulary is inconsistent; {_MAKE} again")

    @classmethod
    def of(cls, counts: Int64, *, eos_id: int, **known: Any) -> Self:
        """Creates a ranking from a count of each id.

        Args:
            counts: ``int64[vocab_size]``.
            known: The attributes fingerprint, origin, rows and corpus_rows.

        Raises:
            RankingError: The end of sequence was not counted.
        """
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
        size, total = len(counts), int(counts.sum())
        ids = order.astype(np.int32)
        return cls(ids, counts[order], vocab_size=size, eos_id=eos_id, total=total, **known)

    @property
    def coverage(self) -> float:
        """The share of these tokens among all counted tokens."""
        return float(self.counts.sum() / self.total)

    def top(self, k: int) -> Int32:
        """The k most frequent tokens, or all if fewer were seen.

        Raises:
            RankingError: k is not between 1 and the vocabulary's size.
        """
        if not 1 <= k <= self.vocab_size:
            raise RankingError(
                f"the top {k} tokens were requested; choose 1 to {self.vocab_size} (all tokens)"
            )
        chosen = self.ids[:k]
        return chosen if self.eos_id in chosen else self._and_eos(chosen[:-1])

    def top_p(self, p: float) -> Int32:
        """The smallest set of tokens with at least a share p of all counted tokens, or all tokens.

        Raises:
            RankingError: p is not in (0, 1].
        """
        if not 0 < p <= 1:
            raise RankingError(
                f"a share {p} of the counted tokens was requested; choose 0 < p <= 1"
            )
        # Products with p are slightly inexact; tokens that reach p exactly are enough.
        enough = self.counts.cumsum() >= p * self.total * (1 - 1e-12)
        return self._and_eos(self.ids[: int(enough.argmax()) + 1 if enough.any() else None])

    def at_least(self, count: int) -> Int32:
        """The tokens with at least this count.

        Raises:
            RankingError: The count is below 1.
        """
        if count < 1:
            raise RankingError(
                f"tokens counted {count} times or more were requested; choose at least 1"
            )
        return self._and_eos(self.ids[self.counts >= count])

    def only(self, ids: Int32) -> Self:
        """Returns the ranking with only some of its tokens."""
        kept = np.isin(self.ids, ids)
        return replace(self, ids=self.ids[kept], counts=self.counts[kept])

    def save(self, path: Path) -> None:
        """Writes a file atomically: the file appears at ``path`` only when it is complete."""
        write_arrays(path, vars(self), np.savez_compressed)

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> Self:
        """Reads a file and verifies it.

        Args:
            fingerprint: Fingerprint of the target's tokenizer.

        Raises:
            RankingError: The file is missing, damaged, of another format, or of another tokenizer.
        """
        try:
            names = [field.name for field in fields(cls)]
            arrays = read_arrays(path, names, "a ranked vocabulary", _MAKE)
            found: dict[str, Any] = {
                name: a if name in ("ids", "counts") else a.item() for name, a in arrays.items()
            }
        except DraftError as error:
            raise RankingError(str(error)) from error
        except ValueError as error:
            raise RankingError(f"{path} is not a ranked vocabulary: {error}; {_MAKE}") from error
        if found["fingerprint"] != fingerprint:
            raise RankingError(
                f"{path} ranks tokens of tokenizer {found['fingerprint']}, but the target's is "
                f"{fingerprint}; rank again with the target's tokenizer"
            )
        try:
            return cls(**found)
        except (RankingError, TypeError) as error:
            raise RankingError(f"{path}: {error}") from error

    def _and_eos(self, ids: Int32) -> Int32:
        return ids if self.eos_id in ids else np.append(ids, np.int32(self.eos_id))
