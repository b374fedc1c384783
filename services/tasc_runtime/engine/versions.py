"""The versions of a task's record that one running engine can answer by, and when it needs another.

A version is taken where it differs in nothing that the engine cannot change. Older ones stay known
for a while, since an answer is ended by the version that it was begun by.
"""

import hashlib
import json
from dataclasses import dataclass, fields, replace

from tasc_runtime.errors import ServiceError
from tasc_store import TaskRecord, TaskStore

# What a request is read by or drafted by, and no weight, token or template depends on.
_LIVE = ("stop", "max_tokens", "sampling", "choices", "schema", "regex", "draft")
MOST_KNOWN = 8


@dataclass(frozen=True)
class Pinned:
    """What an engine is built of, in place of the newest: versions of task record and index.

    Attributes:
        index_version: None: no index.
    """

    record_version: int
    index_version: int | None


def engine_digest(record: TaskRecord) -> str:
    """A short digest of the fields that an engine is built of.

    Records of one digest can be served by one running engine, one after the other.
    """
    content = json.loads(_one_spelling(record).to_json())
    fixed = {name: value for name, value in content.items() if name not in _LIVE}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def fixed_changes(old: TaskRecord, new: TaskRecord) -> list[str]:
    """The names of the fields that differ and that no running engine can change."""
    names = (field.name for field in fields(TaskRecord) if field.name not in _LIVE)
    old, new = _one_spelling(old), _one_spelling(new)
    return [name for name in names if getattr(old, name) != getattr(new, name)]


def _one_spelling(record: TaskRecord) -> TaskRecord:
    """A task that names itself as its corpus is the same as one that names none."""
    return replace(record, corpus=None) if record.corpus == record.name else record


def newest_version(
    store: TaskStore, task: str, digest: str | None = None
) -> tuple[TaskRecord, int]:
    """The newest version of a task's record, and its number.

    Args:
        digest: Only versions with this `engine_digest` count; unset: all count.

    Raises:
        ServiceError: No version has this digest.
        UnknownTask: There is no such task.
        StoreError: Redis fails.
        ValueError: The newest version is unreadable.
    """
    numbers = store.versions(task)
    if not digest:
        return store.get(task, numbers[-1]), numbers[-1]
    for number in reversed(numbers):
        try:
            record = store.get(task, number)
        except ValueError:  # unreadable, so no engine was built of it
            continue
        if engine_digest(record) == digest:
            return record, number
    raise ServiceError(
        f"none of the {len(numbers)} versions of task {task} is the one that was deployed (digest "
        f"{digest}): the task was deleted and made anew; deploy the application again, by `tasc "
        "serve` or with another args.revision"
    )


class Records:
    """Versions of one task's record; any thread may ask, one at a time may change them.

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

    def add(self, record: TaskRecord, version: int) -> None:
        """Take a version; it is the newest if its number is the greatest.

        Raises:
            ValueError: It needs an engine of its own.
        """
        if changes := fixed_changes(self.newest[0], record):
            raise ValueError(f"version {version} changes {', '.join(changes)}")
        versions = {**self._known, version: record}
        self._known = {number: versions[number] for number in sorted(versions)[-MOST_KNOWN:]}
        if version > self.newest[1]:
            self.newest = record, version
