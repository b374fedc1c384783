"""A task's record and its versions for people and for machines."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tasc_jobs.tasks.values import flat
from tasc_store import TaskRecord, TaskStore

_MOST_IN_TABLE, _MOST_IN_CHANGE = 300, 40  # characters
_QUOTED = ("template", "regex", "stop")
_LABELS_SHOWN = 5

Changes = dict[str, tuple[Any, Any]]


def as_json(record: TaskRecord) -> dict[str, Any]:
    """Every field, also those that are not set."""
    return asdict(record)


def history(store: TaskStore, name: str) -> Iterator[tuple[int, Changes]]:
    """Each version with what differs from the one before, oldest first; the first has nothing."""
    before: TaskRecord | None = None
    for version in store.versions(name):
        record = store.get(name, version)
        yield version, {} if before is None else changes(before, record)
        before = record


def changes(old: TaskRecord, new: TaskRecord) -> Changes:
    """Values that differ, by name: the old and the new one."""
    before, after = flat(old), flat(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def changes_in_words(found: Changes) -> str:
    return ", ".join(_change(name, old, new) for name, (old, new) in found.items())


def table(record: TaskRecord, version: int, past: list[tuple[int, Changes]]) -> str:
    """A line for each value, then one for each version."""
    values = flat(record)
    width = max(map(len, values)) + 2
    lines = [f"{'version':{width}}{version} of {len(past)}"]
    lines += [f"{k:{width}}{_value(k, v, _MOST_IN_TABLE)}" for k, v in values.items()]
    lines += ["", "versions"]
    for number, found in past:
        said = "first" if number == 1 else changes_in_words(found) or "nothing"
        lines.append(f"{number:>4}  {said}")
    return "\n".join(lines)


def listed(version: int, record: TaskRecord) -> str:
    return f"{record.name}\t{record.model}\t{record.adapter or '-'}\tversion {version}"


def _change(name: str, old: Any, new: Any) -> str:
    if name == "choices" and old and new:
        return f"choices +{len(set(new) - set(old))} -{len(set(old) - set(new))} labels"
    return f"{name} {_value(name, old, _MOST_IN_CHANGE)} -> {_value(name, new, _MOST_IN_CHANGE)}"


def _value(name: str, value: Any, most: int) -> str:
    if value is None or value == ():
        return "unset"
    if name == "choices":
        first = ", ".join(value[:_LABELS_SHOWN]) + (", ..." if len(value) > _LABELS_SHOWN else "")
        return _short(f"{len(value)} labels: {first}", most)
    if isinstance(value, tuple) and name not in _QUOTED:
        return _short(", ".join(value), most)
    return _short(json.dumps(value, ensure_ascii=False) if name in _QUOTED else str(value), most)


def _short(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}... ({len(line)} characters)"
