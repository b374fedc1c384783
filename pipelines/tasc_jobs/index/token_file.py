"""The token ids of a corpus's rows in a file: appended in any order, read in the rows' own order.

Only two numbers a row stay in memory. It knows no text and no Ray.
"""

from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from tasc_draft.tokens import Int32, Int64, Tokens
from tasc_jobs.errors import JobError


class TokenFile:
    """Write inside the block, then call ``tokens``.

    Args:
        path: The file to write. Rows that did not come in order are put in order in a second one
            beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO
        self._ordinals: list[Int64] = []
        self._lengths: list[Int64] = []

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, ordinals: Int64, ids: Int32, lengths: Int64) -> None:
        """Add rows.

        Args:
            ordinals: ``int64[rows]`` their positions in the corpus.
            ids: ``int32[tokens]`` their tokens, one row behind the other.
            lengths: ``int64[rows]`` how many tokens each has.
        """
        self._file.write(np.ascontiguousarray(ids, np.int32).data)
        self._ordinals.append(np.asarray(ordinals, np.int64))
        self._lengths.append(np.asarray(lengths, np.int64))

    def tokens(self, rows: int) -> Tokens:
        """All rows in order, their ids in a read-only memory map of the file.

        Raises:
            JobError: Not each of ``rows`` positions was appended exactly once.
        """
        ordinals = np.concatenate([np.zeros(0, np.int64), *self._ordinals])
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        order = np.argsort(ordinals, kind="stable")
        if not np.array_equal(ordinals[order], np.arange(rows)):
            raise JobError(
                f"{rows} rows were to be tokenised, {len(ordinals)} came back, "
                f"{len(np.unique(ordinals))} different ones; build the index again"
            )
        if not np.array_equal(order, np.arange(rows)):
            self._path = self._put_in_order(order, lengths)
        return Tokens(_mapped(self._path), lengths[order])

    def _put_in_order(self, order: Int64, lengths: Int64) -> Path:
        """Copy the file run by run; a run is rows that came in order."""
        ids, ends = _mapped(self._path), np.cumsum(lengths)
        begins = np.flatnonzero(np.diff(order, prepend=-2) != 1)
        path = self._path.with_name(f"{self._path.name}.ordered")
        with path.open("wb") as file:
            for first, last in zip(begins, [*(begins[1:] - 1), len(order) - 1], strict=True):
                begin, end = ends[order[first]] - lengths[order[first]], ends[order[last]]
                file.write(ids[begin:end].data)
        self._path.unlink()
        return path


def _mapped(path: Path) -> Int32:
    if not path.stat().st_size:  # no operating system maps an empty file
        return np.zeros(0, np.int32)
    return np.asarray(np.memmap(path, np.int32, "r"))
