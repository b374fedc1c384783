"""The register of tasks in Redis, which keeps every version of their records."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from tasc_store import keys
from tasc_store.client import as_text, url_of
from tasc_store.corpus import CorpusStore
from tasc_store.errors import TaskChanged, TaskInUse, UnknownTask, UnknownVersion
from tasc_store.tasks.record import TaskRecord

_SHOWN_NAMES = 20
_PAGE = 1000  # keys that one SCAN visits while other clients wait

# Appends a record only if it differs from the newest one, so that the call is idempotent. ARGV[2]
# is the version that must be the newest, or empty. If another version is the newest, returns -1
# minus that version.
_PUT = """
local count = redis.call('LLEN', KEYS[1])
if count > 0 and redis.call('LINDEX', KEYS[1], -1) == ARGV[1] then return count end
if ARGV[2] ~= '' and tonumber(ARGV[2]) ~= count then return -1 - count end
return redis.call('RPUSH', KEYS[1], ARGV[1])
"""

# Appends the record of version ARGV[1] again, exactly as it was written.
_USE = """
local found = redis.call('LINDEX', KEYS[1], ARGV[1] - 1)
if not found then return 0 end
if redis.call('LINDEX', KEYS[1], -1) == found then return redis.call('LLEN', KEYS[1]) end
return redis.call('RPUSH', KEYS[1], found)
"""

# A script, since a full server refuses the commands of MULTI.
_NEWEST = "return {redis.call('LLEN', KEYS[1]), redis.call('LINDEX', KEYS[1], -1)}"


@dataclass(frozen=True)
class Newest:
    """A task's newest version. If its record cannot be read, ``record`` is the error."""

    name: str
    version: int
    record: TaskRecord | ValueError


