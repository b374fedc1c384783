"""The register of tasks in Redis: records, every version of which is kept."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from tasc_store import keys
from tasc_store.client import as_text, translated, url_of
from tasc_store.corpus import CorpusStore
from tasc_store.errors import TaskChanged, TaskInUse, UnknownTask, UnknownVersion
from tasc_store.tasks.record import TaskRecord

_SHOWN_NAMES = 20
_PAGE = 1000  # keys looked at by one SCAN: other clients wait meanwhile

# Appends only what differs from the newest record, so that putting twice is putting once. ARGV[2]
# is the version it must come behind, or nothing; below 0: minus the newest version, less 1.
_PUT = """
local count = redis.call('LLEN', KEYS[1])
if count > 0 and redis.call('LINDEX', KEYS[1], -1) == ARGV[1] then return count end
if ARGV[2] ~= '' and tonumber(ARGV[2]) ~= count then return -1 - count end
return redis.call('RPUSH', KEYS[1], ARGV[1])
"""

# The record as it was written, byte for byte.
_USE = """
local found = redis.call('LINDEX', KEYS[1], ARGV[1] - 1)
if not found then return 0 end
if redis.call('LINDEX', KEYS[1], -1) == found then return redis.call('LLEN', KEYS[1]) end
return redis.call('RPUSH', KEYS[1], found)
"""

# A script and no MULTI, whose commands a full server refuses.
_NEWEST = "return {redis.call('LLEN', KEYS[1]), redis.call('LINDEX', KEYS[1], -1)}"


@dataclass(frozen=True)
class Newest:
    """A task's newest version; ``record`` is the reason where it cannot be read."""

    name: str
    version: int
    record: TaskRecord | ValueError


