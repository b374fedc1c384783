"""A task's record as one flat set of named values, as people give, unset, see and compare them.

It knows the fields of records and nothing of what they mean.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from tasc_draft.settings import DraftSettings
from tasc_jobs.errors import UsageError
from tasc_store import NeuralDrafting, SamplingDefaults, TaskRecord

Values = dict[str, Any]

_PARTS = {"sampling": SamplingDefaults, "draft": DraftSettings}
_SAMPLING, _DRAFT = ({f.name for f in fields(part)} for part in _PARTS.values())
# By the names people use, those of `NeuralDrafting`.
NEURAL = {
    "drafter": "drafter",
    "proposer": "proposer",
    "draft_vocabulary": "vocabulary",
    "ranked_tokens": "ranked_tokens",
    "draft_depth": "depth",
    "draft_width": "width",
    "draft_nodes": "nodes",
    "draft_sure": "sure",
}
# Groups of values that are set and unset together, too.
GROUPS = {"sampling": _SAMPLING, "draft": _DRAFT, "drafter": set(NEURAL)}
# Draft settings with an option of their own.
_OWN_OPTION = {"mixture", "num_speculative_tokens", "min_prob"}


def flat(record: TaskRecord) -> Values:
    """Every value of a record by its name, those of its parts among them."""
    of_parts = (*_PARTS, "neural")
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in of_parts}
    neural = _no_neural()
    if record.neural is not None:
        neural = {name: getattr(record.neural, own) for name, own in NEURAL.items()}
    return {**values, **asdict(record.sampling), **asdict(record.draft), **neural}


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
            neural=_neural_of(values),
        )
    except ValueError as error:
        raise UsageError(by_option(str(error))) from error


def defaults() -> Values:
    """What each value is where nobody said, of those that need not be said."""
    own = {f.name: f.default for f in fields(TaskRecord) if f.default is not MISSING}
    del own["neural"]
    return {**own, **asdict(SamplingDefaults()), **asdict(DraftSettings()), **_no_neural()}


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


def _neural_of(values: Mapping[str, Any]) -> NeuralDrafting | None:
    given = {name: values[name] for name in NEURAL if name in values}
    if given.get("drafter") is None:
        for name, value in given.items():
            if value != _no_neural()[name]:
                raise UsageError(f"{option(name)} is {value}, and there is no --drafter; give one")
        return None
    try:
        return NeuralDrafting(**{NEURAL[name]: value for name, value in given.items()})
    except ValueError as error:
        field, blank, rest = str(error).partition(" ")
        called = next(name for name, own in NEURAL.items() if own == field)
        raise UsageError(f"{option(called)}{blank}{rest}") from error


def _no_neural() -> Values:
    """Of a task without a drafter, what one would get where nobody says."""
    own = {f.name: f.default for f in fields(NeuralDrafting)}
    return {name: own[field] for name, field in NEURAL.items()} | {"drafter": None}
