"""The versions of a task's record that one running engine can answer by. It reads no store.

A version is taken where it differs in nothing that the engine cannot change. Older ones stay known
for a while, since an answer is ended by the version that it was begun by.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

from tasc_store import TaskRecord

# What a request is read by or drafted by, and no weight, token or template depends on.
_LIVE = ("stop", "max_tokens", "sampling", "choices", "schema", "regex", "draft")
# What an engine has another target for.
_WEIGHTS = ("adapter", "adapters")
MOST_KNOWN = 8

_Weights = tuple[str | None, tuple[tuple[str, str], ...]]


class Records:
    """Versions of one task's record; any thread may ask, one at a time may change them.

    Args:
        record: What the engine was built of, its target 0 too.
        version: Its number.
    """

    def __init__(self, record: TaskRecord, version: int) -> None:
        self._known = {version: record}
        self._targets = {_weights(record): 0}
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

    def target_of(self, record: TaskRecord) -> int | None:
        """Number of the engine's target that has a record's adapters; None where none has."""
        return self._targets.get(_weights(record))

    def needs_restart(self, record: TaskRecord) -> list[str]:
        """The fields in which a record differs and that no running engine can change."""
        return list(_differing(self.newest[0], record, _LIVE + _WEIGHTS))

    def add(self, record: TaskRecord, version: int, target: int | None = None) -> None:
        """Take a version; it is the newest if its number is the greatest.

        Args:
            target: Number of the engine's target that answers by it, where that is new.

        Raises:
            ValueError: It needs an engine or a target of its own.
        """
        known = target is not None or self.target_of(record) is not None
        live = _LIVE + _WEIGHTS if known else _LIVE
        if differing := list(_differing(self.newest[0], record, live)):
            raise ValueError(f"version {version} changes {', '.join(differing)}")
        if target is not None:
            self._targets = {**self._targets, _weights(record): target}
        versions = {**self._known, version: record}
        self._known = {number: versions[number] for number in sorted(versions)[-MOST_KNOWN:]}
        if version > self.newest[1]:
            self.newest = record, version

    def forget(self, target: int) -> None:
        """Answer by no version of a target any more; that of the newest stays."""
        if target != self.target_of(self.newest[0]):
            self._targets = {w: n for w, n in self._targets.items() if n != target}
            kept = {v: r for v, r in self._known.items() if self.target_of(r) is not None}
            self._known = kept


def _weights(record: TaskRecord) -> _Weights:
    return record.adapter, record.adapters


def _differing(old: TaskRecord, new: TaskRecord, live: tuple[str, ...]) -> Iterator[str]:
    alike = replace(new, **{name: getattr(old, name) for name in live})
    for field in fields(TaskRecord):
        if getattr(alike, field.name) != getattr(old, field.name):
            yield field.name
