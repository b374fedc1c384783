"""The commands under `tasc task`: create, change, show and delete tasks."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tasc_draft import DraftError
from tasc_jobs.cli.options import AsJson, StoreOptions, Task, grouped, print_result
from tasc_jobs.errors import JobError, UsageError
from tasc_jobs.hints import command
from tasc_jobs.tasks.options import TaskOptions
from tasc_runtime.models import template_of, trained_prompt
from tasc_runtime.progress import note
from tasc_store import (
    ArtifactStore,
    CorpusStore,
    CorruptArtifact,
    TaskRecord,
    TaskStore,
    UnknownTask,
    connect,
)

if TYPE_CHECKING:
    import redis

    from tasc_jobs.index.publish import Tuned
    from tasc_jobs.tasks.register import Registered

task_app = typer.Typer(
    help="Register, show, change, roll back and delete tasks.", no_args_is_help=True
)
# Each example is a paragraph, because the help joins lines. Brackets are escaped as in markup.
_EXAMPLES = """\
A classifier: tasc task create tickets --model ./my-model --adapter ./my-lora
--template 'label: {input}\\n' --choices labels.txt

With the model's chat template: tasc task create tickets --model ./my-model --chat-template auto
--system-prompt 'Label the ticket.'

An extractor: tasc task create slots --model ./my-model --template '{input}\\n=> ' --schema
slots.json --max-tokens 128

Paraphrases: tasc task create reword --model ./my-model --template 'say: {input}\\n' --stop '\\n'
--temperature 0.8 --top-p 0.95

A task saved by `LLM.save`, with its draft index: tasc task create tickets --from ./ticket-task

Then, except after --from: tasc ingest tickets train.jsonl; tasc build-index tickets"""
_CHANGES = """\
A longer answer: tasc task set tickets --max-tokens 64

Other labels: tasc task set tickets --choices labels.txt

A draft model in addition to n-grams: tasc task set tickets --drafter ./my-drafter

No draft model: tasc task set tickets --unset drafter

A pattern instead of labels: tasc task set tickets --unset choices --regex '\\[a-z]+'

An earlier version: tasc task show tickets; tasc task use tickets 1"""


@task_app.command("create", epilog=_EXAMPLES)
@grouped()
def task_create(
    *,
    name: Task,
    options: TaskOptions,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Folder that `LLM.save` wrote, with all options of the task and its draft index. "
            "Without --from, give --model, and also --template or --chat-template unless "
            "`tasc finetune` made the model.",
            show_default="none",
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Add a new version if the task exists.",
            show_default="an existing task is an error",
        ),
    ] = False,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Register a task, after checking that its model supports the options."""
    from tasc_jobs.tasks.register import create, create_from
    from tasc_jobs.tasks.shown import registered, taken

    lines, index = "", None
    with store.open() as url:
        if from_ is None:
            new = create(TaskStore(connect(url)), name, options, replace)
        else:
            new, saved, index = create_from(connect(url), name, from_, options, replace)
            lines = taken(name, saved, index)
    content = {
        "name": name,
        "version": new.version,
        "record": asdict(new.record),
        "longest_label": new.longest_label,
        "index": index and asdict(index),
    }
    print_result(content, f"{name} version {new.version}{registered(new)}{lines}", as_json)
    _note_ranking(new.record)
    _note_prompt(new.record)
    _note_unused(new)


@task_app.command("set", epilog=_CHANGES)
@grouped({TaskOptions: False})
def task_set(
    *,
    name: Task,
    options: TaskOptions,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            help="Field to reset to its default, named as in `tasc task show`; repeatable. "
            "The names sampling, draft, drafter and chat each reset a group of fields.",
            show_default=False,
        ),
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Add a new version of a task that changes only the given options.

    --adapters, --choice, --choices and --stop replace the whole list, so name every entry.

    Running services apply --max-tokens, --stop, sampling, the constraints on answers and the draft
    settings within seconds. Other adapters, another corpus, model, revision, template, dtype,
    quantization or drafter need new replicas: `tasc serve` starts a rolling update by itself;
    other deployments must be deployed again. Running jobs keep the version they started with.
    """
    from tasc_jobs.tasks.register import change
    from tasc_jobs.tasks.shown import changes, changes_in_words, registered

    with store.open() as url:
        client = connect(url)
        old, new = change(TaskStore(client), name, options, unset or ())
        by_tune = _tuned(client, new.record)
    changed = changes(old, new.record)
    labels = registered(new) if "choices" in changed else ""
    text = f"{name} version {new.version}: {changes_in_words(changed) or 'no changes'}{labels}"
    print_result({"name": name, "version": new.version, "changed": changed}, text, as_json)
    if by_tune and (unused := sorted(changed.keys() & asdict(by_tune.settings).keys())):
        note(
            f"{', '.join(unused)}: no effect, because the current index, version "
            f"{by_tune.index_version}, has settings from `tasc tune`; `tasc index use` goes back "
            "to an older index"
        )
    if old.fingerprint != new.record.fingerprint:
        corpus = new.record.corpus_name
        note(f"the tokenizer has changed: run `{command('build-index', corpus)}`")
    _note_ranking(new.record)
    _note_prompt(new.record)
    if "model" in changed:
        _note_unused(new)


def _tuned(client: "redis.Redis", record: TaskRecord) -> "Tuned | None":
    """Returns the tuned settings that replace the record's; None if the index is unusable."""
    from tasc_jobs.index.publish import tuned

    try:
        return tuned(ArtifactStore(client, record.corpus_name, record.fingerprint))
    except (CorruptArtifact, DraftError) as error:
        note(str(error))
        return None


