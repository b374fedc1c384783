"""The target's own likeliest continuations of each token, as flat arrays and as one file.

What a model says after a single token is true of any task, so it serves where a task's corpus is
silent (Stewart et al. 2024, arXiv 2411.03786: model-derived bigrams). It runs no model;
``tasc_engine.model.token_bigrams`` does.
"""

import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.errors import DraftError
from tasc_draft.tokens import Int32

_FIELDS = ("model", "fingerprint", "vocab_size", "tokens", "logp")
_MAKE = "`tasc model-bigrams` makes one"
_DAMAGES = (KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
_ROUNDING = 1e-3  # a float32 log-probability of a certain token may lie this far above 0


class BigramView(NamedTuple):
    """The arrays of a ``BigramTable``, as compiled code takes them."""

    tokens: Int32
    logp: NDArray[np.float32]


@dataclass(frozen=True)
class BigramTable:
    """Immutable next tokens of each token.

    Attributes:
        model: The target's name, for people.
        fingerprint: Of the tokenizer that the ids are of.
        vocab_size: The tokenizer's, V. What a target has beyond it, padding, is left out.
        tokens: ``int32[V, k]`` the k likeliest next tokens of each token, the likeliest first.
        logp: ``float32[V, k]`` their log-probabilities, natural.
    """

    model: str
    fingerprint: str
    vocab_size: int
    tokens: Int32
    logp: NDArray[np.float32]

    def __post_init__(self) -> None:
        # Read-only like a mapped file, so that compiled code sees one array type for both.
        for array in self.view:
            array.setflags(write=False)

    @property
    def view(self) -> BigramView:
        """The arrays, as compiled code takes them."""
        return BigramView(self.tokens, self.logp)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.logp.nbytes

    def check_integrity(self) -> None:
        """Raise DraftError unless every token has distinct continuations, the likeliest first."""
        tokens, logp = self.tokens, self.logp
        ok = (
            tokens.dtype == np.int32
            and logp.dtype == np.float32
            and tokens.ndim == 2
            and tokens.shape == logp.shape
            and len(tokens) == self.vocab_size
            and tokens.shape[1] >= 1
            and bool(((tokens >= 0) & (tokens < self.vocab_size)).all())
            and bool((np.diff(np.sort(tokens), axis=1) > 0).all())
            and bool((logp[:, 0] <= _ROUNDING).all() and (logp[:, 1:] <= logp[:, :-1]).all())
            and not bool(np.isnan(logp).any())
        )
        if not ok:
            raise DraftError(
                f"the bigram table of {self.model} is inconsistent; make it again with "
                "`tasc model-bigrams`"
            )


def write_bigrams(table: BigramTable, path: Path) -> None:
    """Write a table as a ``.npz`` without pickle; the name appears only when the file is whole."""
    arrays: dict[str, Any] = {name: np.asarray(getattr(table, name)) for name in _FIELDS}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)


def read_bigrams(path: Path, fingerprint: str) -> BigramTable:
    """Read a table and verify it.

    Args:
        fingerprint: Of the tokenizer whose ids the table is to be used with.

    Raises:
        DraftError: The file is missing, foreign or damaged, or of another tokenizer.
    """
    table = _table(_arrays(path), path)
    if table.fingerprint != fingerprint:
        raise DraftError(
            f"{path} is of {table.model} with tokenizer {table.fingerprint}, needed is one of "
            f"tokenizer {fingerprint}; make it with `tasc model-bigrams` from the task's model"
        )
    try:
        table.check_integrity()
    except DraftError as error:
        raise DraftError(f"{path}: {error}") from error
    return table


def _arrays(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            arrays = _fields(file, path)
    except FileNotFoundError as error:
        raise DraftError(f"there is no {path}; {_MAKE}") from error
    except OSError as error:
        raise DraftError(f"{path} cannot be read: {error.strerror or error}; {_MAKE}") from error
    if lacking := [name for name in _FIELDS if name not in arrays]:
        raise DraftError(f"{path} is no bigram table: it lacks {', '.join(lacking)}; {_MAKE}")
    return arrays


def _fields(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Those of a table's arrays that the file has. What numpy says of others would help nobody."""
    if not zipfile.is_zipfile(file):
        raise DraftError(f"{path} is no bigram table: it is no whole .npz archive; {_MAKE}")
    file.seek(0)
    try:
        with np.load(file, allow_pickle=False) as content:
            return {name: content[name] for name in _FIELDS if name in content.files}
    except _DAMAGES as error:
        raise DraftError(f"{path} is a damaged bigram table or none; {_MAKE}") from error


def _table(arrays: dict[str, Any], path: Path) -> BigramTable:
    kinds = {"model": ("U", "a text"), "fingerprint": ("U", "a text")}
    kinds["vocab_size"] = ("i", "a whole number")
    for name, (kind, said) in kinds.items():
        if arrays[name].ndim != 0 or arrays[name].dtype.kind != kind:
            raise DraftError(f"{path} is no bigram table: its {name} is not {said}; {_MAKE}")
    return BigramTable(**{n: a.item() if n in kinds else a for n, a in arrays.items()})
