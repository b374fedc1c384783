"""Tasks created, changed, rolled back and described in a store; the commands' work. No output."""

from collections.abc import Iterable
from dataclasses import dataclass

from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.base_model import BaseModel
from tasc_jobs.tasks.checks import check_record
from tasc_jobs.tasks.given import given_values
from tasc_jobs.tasks.options import TaskOptions
from tasc_jobs.tasks.values import GROUPS, Values, defaults, flat, record_of
from tasc_store import TaskRecord, TaskStore, UnknownTask
from tasc_store.keys import checked_task


@dataclass(frozen=True)
class Registered:
    """A task's new newest version.

    Attributes:
        longest_label: Tokens of the longest label, its end counted; 0 without labels.
    """

    version: int
    record: TaskRecord
    longest_label: int


def create(store: TaskStore, name: str, options: TaskOptions, replace: bool) -> Registered:
    """Register a task.

    Args:
        replace: Whether a task of that name gets a new version, of these options alone.

    Raises:
        UsageError: The task is there, or a value is refused.
    """
    try:
        checked_task(name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    newest = _newest_version(store, name)
    if newest and not replace:
        raise UsageError(
            f"task {name} is there already, at version {newest}; change it with `tasc task set "
            f"{name}`, or make a new version of these options alone with --replace"
        )
    return _put(store, {"name": name, **given_values(options)}, newest)


def change(
    store: TaskStore, name: str, options: TaskOptions, unset: Iterable[str]
) -> tuple[TaskRecord, Registered]:
    """Make a new version in which only what is given differs; the old record, and the new one.

    Args:
        unset: Values, or groups of them, to be as if nobody had ever given them.

    Raises:
        UsageError: Nothing is given, or a value is refused.
    """
    newest = store.versions(name)[-1]
    old = store.get(name, newest)
    given, reset = given_values(options), _reset(unset)
    if not given and not reset:
        raise UsageError("nothing to change; give an option, see `tasc task set --help`")
    if both := sorted(given.keys() & reset.keys()):
        raise UsageError(f"{', '.join(both)} is both given and --unset; leave one out")
    return old, _put(store, {**flat(old), **reset, **given}, newest)


def _put(store: TaskStore, values: Values, newest: int) -> Registered:
    model = BaseModel.open(values["model"], values.get("revision"))
    record = record_of({**values, "fingerprint": model.tokenizer.fingerprint})
    try:
        store.require_corpus(record)
    except UnknownTask as error:
        raise UsageError(f"--corpus: {error}") from error
    check_record(record, model)
    labels = model.tokenizer.encode_outputs(record.choices) if record.choices else ()
    longest = max((len(label) + 1 for label in labels), default=0)
    return Registered(store.put(record, after=newest), record, longest)


def _newest_version(store: TaskStore, name: str) -> int:
    try:
        return store.versions(name)[-1]
    except UnknownTask:
        return 0


def _reset(unset: Iterable[str]) -> Values:
    known = defaults()
    found: Values = {}
    for said in unset:
        name = said.strip("-").replace("-", "_")
        names = GROUPS.get(name, {name})
        if not names <= known.keys():
            fields = ", ".join(dict.fromkeys([*known, *GROUPS]))
            raise UsageError(f"--unset {said!r} is no field that has a default; give {fields}")
        found |= {n: known[n] for n in names}
    return found
