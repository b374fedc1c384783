"""The versions of a task's record that one running engine can answer by. It reads no store.

A version is taken where it differs in nothing that the engine was built of. Older ones stay known
for a while, since an answer is ended by the version that it was begun by.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

from tasc_store import TaskRecord

# What a request is read by, and no weight, token or template depends on.
_LIVE = ("stop", "max_tokens", "sampling", "choices", "schema", "regex")
MOST_KNOWN = 8


class Records:
    """Versions of one task's record; any thread may ask, one may add.

    Args:
        record: What the engine was built of.
        version: Its number.
    """

    def __init__(self, record: TaskRecord, version: int) -> None:
        self._known = {version: record}
        # One value, so that nobody sees a record with another's number.
        self.newest = record, version

    @property
    def older(self) -> tuple[int, ...]:
        """The versions known beside the newest, in order."""
        return tuple(sorted(self._known.keys() - {self.newest[1]}))

    def __contains__(self, version: int) -> bool:
        return version in self._known

    def of(self, version: int | None) -> TaskRecord:
        """The record of a version; None: of the newest.

        Raises:
            ValueError: It is not known, or not any more.
        """
        if version is None:
            return self.newest[0]
        if (found := self._known.get(version)) is None:
            raise ValueError(
                f"version {version} of the task's record is not served; send the request anew"
            )
        return found

    def needs_restart(self, record: TaskRecord) -> list[str]:
        """The fields in which a record differs and that no running engine can change."""
        return list(_differing(self.newest[0], record))

    def add(self, record: TaskRecord, version: int) -> None:
        """Take a version; it is the newest if its number is the greatest.

        Raises:
            ValueError: It needs an engine of its own.
        """
        if differing := self.needs_restart(record):
            raise ValueError(f"version {version} changes {', '.join(differing)}")
        known = {**self._known, version: record}
        self._known = {number: known[number] for number in sorted(known)[-MOST_KNOWN:]}
        if version > self.newest[1]:
            self.newest = record, version


def _differing(old: TaskRecord, new: TaskRecord) -> Iterator[str]:
    alike = replace(new, **{name: getattr(old, name) for name in _LIVE})
    for field in fields(TaskRecord):
        if getattr(alike, field.name) != getattr(old, field.name):
            yield field.name