class TaskStore:
    """Task records in Redis. A record is never changed: putting another adds a version.

    Every method raises `StoreError` (see `translated`) when Redis fails, and ValueError where a
    record that it reads is none.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._url = url_of(client)
        self._put = client.register_script(_PUT)
        self._use = client.register_script(_USE)
        self._newest = client.register_script(_NEWEST)

    def put(self, record: TaskRecord, *, after: int | None = None) -> int:
        """Make a record the task's newest; its version, from 1. An equal newest one stays.

        Args:
            after: The newest version so far, as the caller knows it, 0 for none; unset: any.

        Raises:
            TaskChanged: Another version is the newest.
        """
        expected = "" if after is None else after
        with translated(self._url):
            version = int(self._put([_record_key(record.name)], [record.to_json(), expected]))
            if version >= 0:
                self._client.sadd(keys.ALL_TASKS, record.name)
                return version
        raise TaskChanged(
            f"task {record.name} has {-1 - version} versions by now, not {after}: somebody else "
            f"changed it; look at `tasc task show {record.name}` and try again"
        )

    def use(self, name: str, version: int) -> int:
        """Put an older version's record again; the number it has as the newest one.

        Nothing happens where the newest is that version, or equal to it.

        Raises:
            UnknownTask: No such task.
            UnknownVersion: The task has no such version.
            UnknownTask: The task whose corpus it drafts from is gone.
        """
        self.require_corpus(self.get(name, version))
        with translated(self._url):
            newest = int(self._use([_record_key(name)], [version]))
        if not newest:
            raise UnknownTask(self._unknown(name))
        return newest

    def require_corpus(self, record: TaskRecord) -> None:
        """Raises UnknownTask: the corpus it drafts from is of no task, and has no rows either."""
        name = record.corpus_name
        with translated(self._url):
            found = name == record.name or bool(self._client.exists(_record_key(name)))
        if not found and not len(CorpusStore(self._client, name)):
            raise UnknownTask(
                f"task {record.name} is to draft from the corpus of {name}: {self._unknown(name)}"
            )

    def left(self, name: str) -> bool:
        """Whether there is anything of a task, be it without a record."""
        with translated(self._url):
            return any(self._pages(name))

    def delete(self, name: str) -> None:
        """Remove a task: its corpus, its draft indexes of all tokenizers, its records.

        What a deletion that was cut short has left, or an ingest that outlived one, goes too. Its
        newest record is enough for another task to count as one that drafts from it. Indexes that
        a service has mapped stay with it until it ends.

        Raises:
            UnknownTask: There is nothing of such a task.
            TaskInUse: Other tasks draft from its corpus.
            ValueError: Nothing can have that name.
        """
        if not self.left(keys.checked_task(name)):
            raise UnknownTask(self._unknown(name))
        if users := self._users(name):
            raise TaskInUse(
                f"{', '.join(users)} draft from the corpus of task {name}; delete them first, or "
                "give them another --corpus"
            )
        with translated(self._url):
            self._unlink_all_but_records(name)
            self._client.srem(keys.ALL_TASKS, name)
            self._client.unlink(_record_key(name))
            # An ingest that ran meanwhile: what it wrote would be a later task's of that name.
            self._unlink_all_but_records(name)

    def get(self, name: str, version: int | None = None) -> TaskRecord:
        """A task's record, the newest unless a version is named.

        Raises:
            UnknownTask: No such task.
            UnknownVersion: The task has no such version.
        """
        position = -1 if version is None else version - 1
        with translated(self._url):
            found = self._client.lindex(_record_key(name), position)
        if found is None or (version is not None and version < 1):
            newest = self.versions(name)[-1]
            raise UnknownVersion(f"task {name} has versions 1 to {newest}, not {version}")
        return _parsed(name, found)

    def names(self) -> list[str]:
        """All tasks, sorted."""
        with translated(self._url):
            return sorted(as_text(name) for name in self._client.smembers(keys.ALL_TASKS))

    def newest(self) -> list[Newest]:
        """Each task's newest version, sorted by name; also of those that cannot be read."""
        return [
            Newest(name, version, _parsed_or_why(name, text))
            for name, version, text in self._newest_texts()
        ]

    def versions(self, name: str) -> list[int]:
        """A task's versions, oldest first.

        Raises:
            UnknownTask: No such task.
        """
        with translated(self._url):
            count = int(self._client.llen(_record_key(name)))
        if not count:
            raise UnknownTask(self._unknown(name))
        return list(range(1, count + 1))

    def _newest_texts(self) -> Iterator[tuple[str, int, str | bytes]]:
        for name in self.names():
            with translated(self._url):
                version, text = self._newest([_record_key(name)])
            if text is not None:  # else it was deleted since we asked for names
                yield name, int(version), text

    def _users(self, name: str) -> list[str]:
        """Other tasks that draft from its corpus."""
        found = ((other, _corpus_of(text)) for other, _, text in self._newest_texts())
        return [other for other, corpus in found if corpus == name != other]

    def _unlink_all_but_records(self, name: str) -> None:
        for page in self._pages(name):
            if others := [key for key in page if as_text(key) != _record_key(name)]:
                self._client.unlink(*others)

    def _pages(self, name: str) -> Iterator[list[str | bytes]]:
        """A task's keys, in steps: one command for all would keep everybody else waiting."""
        pattern = keys.task_key(name, "*")  # nothing of a name means anything in a pattern
        cursor = -1
        while cursor:
            cursor, page = self._client.scan(max(cursor, 0), match=pattern, count=_PAGE)
            yield page

    def _unknown(self, name: str) -> str:
        known = self.names()
        more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
        listed = ", ".join(known[:_SHOWN_NAMES]) or "none yet, `tasc task create` makes one"
        return f"no task {name!r} at {self._url}; known tasks: {listed}{more}"


def _record_key(name: str) -> str:
    return keys.task_key(name, "records")


def _corpus_of(text: str | bytes) -> object:
    """All that a deletion needs of other tasks, also of records that are unreadable else."""
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
