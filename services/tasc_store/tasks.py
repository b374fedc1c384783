"""A task's record, frozen and versioned. It loads no model and renders no template."""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Self

import redis

from tasc_draft.settings import DraftSettings
from tasc_store import keys
from tasc_store.client import as_text, translated, url_of
from tasc_store.errors import UnknownTask, UnknownVersion

_FIELD = "{input}"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHOWN_NAMES = 20

# Appends only what differs from the newest record, so that putting twice is putting once.
_PUT = """
local count = redis.call('LLEN', KEYS[1])
if count > 0 and redis.call('LINDEX', KEYS[1], -1) == ARGV[1] then return count end
return redis.call('RPUSH', KEYS[1], ARGV[1])
"""


@dataclass(frozen=True)
class TaskRecord:
    """Everything that says what a task is.

    Attributes:
        name: Letters, digits, ``.``, ``_`` and ``-``; at most 64.
        model: Hub name or folder of the base model.
        fingerprint: Fingerprint of the target's tokenizer.
        template: Prompt with ``{input}`` exactly once.
        adapter: Hub name or folder of a PEFT adapter.
        revision: Revision of the base model on the hub.
        dtype: float32, bfloat16, float16 or float64.
        stop: Strings any of which ends an answer.
        max_tokens: Most tokens of an answer, where a request does not say.
        corpus: The task whose corpus feeds this one's drafts; unset: its own.
        draft: How the task is drafted.

    Raises:
        ValueError: A value is of the wrong kind or outside its range.
    """

    name: str
    model: str
    fingerprint: str
    template: str
    adapter: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    corpus: str | None = None
    draft: DraftSettings = field(default_factory=DraftSettings)

    def __post_init__(self) -> None:
        for name in ("name", "model", "fingerprint", "template", "adapter", "revision", "corpus"):
            _check_text(name, getattr(self, name))
        keys.checked_task(self.name)
        keys.checked_task(self.corpus_name)
        keys.checked_fingerprint(self.fingerprint)
        if (found := self.template.count(_FIELD)) != 1:
            raise ValueError(f"template has {_FIELD} {found} times; put it in exactly once")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; use one of {', '.join(_DTYPES)}")
        if not isinstance(self.stop, tuple) or not all(_is_text(s) for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must be a list of non-empty strings")
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens!r}; it must be an integer above 0")

    @property
    def corpus_name(self) -> str:
        """The task whose corpus feeds this one's drafts."""
        return self.name if self.corpus is None else self.corpus

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record written by `to_json`, or by hand: fields with a default may be absent.

        Raises:
            ValueError: It is no JSON object, a field is unknown or missing, or a value is wrong.
        """
        content = _object("task record", json.loads(text), cls)
        if "stop" in content and isinstance(content["stop"], list):
            content["stop"] = tuple(content["stop"])
        if "draft" in content:
            draft = _object("draft", content["draft"], DraftSettings)
            content["draft"] = DraftSettings(**draft)
        return cls(**content)


class TaskStore:
    """Task records in Redis. A record is never changed: putting another adds a version.

    Every method raises `StoreError` (see `translated`) when Redis fails.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._url = url_of(client)
        self._put = client.register_script(_PUT)

    def put(self, record: TaskRecord) -> int:
        """Make a record the task's newest; its version, from 1. An equal newest one stays."""
        with translated(self._url):
            version = int(self._put([_record_key(record.name)], [record.to_json()]))
            self._client.sadd(keys.ALL_TASKS, record.name)
        return version

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
        return TaskRecord.from_json(found)

    def names(self) -> list[str]:
        """All tasks, sorted."""
        with translated(self._url):
            return sorted(as_text(name) for name in self._client.smembers(keys.ALL_TASKS))

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

    def _unknown(self, name: str) -> str:
        known = self.names()
        more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
        listed = ", ".join(known[:_SHOWN_NAMES]) or "none yet"
        return f"no task {name!r} at {self._url}; known tasks: {listed}{more}"


def _record_key(name: str) -> str:
    return keys.task_key(name, "records")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_text(name: str, value: object) -> None:
    if value is None and name in ("adapter", "revision", "corpus"):
        return
    if not _is_text(value):
        raise ValueError(f"{name} is {value!r}; it must be a non-empty string")


def _object(what: str, content: Any, cls: type[Any]) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{what} is {content!r:.80}; it must be a JSON object")
    known = {f.name: f for f in fields(cls)}
    if unknown := sorted(content.keys() - known.keys()):
        raise ValueError(
            f"{what} has unknown fields {', '.join(unknown)}; known are {', '.join(known)}"
        )
    needed = (n for n, f in known.items() if f.default is f.default_factory is MISSING)
    if missing := [n for n in needed if n not in content]:
        raise ValueError(f"{what} lacks {', '.join(missing)}; add what is missing")
    return dict(content)
