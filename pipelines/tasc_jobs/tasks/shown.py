"""Formats a task's record and its versions for terminals and as JSON values."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tasc_jobs.hints import command
from tasc_jobs.index.publish import Tuned
from tasc_jobs.tasks.register import Registered
from tasc_jobs.tasks.values import CHAT, NEURAL, flat
from tasc_runtime.data.saved_task import SavedTask
from tasc_store import Artifact, Newest, TaskRecord, TaskStore

_MAX_IN_TABLE, _MAX_IN_CHANGE = 300, 40  # characters
_QUOTED = ("template", "regex", "stop", "chat_template", "system_prompt")
_PAIRS = ("adapters", "chat_tokens", "few_shot")
_LABELS_SHOWN = 5

LIST_HEADER = "name\tmodel\tadapter\tversion"

Changes = dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Past:
    """A version of a task.

    Attributes:
        changed: Differences from the version before; empty for the first version.
        same_as: The earliest version with an equal record; None if no earlier version has one.
    """

    version: int
    changed: Changes
    same_as: int | None = None


def history(store: TaskStore, name: str) -> Iterator[Past]:
    """Yields each version, the oldest first."""
    before: TaskRecord | None = None
    firsts: dict[TaskRecord, int] = {}
    for version in store.versions(name):
        record = store.get(name, version)
        changed = {} if before is None else changes(before, record)
        yield Past(version, changed, firsts.get(record))
        firsts.setdefault(record, version)
        before = record


def changes(old: TaskRecord, new: TaskRecord) -> Changes:
    """Returns the old and the new value of each field that differs, by name."""
    before, after = flat(old), flat(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def changes_in_words(found: Changes) -> str:
    return ", ".join(_change(name, old, new) for name, (old, new) in found.items())


def table(record: TaskRecord, version: int, past: list[Past], by_tune: Tuned | None = None) -> str:
    """Returns a line for each value, then one for each version.

    Args:
        by_tune: Draft settings that replace those of the record.
    """
    values = flat(record)
    if record.neural is None:
        values = {k: v for k, v in values.items() if k == "drafter" or k not in NEURAL}
    if record.chat is None:
        values = {k: v for k, v in values.items() if k == "chat_template" or k not in CHAT}
    width = max(map(len, values)) + 2
    lines = [f"{'version':{width}}{version} of {len(past)}"]
    shown = {k: _value(k, v, _MAX_IN_TABLE) for k, v in values.items()}
    if by_tune:
        lines.append(f"{'tuned':{width}}by tasc tune, with index version {by_tune.index_version}")
        for name, value in asdict(by_tune.settings).items():
            if value != values[name]:
                own = _value(name, value, _MAX_IN_TABLE)
                shown[name] = f"{own} (tuned; the record has {shown[name]})"
    lines += [f"{name:{width}}{value}" for name, value in shown.items()]
    lines += ["", "versions"]
    lines += [f"{each.version:>4}  {_past(each)}" for each in past]
    return "\n".join(lines)


def listed(newest: Newest) -> str:
    record = newest.record
    if isinstance(record, ValueError):
        return f"{newest.name}\t{_short(str(record), _MAX_IN_TABLE)}\t-\t{newest.version}"
    return f"{newest.name}\t{record.model}\t{_adapters(record) or '-'}\t{newest.version}"


def _adapters(record: TaskRecord) -> str:
    return record.adapter or ", ".join(record.adapter_names)


def listed_as_json(newest: Newest) -> dict[str, Any]:
    """Returns the record with its version, or name, version and reason if it is unreadable."""
    record = newest.record
    if isinstance(record, ValueError):
        return {"name": newest.name, "version": newest.version, "unreadable": str(record)}
    return {**asdict(record), "version": newest.version}


def registered(new: Registered) -> str:
    """Returns a note on a task's labels; empty if there are none."""
    labels = len(new.record.choices)
    if not labels:
        return ""
    words = "label" if labels == 1 else "labels"
    return f"; {labels} {words} of up to {new.longest_label} tokens, end-of-sequence included"


def taken(name: str, saved: SavedTask, artifact: Artifact | None) -> str:
    """Returns lines on a saved task's index, rows and engine settings.

    Each line begins with \\n.
    """
    if artifact is None:
        lines = "\nno index: the task was saved without a corpus"
    elif not saved.index.corpus.documents:
        lines = (
            f"\nindex version {artifact.version} stays current: the task was saved without a corpus"
        )
    else:
        lines = (
            f"\nindex version {artifact.version} is current: "
            f"{saved.index.corpus.documents:,} outputs\nnot imported: the rows of the corpus, "
            "which the folder does not have; run `tasc ingest` before "
            f"`{command('build-index', name)}`"
        )
    if engine := saved.engine.model_dump(exclude_defaults=True):
        settings = ", ".join(f"{field}: {value}" for field, value in engine.items())
        lines += (
            "\nnot imported: the engine's settings; put them into the settings file of "
            f"`tasc serve`, as engine: {{{settings}}}"
        )
    return lines


def _past(past: Past) -> str:
    if past.version == 1:
        return "first"
    if past.same_as is not None:
        return f"same as version {past.same_as}"
    return changes_in_words(past.changed) or "no changes"


def _change(name: str, old: Any, new: Any) -> str:
    if name == "choices" and old and new:
        return f"choices +{len(set(new) - set(old))} -{len(set(old) - set(new))} labels"
    return f"{name} {_value(name, old, _MAX_IN_CHANGE)} -> {_value(name, new, _MAX_IN_CHANGE)}"


def _value(name: str, value: Any, max_length: int) -> str:
    if value is None or value == ():
        return "unset"
    if name in _PAIRS:
        return _short(", ".join(f"{called}={place}" for called, place in value), max_length)
    if name == "choices":
        first = ", ".join(value[:_LABELS_SHOWN]) + (", ..." if len(value) > _LABELS_SHOWN else "")
        return _short(f"{len(value)} labels: {first}", max_length)
    if isinstance(value, tuple) and name not in _QUOTED:
        return _short(", ".join(value), max_length)
    text = json.dumps(value, ensure_ascii=False) if name in _QUOTED else str(value)
    return _short(text, max_length)


def _short(text: str, max_length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_length else f"{line[:max_length]}... ({len(line)} characters)"