def _note_ranking(record: TaskRecord) -> None:
    if record.neural and record.neural.is_ranked:
        corpus = record.corpus_name
        note(
            "the drafter uses the newest vocabulary ranking of the corpus; if there is none, "
            f"create one with `{command('rank-vocabulary', corpus, '--from', 'raw')}`"
        )


def _note_prompt(record: TaskRecord) -> None:
    trained = trained_prompt(record.adapter, record.model)
    if trained and trained.render("a") != template_of(record).render("a"):
        note(
            "the model was fine-tuned with another prompt than this task has; `tasc task create` "
            "without options for prompt, system prompt and examples uses the prompt of the "
            "fine-tune"
        )


def _note_unused(new: "Registered") -> None:
    way_out = f"run `{command('task', 'set', new.record.name, *new.unused.options)}`"
    if text := new.unused.in_words(way_out):
        note(text)


@task_app.command("show", epilog="tasc task show tickets")
@grouped()
def task_show(
    *,
    name: Task,
    version: Annotated[
        int | None, typer.Option(help="Version to show.", show_default="newest")
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Show every field of a task, its versions, and what each version changed.

    Draft settings that `tasc tune` chose come with the current index and are shown where they
    replace those of the record.
    """
    from tasc_jobs.tasks import shown

    with store.open() as url:
        client = connect(url)
        tasks = TaskStore(client)
        versions = list(shown.history(tasks, name))
        shown_version = versions[-1].version if version is None else version
        record = tasks.get(name, shown_version)
        by_tune = _tuned(client, record)
    content = {
        "name": name,
        "version": shown_version,
        "record": asdict(record),
        "tuned": by_tune and asdict(by_tune),
        "versions": [asdict(each) for each in versions],
    }
    print_result(content, shown.table(record, shown_version, versions, by_tune), as_json)


@task_app.command("list", epilog="tasc task list")
@grouped()
def task_list(*, store: StoreOptions, as_json: AsJson = False) -> None:
    """List every task with its model, adapter and version."""
    from tasc_jobs.tasks import shown

    with store.open() as url:
        records = TaskStore(connect(url)).newest()
    text = "\n".join([shown.LIST_HEADER, *map(shown.listed, records)])
    print_result({"tasks": [shown.listed_as_json(each) for each in records]}, text, as_json)


@task_app.command("use", epilog="tasc task use tickets 1")
@grouped()
def task_use(
    *,
    name: Task,
    version: Annotated[int, typer.Argument(help="Version number, as `tasc task show` lists it.")],
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Roll back to an older version by copying it to a new, newest version."""
    with store.open() as url:
        newest = TaskStore(connect(url)).use(name, version)
    same = "" if newest == version else f", the same as version {version}"
    content = {"name": name, "version": newest, "same_as": version}
    print_result(content, f"{name} version {newest}{same}", as_json)


@task_app.command("delete", epilog="tasc task delete tickets --yes")
@grouped()
def task_delete(
    *,
    name: Task,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", help="Do not ask for confirmation.", show_default="asks on a terminal"
        ),
    ] = False,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Delete a task permanently: its versions, its corpus and its draft indexes.

    First stop the services of the task, and every `tasc ingest` that appends to its corpus. A
    service that is still running continues to answer. Rows that arrive after the deletion create a
    new corpus; run the command again to delete it.
    """
    with store.open() as url:
        client = connect(url)
        description = _description(client, name)
        if not yes:
            _confirm(f"Delete {description}?")
        TaskStore(client).delete(name)
    print_result({"name": name, "deleted": description}, f"deleted {description}", as_json)


def _description(client: "redis.Redis", name: str) -> str:
    """Describes the data that the store has for a task.

    The record may be missing because a deletion was interrupted.
    """
    rows = len(CorpusStore(client, name))
    store = TaskStore(client)
    try:
        version = f"version {store.versions(name)[-1]}"
    except UnknownTask:
        if not store.left(name):
            raise
        version = "no record"
    return f"task {name} ({version}, {rows} corpus rows) and its draft indexes"


def _confirm(question: str) -> None:
    """Asks for confirmation on the terminal.

    Raises:
        UsageError: stdin is not a terminal.
        JobError: The answer is no.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            "tasc task delete needs a confirmation, but stdin is not a terminal; give --yes"
        )
    note(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise JobError("nothing was deleted")
