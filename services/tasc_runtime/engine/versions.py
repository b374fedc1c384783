"""The versions of a task's record that one running engine can use, and how new ones are followed.

A new version is accepted if it differs only in fields that a running engine can change. Older
versions are kept for a while, since an answer is completed with the version that began it.
"""

import hashlib
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from tasc_runtime.errors import ServiceError
from tasc_store import StoreError, TaskRecord, TaskStore

# Fields that affect requests or drafts, but no weight, token or template.
_LIVE = (
    *("stop", "max_tokens", "sampling", "choices", "schema", "regex", "draft"),
    *("label_end", "abstain_below", "label_temperature", "calibrated_for"),
    *("label_biases", "abstain_label"),
)
MAX_KNOWN = 8


@dataclass(frozen=True)
class Pinned:
    """Versions of record and index from which an engine is built, instead of the newest ones.

    Attributes:
        index_version: Version of the index; None for no index.
    """

    record_version: int
    index_version: int | None


def engine_digest(record: TaskRecord) -> str:
    """A short digest of the fields that an engine is built from.

    One running engine can serve all records with the same digest, one after the other.
    """
    content = json.loads(_one_spelling(record).to_json())
    fixed = {name: value for name, value in content.items() if name not in _LIVE}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def fixed_changes(old: TaskRecord, new: TaskRecord) -> list[str]:
    """The names of the fields that differ and that a running engine cannot change."""
    names = (field.name for field in fields(TaskRecord) if field.name not in _LIVE)
    old, new = _one_spelling(old), _one_spelling(new)
    return [name for name in names if getattr(old, name) != getattr(new, name)]


def _one_spelling(record: TaskRecord) -> TaskRecord:
    """Removes the corpus from a record that names its own task as the corpus."""
    return replace(record, corpus=None) if record.corpus == record.name else record


def newest_version(
    store: TaskStore, task: str, digest: str | None = None
) -> tuple[TaskRecord, int]:
    """Returns the newest version of a task's record, and its number.

    Args:
        digest: Only versions with this `engine_digest` count; unset: all count.

    Raises:
        ServiceError: No version has this digest.
        UnknownTask: The task does not exist.
        StoreError: Redis fails.
        ValueError: The newest version is unreadable.
    """
    numbers = store.versions(task)
    if not digest:
        return store.get(task, numbers[-1]), numbers[-1]
    for number in reversed(numbers):
        try:
            record = store.get(task, number)
        except ValueError:  # unreadable, so no engine was built from it
            continue
        if engine_digest(record) == digest:
            return record, number
    raise ServiceError(
        f"none of the {len(numbers)} versions of task {task} is the one that was deployed (digest "
        f"{digest}): the task was deleted and created again; deploy the application again, by "
        "`tasc serve` or with another args.revision"
    )


class Records:
    """Versions of one task's record. Any thread may read them; one at a time may change them.

    Args:
        record: The record that the engine was built from.
        version: The version of this record.
    """

    def __init__(self, record: TaskRecord, version: int) -> None:
        self._known = {version: record}
        # One tuple, so that no thread sees a record with another record's version.
        self.newest = record, version

    @property
    def older(self) -> tuple[int, ...]:
        """The known versions without the newest, in order."""
        return tuple(sorted(self._known.keys() - {self.newest[1]}))

    def __contains__(self, version: int) -> bool:
        return version in self._known

    def of(self, version: int | None) -> TaskRecord:
        """The record of a version; None for the newest.

        Raises:
            ValueError: The version is unknown, or no longer kept.
        """
        if version is None:
            return self.newest[0]
        if (found := self._known.get(version)) is None:
            raise ValueError(
                f"version {version} of the task's record is not served; send the request again"
            )
        return found

    def add(self, record: TaskRecord, version: int) -> None:
        """Adds a version; it is the newest if its number is the greatest.

        Raises:
            ValueError: The version needs another engine.
        """
        if changes := fixed_changes(self.newest[0], record):
            raise ValueError(f"version {version} changes {', '.join(changes)}")
        versions = {**self._known, version: record}
        self._known = {number: versions[number] for number in sorted(versions)[-MAX_KNOWN:]}
        if version > self.newest[1]:
            self.newest = record, version


class RecordFollower:
    """Passes each new version of a task's record to ``use``, and a refused version again later.

    Args:
        seen: The newest record at the start, and its version.
        use: Called with a new record and its version; raises an error if it cannot be used.
        in_use: Returns the version in use.
        report: Called once with each problem, until a version can be used.
        again_s: Seconds until a refused version is tried again, as its files may be repaired.
        command: Joins words to a `tasc` command, for messages.
    """

    def __init__(
        self,
        store: TaskStore,
        task: str,
        seen: tuple[TaskRecord, int],
        use: Callable[[TaskRecord, int], None],
        in_use: Callable[[], int],
        report: Callable[[str], None],
        again_s: float,
        command: Callable[..., str] = lambda *words: shlex.join(["tasc", *map(str, words)]),
    ) -> None:
        self._store, self._task, self._seen = store, task, seen
        self._use, self._in_use, self._report = use, in_use, report
        self._again_s, self._command = again_s, command
        self._refused: tuple[TaskRecord, int] | None = None
        self._retry_at = 0.0
        self._reported: set[str] = set()

    def poll(self) -> None:
        """Reads the newest version, and uses it if it is new. Errors are reported, not raised."""
        found = version = None
        try:
            version = self._store.versions(self._task)[-1]
            # Always read, because a task that was created again may have equally many versions.
            found = self._store.get(self._task, version), version
            if found == self._refused and time.monotonic() < self._retry_at:
                return
            if found != self._seen:
                self._use(*found)
            self._seen, self._refused = found, None
            self._reported.clear()
        except Exception as error:  # later versions must still be followed
            problem = f"the newest record cannot be read or used, will retry: {error}"
            if version and not isinstance(error, StoreError):
                self._refused, self._retry_at = found, time.monotonic() + self._again_s
                now = self._in_use()
                problem = (
                    f"version {version} cannot be used, version {now} stays in use: {error}; fix "
                    f"the cause, or go back with `{self._command('task', 'use', self._task, now)}`"
                )
            if problem not in self._reported:
                self._reported.add(problem)
                self._report(f"task {self._task}: {problem}")
