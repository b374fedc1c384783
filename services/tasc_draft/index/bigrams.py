"""The target's own likeliest continuations of each token, as arrays and as one file.

The continuations do not depend on the task, so they help where a task's corpus has no evidence
(Stewart et al. 2024, arXiv 2411.03786: model-derived bigrams). ``tasc_jobs.index.model_bigrams``
computes them.
"""

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import IndexPart, within
from tasc_draft.drafts import DraftError, Int32
from tasc_draft.index.arrays import read_arrays, write_arrays

_FIELDS = ("model", "fingerprint", "vocab_size", "tokens", "logp")
_MAKE = "`tasc model-bigrams` makes one"


# The arrays of a `BigramTable` for compiled code.
BigramView: Any = namedtuple("BigramView", "tokens logp")


@dataclass(frozen=True)
class BigramTable(IndexPart):
    """Immutable next tokens of each token.

    Attributes:
        model: The target's display name.
        fingerprint: The fingerprint of the tokenizer that made the ids.
        vocab_size: The tokenizer's vocabulary size, V; the target's padding beyond V is left out.
        tokens: ``int32[V, k]`` the k likeliest next tokens of each token, the likeliest first.
        logp: ``float32[V, k]`` their log-probabilities, natural.
    """

    model: str
    fingerprint: str
    vocab_size: int
    tokens: Int32
    logp: NDArray[np.float32]

    @property
    def view(self) -> Any:
        return BigramView(self.tokens, self.logp)

    def check_integrity(self) -> None:
        """Raise DraftError unless every token has continuations that are ids."""
        tokens, logp = self.tokens, self.logp
        if not (
            tokens.dtype == np.int32
            and logp.dtype == np.float32
            and tokens.ndim == 2
            and tokens.shape == logp.shape
            and len(tokens) == self.vocab_size
            and tokens.shape[1] >= 1
            and within(tokens, self.vocab_size)
        ):
            raise DraftError(
                f"the bigram table of {self.model} is damaged; make it again with "
                "`tasc model-bigrams`"
            )


def write_bigrams(table: BigramTable, path: Path) -> None:
    """Write a table to a file. The file appears at ``path`` once it is complete."""
    write_arrays(path, vars(table))


def read_bigrams(path: Path, fingerprint: str) -> BigramTable:
    """Read and verify a table.

    Args:
        fingerprint: The fingerprint of the task's tokenizer.

    Raises:
        DraftError: The file is missing or damaged, is not a bigram table, or belongs to another
            tokenizer.
    """
    table = _table(read_arrays(path, _FIELDS, "a bigram table", _MAKE), path)
    if table.fingerprint != fingerprint:
        raise DraftError(
            f"{path} is for {table.model} with tokenizer {table.fingerprint}, but the task has "
            f"tokenizer {fingerprint}; make one with `tasc model-bigrams` from the task's model"
        )
    try:
        table.check_integrity()
    except DraftError as error:
        raise DraftError(f"{path}: {error}") from error
    return table


def _table(arrays: dict[str, Any], path: Path) -> BigramTable:
    kinds = {"model": "U", "fingerprint": "U", "vocab_size": "i"}
    for name, kind in kinds.items():
        if arrays[name].ndim != 0 or arrays[name].dtype.kind != kind:
            expected = {"U": "a string", "i": "an integer"}[kind]
            raise DraftError(f"{path} is not a bigram table: its {name} is not {expected}; {_MAKE}")
    return BigramTable(**{n: a.item() if n in kinds else a for n, a in arrays.items()})
