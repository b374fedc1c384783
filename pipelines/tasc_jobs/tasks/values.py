"""A task's record as one flat mapping of named values, and the values that options give."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tasc_draft.settings import DraftSettings
from tasc_jobs.errors import UsageError
from tasc_jobs.task_inputs import read_files
from tasc_jobs.tasks.options import TaskOptions
from tasc_protocol import SamplingDefaults
from tasc_protocol.request import MOST_CHOICE_BYTES, MOST_GUIDE_BYTES
from tasc_runtime.data.file_kinds import wrong_encoding
from tasc_runtime.data.rows import Fields
from tasc_runtime.engine_settings import fault_of
from tasc_store import NeuralDrafting, TaskRecord
from tasc_text import ChatTemplate
from tasc_text.template import FIELD

Values = dict[str, Any]

_PARTS = {"sampling": SamplingDefaults, "draft": DraftSettings}
_SAMPLING, _DRAFT = ({f.name for f in fields(part)} for part in _PARTS.values())
# Names of the fields of `NeuralDrafting` by the names of the options.
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
# Names of the fields of `ChatTemplate` by the names of the options.
CHAT = {
    "chat_template": "source",
    "chat_tokens": "tokens",
    "system_prompt": "system",
    "few_shot": "shots",
}
# Groups of values that can also be unset together.
GROUPS = {"sampling": _SAMPLING, "draft": _DRAFT, "drafter": set(NEURAL), "chat": set(CHAT)}
# Draft settings with their own option.
_OWN_OPTION = {"mixture", "num_speculative_tokens", "min_prob"}
# Maximum size of labels in JSON, which may write one byte of a label as six.
_MAX_LABEL_BYTES = 6 * MOST_CHOICE_BYTES
_KINDS = {int: "an integer", float: "a number"}


def flat(record: TaskRecord) -> Values:
    """Returns every value of a record by its name, including those of its parts."""
    of_parts = (*_PARTS, "neural", "chat")
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in of_parts}
    neural, chat = _no_neural(), no_chat()
    if record.neural is not None:
        neural = {name: getattr(record.neural, own) for name, own in NEURAL.items()}
    if record.chat is not None:
        chat = {name: getattr(record.chat, own) for name, own in CHAT.items()}
    return {**values, **asdict(record.sampling), **asdict(record.draft), **neural, **chat}


def record_of(values: Mapping[str, Any]) -> TaskRecord:
    """Returns the record of values named as in `flat`; missing values have their defaults.

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
            chat=_chat_of(values),
        )
    except ValueError as error:
        raise UsageError(by_option(str(error))) from error


def defaults() -> Values:
    """Returns the defaults of all values that have one."""
    own = {f.name: f.default for f in fields(TaskRecord) if f.default is not MISSING}
    del own["neural"], own["chat"]
    parts = asdict(SamplingDefaults()) | asdict(DraftSettings())
    return {**own, **parts, **_no_neural(), **no_chat()}


def option(name: str) -> str:
    """Returns the command-line option of a value."""
    if name in _DRAFT - _OWN_OPTION:
        return f"--draft {name}"
    return f"--{name.replace('_', '-')}"


def by_option(message: str) -> str:
    """Replaces a value's name at the start of a message with its option's name."""
    name, blank, rest = message.partition(" ")
    known = name in defaults() or name in ("model", "template")
    return f"{option(name)}{blank}{rest}" if known else message


def _neural_of(values: Mapping[str, Any]) -> NeuralDrafting | None:
    given = {name: values[name] for name in NEURAL if name in values}
    if given.get("drafter") is None:
        for name, value in given.items():
            if value != _no_neural()[name]:
                raise UsageError(f"{option(name)} is {value}, but no --drafter is given; add it")
        return None
    try:
        return NeuralDrafting(**{NEURAL[name]: value for name, value in given.items()})
    except ValueError as error:
        field, blank, rest = str(error).partition(" ")
        called = next(name for name, own in NEURAL.items() if own == field)
        raise UsageError(f"{option(called)}{blank}{rest}") from error


def _no_neural() -> Values:
    """Returns the neural values of a task without a drafter."""
    own = {f.name: f.default for f in fields(NeuralDrafting)}
    return {name: own[field] for name, field in NEURAL.items()} | {"drafter": None}


def no_chat() -> Values:
    """Returns the chat values of a task without a chat template."""
    return {"chat_template": None, "chat_tokens": (), "system_prompt": None, "few_shot": ()}


def _chat_of(values: Mapping[str, Any]) -> ChatTemplate | None:
    given = {own: values[name] for name, own in CHAT.items() if values.get(name)}
    if "source" in given:
        return ChatTemplate(**given)
    if given.keys() - {"tokens"}:
        raise UsageError("--system-prompt and --few-shot need --chat-template; add it")
    return None


