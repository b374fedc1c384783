"""A task's record as one flat set of named values, as people give, unset, see and compare them.

It knows the fields of records and nothing of what they mean.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from tasc_draft.settings import DraftSettings
from tasc_jobs.errors import UsageError
from tasc_store import SamplingDefaults, TaskRecord

Values = dict[str, Any]

_PARTS = {"sampling": SamplingDefaults, "draft": DraftSettings}
_SAMPLING, _DRAFT = ({f.name for f in fields(part)} for part in _PARTS.values())
# Groups of values that are set and unset together, too.
GROUPS = {"sampling": _SAMPLING, "draft": _DRAFT}
# Draft settings with an option of their own.
_OWN_OPTION = {"mixture", "num_speculative_tokens", "min_prob"}


def flat(record: TaskRecord) -> Values:
    """Every value of a record by its name, those of its parts among them."""
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in _PARTS}
    return {**values, **asdict(record.sampling), **asdict(record.draft)}


def record_of(values: Mapping[str, Any]) -> TaskRecord:
    """The record of such values; those left out are the defaults.

    Raises:
        UsageError: A value is refused; the message names its option.
    """
    rest = {k: v for k, v in values.items() if not any(k in names for names in GROUPS.values())}
    try:
        return TaskRecord(
            **rest,
            sampling=SamplingDefaults(**{k: v for k, v in values.items() if k in _SAMPLING}),
            draft=DraftSettings(**{k: v for k, v in values.items() if k in _DRAFT}),
        )
    except ValueError as error:
        raise UsageError(by_option(str(error))) from error


def defaults() -> Values:
    """What each value is where nobody said, of those that need not be said."""
    own = {f.name: f.default for f in fields(TaskRecord) if f.default is not MISSING}
    return {**own, **asdict(SamplingDefaults()), **asdict(DraftSettings())}


def option(name: str) -> str:
    """How a value is called on the command line."""
    if name in _DRAFT - _OWN_OPTION:
        return f"--draft {name}"
    return f"--{name.replace('_', '-')}"


def by_option(message: str) -> str:
    """A message that begins with a value's name, with its option's name instead."""
    name, blank, rest = message.partition(" ")
    known = name in defaults() or name in ("model", "template")
    return f"{option(name)}{blank}{rest}" if known else message