class TaskStore:
    """Task records in Redis. A record is never changed: putting another record adds a version.

    Every method raises `StoreError` if Redis fails, and ValueError if a record is invalid.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._put = client.register_script(_PUT)
        self._use = client.register_script(_USE)
        self._newest = client.register_script(_NEWEST)

    def put(self, record: TaskRecord, *, after: int | None = None) -> int:
        """Adds a record as the newest version, unless the newest record is equal.

        Returns:
            The version of the record.

        Args:
            after: The version that must be the newest so far (0: no version); unset: any.

        Raises:
            TaskChanged: Another version is the newest.
        """
        expected = "" if after is None else after
        version = int(self._put([_record_key(record.name)], [record.to_json(), expected]))
        if version >= 0:
            self._client.sadd(keys.ALL_TASKS, record.name)
            return version
        raise TaskChanged(
            f"task {record.name} has {-1 - version} versions now, not {after}: another process "
            f"changed it; look at `tasc task show {record.name}` and try again"
        )

    def use(self, name: str, version: int) -> int:
        """Adds an older version's record again as the newest; returns its new version.

        Nothing changes if the newest version is this one, or has an equal record.

        Raises:
            UnknownTask: The task, or the task whose corpus it drafts from, does not exist.
            UnknownVersion: The task has no such version.
        """
        self.require_corpus(self.get(name, version))
        newest = int(self._use([_record_key(name)], [version]))
        if not newest:
            raise UnknownTask(self._unknown(name))
        return newest

    def require_corpus(self, record: TaskRecord) -> None:
        """Raises UnknownTask if the record's corpus belongs to no task and has no rows."""
        name = record.corpus_name
        found = name == record.name or bool(self._client.exists(_record_key(name)))
        if not found and not len(CorpusStore(self._client, name)):
            raise UnknownTask(
                f"task {record.name} is to draft from the corpus of {name}: {self._unknown(name)}"
            )

    def left(self, name: str) -> bool:
        """Whether any data of a task exists, even without a record."""
        return any(self._pages(name))

    def delete(self, name: str) -> None:
        """Removes a task: the corpus, the draft indexes of all tokenizers, and the records.

        This includes data that an interrupted deletion left, or that an ingest wrote after a
        deletion. Whether another task uses the corpus is judged by that task's newest record.
        Running services keep the indexes that they have mapped.

        Raises:
            UnknownTask: No data of this task exists.
            TaskInUse: Other tasks draft from this task's corpus.
            ValueError: The name is invalid.
        """
        if not self.left(keys.checked_task(name)):
            raise UnknownTask(self._unknown(name))
        if users := self._users(name):
            raise TaskInUse(
                f"{', '.join(users)} draft from the corpus of task {name}; delete these "
                "tasks first, or give them another --corpus"
            )
        self._unlink_all_but_records(name)
        self._client.srem(keys.ALL_TASKS, name)
        self._client.unlink(_record_key(name))
        # A running ingest may have written rows, which a later task of this name would inherit.
        self._unlink_all_but_records(name)

    def get(self, name: str, version: int | None = None) -> TaskRecord:
        """Returns a task's record, the newest unless a version is given.

        Raises:
            UnknownTask: The task does not exist.
            UnknownVersion: The task has no such version.
        """
        position = -1 if version is None else version - 1
        found = self._client.lindex(_record_key(name), position)
        if found is None or (version is not None and version < 1):
            newest = self.versions(name)[-1]
            raise UnknownVersion(f"task {name} has versions 1 to {newest}, not {version}")
        return _parsed(name, found)

    def names(self) -> list[str]:
        """All tasks, sorted."""
        return sorted(as_text(name) for name in self._client.smembers(keys.ALL_TASKS))

    def newest(self) -> list[Newest]:
        """Each task's newest version, sorted by name, including unreadable ones."""
        return [
            Newest(name, version, _parsed_or_why(name, text))
            for name, version, text in self._newest_texts()
        ]

    def versions(self, name: str) -> list[int]:
        """A task's versions, oldest first.

        Raises:
            UnknownTask: The task does not exist.
        """
        count = int(self._client.llen(_record_key(name)))
        if not count:
            raise UnknownTask(self._unknown(name))
        return list(range(1, count + 1))

    def _newest_texts(self) -> Iterator[tuple[str, int, str | bytes]]:
        for name in self.names():
            version, text = self._newest([_record_key(name)])
            if text is not None:  # else the task was deleted after the names were read
                yield name, int(version), text

    def _users(self, name: str) -> list[str]:
        """Other tasks that draft from the corpus of task ``name``."""
        found = ((other, _corpus_of(text)) for other, _, text in self._newest_texts())
        return [other for other, corpus in found if corpus == name != other]

    def _unlink_all_but_records(self, name: str) -> None:
        for page in self._pages(name):
            if others := [key for key in page if as_text(key) != _record_key(name)]:
                self._client.unlink(*others)

    def _pages(self, name: str) -> Iterator[list[str | bytes]]:
        """Yields a task's keys in steps, since one command for all would block other clients."""
        pattern = keys.task_key(name, "*")  # names have no special characters of patterns
        cursor = -1
        while cursor:
            cursor, page = self._client.scan(max(cursor, 0), match=pattern, count=_PAGE)
            yield page

    def _unknown(self, name: str) -> str:
        known = self.names()
        more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
        listed = ", ".join(known[:_SHOWN_NAMES]) or "none yet, `tasc task create` makes one"
        return f"no task {name!r} at {url_of(self._client)}; known tasks: {listed}{more}"


def _record_key(name: str) -> str:
    return keys.task_key(name, "records")


def _corpus_of(text: str | bytes) -> object:
    """Reads the corpus's name from a record, even if the record is otherwise unreadable."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content.get("corpus") if isinstance(content, dict) else None


def _parsed_or_why(name: str, text: str | bytes) -> TaskRecord | ValueError:
    try:
        return _parsed(name, text)
    except ValueError as error:
        return error


def _parsed(name: str, text: str | bytes) -> TaskRecord:
    try:
        return TaskRecord.from_json(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the record of task {name} cannot be read: {error}") from error
