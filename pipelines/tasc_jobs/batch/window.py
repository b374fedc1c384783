"""The rows of a job between its input and its files: read, handed out, saved, in order again.

At most so many rows, and characters of them, are here at a time. Pure: it knows no engine, no Redis
and no file.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from tasc_jobs.batch.work import Row

_MOST_CHARACTERS = 64 << 20


@dataclass(frozen=True)
class Saved:
    """A row's record is in Redis, as an engine told."""

    ordinal: int
    failed: bool = False
    tokens: int = 0
    steps: int = 0


class Window:
    """Rows from ``first`` on.

    Args:
        first: Rows below are finished; they are read over.
        known: Rows that were saved by an earlier start.
        most: Rows here at a time.
    """

    def __init__(
        self, rows: Iterator[Row], first: int, known: Collection[Saved], most: int
    ) -> None:
        self._source = rows
        self._known = {each.ordinal: each for each in known}
        self._most = most
        self._rows: dict[int, Row] = {}
        self._saved: dict[int, Saved] = {}
        self._todo: deque[int] = deque()
        self._again: deque[int] = deque()
        self._characters = 0
        self._first = first
        self._ready = 0
        self.ended = False

    @property
    def first(self) -> int:
        """The first row that is in no file."""
        return self._first

    @property
    def ready(self) -> int:
        """Rows from the first on that are saved without a gap."""
        while self._first + self._ready in self._saved:
            self._ready += 1
        return self._ready

    @property
    def empty(self) -> bool:
        return self.ended and not self._rows

    @property
    def size(self) -> int:
        return len(self._rows)

    @property
    def has_room(self) -> bool:
        return (
            not self.ended and len(self._rows) < self._most and self._characters < _MOST_CHARACTERS
        )

    @property
    def saved(self) -> Collection[Saved]:
        """Rows that are in no file, those of an earlier start that were not read yet too."""
        return [*self._saved.values(), *self._known.values()]

    def read(self, most: int) -> int:
        """Read up to so many rows while there is room; how many were read."""
        count = 0
        while count < most and self.has_room:
            row = next(self._source, None)
            if row is None:
                self.ended = True
                break
            count += 1
            if row.ordinal >= self._first:
                self._enter(row)
        return count

    def take(self, most: int) -> list[Row]:
        """Rows for an engine; those that are to be done again first."""
        taken: list[Row] = []
        for queue in (self._again, self._todo):
            while queue and len(taken) < most:
                ordinal = queue.popleft()
                if ordinal in self._rows and ordinal not in self._saved:
                    taken.append(self._rows[ordinal])
        return taken

    def save(self, saved: Iterable[Saved]) -> int:
        """Rows are saved; how many of them were not before."""
        count = len(self._saved)
        for each in saved:
            if each.ordinal in self._rows:
                self._saved[each.ordinal] = each
        return len(self._saved) - count

    def again(self, ordinals: Iterable[int]) -> None:
        """Rows turned out not to be saved, or their engine is gone: hand them out again."""
        for ordinal in ordinals:
            if ordinal in self._rows:
                self._saved.pop(ordinal, None)
                self._ready = min(self._ready, ordinal - self._first)
                self._again.append(ordinal)

    def head(self, count: int) -> list[Row]:
        """The first rows."""
        return [self._rows[self._first + i] for i in range(count)]

    def behind(self) -> list[Row]:
        """Rows that are saved, in order."""
        return [self._rows[ordinal] for ordinal in sorted(self._saved)]

    def drop(self, count: int) -> None:
        """The first rows are in a file."""
        for ordinal in range(self._first, self._first + count):
            self._characters -= len(self._rows.pop(ordinal).payload)
            del self._saved[ordinal]
        self._first += count
        self._ready -= count

    def _enter(self, row: Row) -> None:
        self._rows[row.ordinal] = row
        self._characters += len(row.payload)
        if row.refused is not None:
            self._saved[row.ordinal] = Saved(row.ordinal, failed=True)
        elif row.ordinal in self._known:
            self._saved[row.ordinal] = self._known.pop(row.ordinal)
        else:
            self._todo.append(row.ordinal)
