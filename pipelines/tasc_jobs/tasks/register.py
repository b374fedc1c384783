"""Creates and changes tasks in a store, after a check that the model supports the record."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import redis

from tasc_draft import write_index
from tasc_engine.model.folder import int8_fault
from tasc_jobs.errors import UsageError
from tasc_jobs.index.publish import publish_file
from tasc_jobs.tasks.generation_defaults import GenerationDefaults
from tasc_jobs.tasks.model_folders import BaseModel, check_adapter, check_drafter, model_settings
from tasc_jobs.tasks.options import TaskOptions
from tasc_jobs.tasks.values import (
    CHAT,
    GROUPS,
    Values,
    by_option,
    defaults,
    flat,
    given_values,
    no_chat,
    option,
    record_of,
)
from tasc_protocol import GuideSpec
from tasc_runtime.data.saved_task import SavedTask
from tasc_runtime.errors import ServiceError
from tasc_runtime.models import chat_template, dtype_here, template_of, trained_prompt
from tasc_runtime.sampling_options import guide_of
from tasc_store import Artifact, ArtifactStore, TaskRecord, TaskStore, UnknownTask
from tasc_store.keys import checked_task
from tasc_text import ChatTemplate, PromptTemplate, TextError, is_unicode, resolve_folder
from tasc_text.template import FIELD

_TEXT = "a"  # a text that every vocabulary has
_CUT = "\ufffd"  # decoders write this for bytes that are not a character


@dataclass(frozen=True)
class Registered:
    """A version that was registered.

    Attributes:
        longest_label: Number of tokens of the longest label, end-of-sequence included; 0 without
            labels.
        unused: Settings in the model's files that affect answers and are not in the record.
    """

    version: int
    record: TaskRecord
    longest_label: int
    unused: GenerationDefaults


def create(store: TaskStore, name: str, options: TaskOptions, replace: bool) -> Registered:
    """Register a task.

    Args:
        replace: Whether an existing task gets a new version, made of these options alone.

    Raises:
        UsageError: The task exists already, or a value is missing or refused.
    """
    newest = _replaceable(store, name, replace)
    values = given_values(options)
    values = {**_trained(values), **values}
    needed = {"model": "--model", "template": "--template or --chat-template"}
    if missing := [option_names for name, option_names in needed.items() if name not in values]:
        raise UsageError(
            f"{' and '.join(missing)} must be given, or --from with a folder of `LLM.save`"
        )
    return _put(store, {"name": name, **values}, newest)


def create_from(
    client: redis.Redis, name: str, folder: Path, options: TaskOptions, replace: bool
) -> tuple[Registered, SavedTask, Artifact | None]:
    """Register the task of a folder that `LLM.save` wrote, and make its index the current one.

    Args:
        replace: Whether an existing task gets a new version.

    Returns:
        The registered version, the content of the folder, and the current index. If the folder has
        no outputs of a corpus, no index is published, and an earlier one stays current.

    Raises:
        ServiceError: The folder was not written by `LLM.save`.
        UsageError: The task exists already, an option differs from the folder, or a value is
            refused.
        StoreError: Redis fails. The task may already be registered, without the index.
    """
    store = TaskStore(client)
    newest = _replaceable(store, name, replace)
    saved = SavedTask.read(folder)
    # The saved index becomes this task's own, regardless of the corpus it was built from.
    values: Values = {**flat(saved.record), "name": name, "corpus": None}
    if differ := [option(n) for n, value in given_values(options).items() if value != values[n]]:
        raise UsageError(
            f"--from {folder} has other values than {', '.join(differ)}; leave these options out, "
            f"and change the task afterwards with `tasc task set {name}`"
        )
    found = BaseModel.open(values["model"], values["revision"]).tokenizer.fingerprint
    if found != saved.record.fingerprint:
        raise UsageError(
            f"--from {folder} was saved with tokenizer {saved.record.fingerprint}, but the "
            f"model at {values['model']} now has {found}; save the task again"
        )
    registered = _put(store, values, newest)
    artifacts = ArtifactStore(client, name, found)
    if not saved.index.corpus.documents:
        return registered, saved, artifacts.current()
    return registered, saved, publish_file(artifacts, partial(write_index, saved.index), None)


def change(
    store: TaskStore, name: str, options: TaskOptions, unset: Iterable[str]
) -> tuple[TaskRecord, Registered]:
    """Make a new version with the given changes; return the old record and the new version.

    Args:
        unset: Names of values, or of groups of values, that are reset as if never given.

    Raises:
        UsageError: Nothing is given, or a value is refused.
    """
    newest = store.versions(name)[-1]
    old = store.get(name, newest)
    given, reset = given_values(options), _reset(unset)
    if not given and not reset:
        raise UsageError("nothing to change; give an option, see `tasc task set --help`")
    if both := sorted(given.keys() & reset.keys()):
        raise UsageError(f"{', '.join(both)}: given as an option and in --unset; leave one out")
    if "template" in given and "chat_template" not in given:
        reset |= no_chat()  # a task has one kind of template
    return old, _put(store, {**flat(old), **reset, **given}, newest)


def _put(store: TaskStore, values: Values, newest: int) -> Registered:
    model = BaseModel.open(values["model"], values.get("revision"))
    if "dtype" in values:
        values = {**values, "dtype": dtype_here(values["dtype"], values.get("quantization"))}
    if named := values.get("chat_template"):
        try:
            chat = chat_template(model.folder, named)
        except (TextError, ServiceError) as error:
            raise UsageError(by_option(str(error))) from error
        values = {**values, "chat_template": chat.source, "chat_tokens": chat.tokens}
    record = record_of({**values, "fingerprint": model.tokenizer.fingerprint})
    try:
        store.require_corpus(record)
    except UnknownTask as error:
        raise UsageError(f"--corpus: {error}") from error
    check_record(record, model)
    labels = model.tokenizer.encode_outputs(record.choices) if record.choices else ()
    longest = max((len(label) + 1 for label in labels), default=0)
    given = [*record.sampling.given, *(["stop"] if record.stop else ())]
    try:
        unused = GenerationDefaults.of(model.folder).without(given)
    except TextError as error:
        raise UsageError(f"--model: {error}") from error
    return Registered(store.put(record, after=newest), record, longest, unused)


def _trained(given: Values) -> Values:
    """Returns the prompt of the fine-tune that made the model or adapter, if none is given.

    Raises:
        ServiceError: The prompt cannot be read.
    """
    trained = trained_prompt(given.get("adapter"), given.get("model"))
    if isinstance(trained, PromptTemplate):
        return {} if "template" in given else {"template": trained.text}
    if trained is None or ("template" in given and "chat_template" not in given):
        return {}
    assert isinstance(trained, ChatTemplate)
    return {"template": FIELD, **{name: getattr(trained, own) for name, own in CHAT.items()}}


def _replaceable(store: TaskStore, name: str, replace: bool) -> int:
    """Returns the newest version of a task that may be replaced; 0 if the task does not exist.

    Raises:
        UsageError: The name is not allowed, or the task exists and may not be replaced.
    """
    try:
        checked_task(name)
        newest = store.versions(name)[-1]
    except ValueError as error:
        raise UsageError(str(error)) from error
    except UnknownTask:
        return 0
    if not replace:
        raise UsageError(
            f"task {name} already exists, at version {newest}; change it with `tasc task set "
            f"{name}`, or make a new version of these options alone with --replace"
        )
    return newest


def _reset(unset: Iterable[str]) -> Values:
    known = defaults()
    found: Values = {}
    for given in unset:
        name = given.strip("-").replace("-", "_")
        names = GROUPS.get(name, {name})
        if not names <= known.keys():
            fields = ", ".join(dict.fromkeys([*known, *GROUPS]))
            raise UsageError(
                f"--unset {given!r} is unknown or has no default; give one of {fields}"
            )
        found |= {n: known[n] for n in names}
    return found


def check_record(record: TaskRecord, model: BaseModel) -> None:
    """Check a record against its model, beginning with the quick checks.

    Raises:
        UsageError: The model does not support the record; the message has option, value, limit and
            solution.
    """
    for check in _CHECKS:
        check(record, model)


def _check_template(record: TaskRecord, model: BaseModel) -> None:
    _require_unicode("--template", record.template)
    given = "--template" if record.chat is None else "--chat-template"
    prompt = template_of(record).encode(model.tokenizer, _TEXT)
    if not prompt:
        raise UsageError(f"{given} has no tokens when this tokenizer encodes it; put words in it")
    if model.positions is not None and len(prompt) >= model.positions:
        raise UsageError(
            f"{given} has {len(prompt)} tokens without the input, but the model has only "
            f"{model.positions} positions; shorten the template"
        )


def _check_quantization(record: TaskRecord, model: BaseModel) -> None:
    if record.quantization and model.quantized:
        raise UsageError(
            f"--quantization is {record.quantization}, but {model.folder} is already quantised; "
            "leave out --quantization, or name the unquantised model"
        )
    fault = int8_fault(model_settings(model.folder / "config.json"))
    if record.is_int8 and fault:
        raise UsageError(f"--quantization: {fault}")


def _check_length(record: TaskRecord, model: BaseModel) -> None:
    positions = model.positions
    if positions is not None and record.max_tokens >= positions:
        raise UsageError(
            f"--max-tokens is {record.max_tokens}, but prompt and answer together have at most "
            f"{positions} positions in this model; give less than {positions}"
        )


def _check_stops(record: TaskRecord, model: BaseModel) -> None:
    for stop in record.stop:
        _require_unicode("--stop", stop)
        if _CUT in stop:
            raise UsageError(f"--stop {stop!r} was cut inside a character; give whole characters")
        # Encoded inside a text, because decoders drop a blank at the start of a text.
        (ids,) = model.tokenizer.encode_outputs([_TEXT + stop + _TEXT])
        if stop not in (text := model.tokenizer.decode(ids)):
            raise UsageError(
                f"--stop {stop!r} is never in an answer: this tokenizer decodes it as "
                f"{text.removeprefix(_TEXT).removesuffix(_TEXT)!r}; give other text. Special "
                "tokens that end an answer are in generation_config.json, and need no --stop"
            )


def _check_adapters(record: TaskRecord, model: BaseModel) -> None:
    adapters = [(f"--adapters {name}={place}", place) for name, place in record.adapters]
    if record.adapter is not None:
        adapters.append((f"--adapter {record.adapter}", record.adapter))
    for named, place in adapters:
        try:
            check_adapter(
                resolve_folder(place),
                model.folder,
                by_row=record.adapter is None,
                quantized=record.quantization in ("nf4", "int8"),
            )
        except (ValueError, OSError) as error:
            raise UsageError(f"{named}: {error}") from error


def _check_guide(record: TaskRecord, model: BaseModel) -> None:
    if guide := guide_of(record):
        options = {"choice": "--choices", "json_schema": "--schema", "regex": "--regex"}
        check_guide(guide, options[guide.kind], record, model)


def check_guide(guide: GuideSpec, option: str, record: TaskRecord, model: BaseModel) -> None:
    """Check a guide, the constraint on a task's answers that an option gives.

    Raises:
        UsageError: The model cannot give such answers, or a stop string would cut one.
    """
    from tasc_engine.guided import Guides

    try:
        guide.require_whole(record.stop, ())
        Guides(model.tokenizer, model.vocab_size).of(guide, record.max_tokens)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _check_label_end(record: TaskRecord, model: BaseModel) -> None:
    if (end := record.label_end) is None:
        return
    from tasc_engine.guided import Guides  # imports torch

    try:  # the choices themselves were checked before
        labels = GuideSpec("labels", record.choices or (_TEXT,), end=end)
        Guides(model.tokenizer, model.vocab_size).labels(labels)
    except ValueError as error:
        reason = str(error).rpartition("; ")[0]
        way_out = "give another, or leave it out (--unset label_end) for an end of sequence"
        raise UsageError(f"--label-end is {end!r:.100}, but {reason}; {way_out}") from error


_CHECKS: tuple[Callable[[TaskRecord, BaseModel], None], ...] = (
    _check_quantization,
    _check_length,
    _check_template,
    _check_stops,
    _check_adapters,
    check_drafter,
    _check_guide,
    _check_label_end,
)


def _require_unicode(option: str, text: str) -> None:
    if not is_unicode(text):
        raise UsageError(
            f"{option} {text!r} has bytes that are not a character; write UTF-8 characters"
        )
