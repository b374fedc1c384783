"""Tasks created, changed, rolled back and described in a store; the commands' work. No output."""

from collections.abc import Iterable

from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.base_model import BaseModel
from tasc_jobs.tasks.checks import check_record
from tasc_jobs.tasks.given import given_values
from tasc_jobs.tasks.options import TaskOptions
from tasc_jobs.tasks.values import GROUPS, Values, defaults, flat, record_of
from tasc_store import TaskRecord, TaskStore, UnknownTask
from tasc_store.keys import checked_task


def create(
    store: TaskStore, name: str, options: TaskOptions, replace: bool
) -> tuple[int, TaskRecord]:
    """Register a task; its version and its record.

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
    record = _checked({"name": name, **given_values(options)})
    return store.put(record, after=newest), record


def change(
    store: TaskStore, name: str, options: TaskOptions, unset: Iterable[str]
) -> tuple[int, TaskRecord, TaskRecord]:
    """Make a new version in which only what is given differs; its number, the old and new record.

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
    record = _checked({**flat(old), **reset, **given})
    return store.put(record, after=newest), old, record


def _checked(values: Values) -> TaskRecord:
    model = BaseModel.open(values["model"], values.get("revision"))
    record = record_of({**values, "fingerprint": model.tokenizer.fingerprint})
    check_record(record, model)
    return record


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
            fields = ", ".join([*known, *GROUPS])
            raise UsageError(f"--unset {said!r} is no field that has a default; give {fields}")
        found |= {n: known[n] for n in names}
    return found