def given_values(options: TaskOptions) -> Values:
    """Returns the given values, named as in `flat`; folders become absolute paths.

    Raises:
        UsageError: A file cannot be read, or two options set the same value.
    """
    own = ("choice", "choices", "schema", "draft", "few_shot")
    values = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in own}
    values["model"], values["adapter"] = _placed(options.model), _placed(options.adapter)
    values["drafter"] = _placed(options.drafter)
    values["adapters"] = tuple(map(_named, options.adapters)) if options.adapters else None
    values["template"] = _with_breaks(options.template)
    values["label_end"] = _with_breaks(options.label_end)
    values["stop"] = tuple(map(_with_breaks, options.stop)) if options.stop else None
    values["choices"] = _labels(options)
    if options.few_shot:
        rows = read_files([options.few_shot], Fields()).rows
        values["few_shot"] = tuple((row.input, row.output) for row in rows)
    values["schema"] = (
        read_text("schema", options.schema, MOST_GUIDE_BYTES) if options.schema else None
    )
    found = {name: value for name, value in values.items() if value is not None}
    if "chat_template" in found and "template" in found:
        raise UsageError("--template and --chat-template are both given; a task has one of them")
    if "chat_template" in found:
        found["template"] = FIELD
    for name, value in _draft_values(options.draft or ()):
        if name in found:
            raise UsageError(f"{name} is given twice, once by --draft; leave one out")
        found[name] = value
    return found


def _placed(model: str | None) -> str | None:
    """Returns the absolute path of a folder, or a hub name unchanged.

    The path is absolute because other processes have other working directories.
    """
    if not model or not (folder := Path(model).expanduser()).is_dir():
        return model
    return str(folder.resolve())


def _named(pair: str) -> tuple[str, str]:
    """Returns an adapter's name and its folder or hub name."""
    name, equals, place = pair.partition("=")
    if not (name and equals and place):
        raise UsageError(f"--adapters is {pair!r}; write NAME=FOLDER or NAME=HUB_NAME")
    return name, _placed(place) or place


def _with_breaks(text: str | None) -> str | None:
    return None if text is None else text.replace("\\n", "\n")


def _labels(options: TaskOptions) -> tuple[str, ...] | None:
    if options.choice is None and options.choices is None:
        return None
    from_file = () if options.choices is None else labels_of(options.choices)
    return (*(options.choice or ()), *from_file)


def labels_of(path: Path) -> tuple[str, ...]:
    """Returns the labels of a file: one per line, or a list in a ``.json`` file.

    Blanks around a label are a part of it.

    Raises:
        UsageError: The file cannot be read or has no labels, or labels on separate lines differ
            only in surrounding blanks.
    """
    text = read_text("choices", path, _MAX_LABEL_BYTES)
    if path.suffix == ".json":
        try:
            labels = TypeAdapter(tuple[str, ...]).validate_json(text)
        except ValidationError as error:
            raise UsageError(
                f"--choices {path} is not a list of texts: {fault_of(error)}"
            ) from error
    else:
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        labels = tuple(line for line in lines if line)
        if text.startswith("[") and _is_json(text):
            raise UsageError(
                f"--choices {path} is a JSON list without the suffix .json; rename the file, or "
                "write one label per line"
            )
        bare = Counter(label.strip() for label in set(labels))
        if twice := next((label for label, count in bare.items() if count > 1), None):
            raise UsageError(
                f"--choices {path} has {twice!r:.80} several times with different blanks around "
                "it; keep one of these lines, or write a .json list to keep all"
            )
    if not labels:
        raise UsageError(
            f"--choices {path} has no labels; write one label per line, or a .json list"
        )
    return labels


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_text(name: str, path: Path, max_bytes: int) -> str:
    """Returns the text of a file that is given by an option.

    Raises:
        UsageError: The file cannot be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise UsageError(f"{option(name)} {path} is larger than {max_bytes} bytes; shorten it")
        if words := wrong_encoding(content):
            raise UsageError(f"{option(name)} {path} {words}")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{option(name)} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{option(name)} {path} is not UTF-8 ({error}); convert it") from error


def _draft_values(pairs: Iterable[str]) -> Iterable[tuple[str, Any]]:
    known = asdict(DraftSettings())
    for pair in pairs:
        key, equals, text = pair.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name not in known:
            raise UsageError(
                f"--draft is {pair!r}; write KEY=VALUE, where KEY is one of {', '.join(known)}"
            )
        yield name, _draft_value(name, text.strip(), type(known[name]))


def _draft_value(name: str, text: str, kind: type[Any]) -> Any:
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return kind(text)
    except ValueError as error:
        raise UsageError(f"--draft {name} is {text!r}; it must be {_KINDS[kind]}") from error
