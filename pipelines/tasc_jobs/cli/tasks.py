"""The commands under `tasc task`: create, change, show and delete tasks."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tasc_jobs.cli.options import AsJson, StoreOptions, Task, grouped, print_result
from tasc_jobs.errors import JobError, UsageError
from tasc_jobs.tasks.options import TaskOptions
from tasc_runtime.progress import note
from tasc_store import CorpusStore, TaskRecord, TaskStore, UnknownTask, connect

if TYPE_CHECKING:
    import redis

task_app = typer.Typer(
    help="Register tasks, look at them, change them, roll them back.", no_args_is_help=True
)
# Lines of their own: paragraphs are what the help keeps apart. It is markup: brackets are escaped.
_EXAMPLES = """\
A classifier: tasc task create tickets --model ./my-model --adapter ./my-lora
--template 'label: {input}\\n' --choices labels.txt

An extractor: tasc task create slots --model ./my-model --template '{input}\\n=> ' --schema
slots.json --max-tokens 128

Paraphrases: tasc task create reword --model ./my-model --template 'say: {input}\\n' --stop '\\n'
--temperature 0.8 --top-p 0.95

Then: tasc ingest tickets train.jsonl; tasc build-index tickets"""
_CHANGES = """\
A longer answer: tasc task set tickets --max-tokens 64

Other labels: tasc task set tickets --choices labels.txt

A model that drafts beside n-grams: tasc task set tickets --drafter ./my-drafter

No model drafts: tasc task set tickets --unset drafter

No labels, a pattern: tasc task set tickets --unset choices --regex '\\[a-z]+'

As it was before: tasc task show tickets; tasc task use tickets 1"""


@task_app.command("create", epilog=_EXAMPLES)
@grouped(required=("model", "template"))
def task_create(
    *,
    name: Task,
    options: TaskOptions,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Make a new version where there is one.", show_default="refused"
        ),
    ] = False,
    store: StoreOptions,
) -> None:
    """Register a task, after a check that its model can do what is asked."""
    from tasc_jobs.tasks.register import create
    from tasc_jobs.tasks.shown import registered

    with store.open() as url:
        new = create(TaskStore(connect(url)), name, options, replace)
    print(f"{name} version {new.version}{registered(new)}")
    _note_ranking(new.record)


@task_app.command("set", epilog=_CHANGES)
@grouped(without_defaults=(TaskOptions,))
def task_set(
    *,
    name: Task,
    options: TaskOptions,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            help="A field to put back to its default, as `tasc task show` names it; repeatable; "
            "sampling, draft and drafter are all of their kind.",
            show_default=False,
        ),
    ] = None,
    store: StoreOptions,
) -> None:
    """Make a new version of a task in which only what is given changes.

    What is given of --adapters, --choice, --choices or --stop replaces the list: name all that
    shall be in it.

    Services that run take --max-tokens, --stop, sampling, what answers may be, how they are drafted
    and other adapters of the same model within seconds; another model, template or drafter when
    they start again. Jobs that run keep the version they began with.
    """
    from tasc_jobs.tasks.register import change
    from tasc_jobs.tasks.shown import changes, changes_in_words, registered

    with store.open() as url:
        old, new = change(TaskStore(connect(url)), name, options, unset or ())
    changed = changes(old, new.record)
    labels = registered(new) if "choices" in changed else ""
    print(f"{name} version {new.version}: {changes_in_words(changed) or 'as it was'}{labels}")
    if old.fingerprint != new.record.fingerprint:
        corpus = new.record.corpus_name
        note(f"the tokenizer is another one: run `tasc build-index {corpus}` for it")
    _note_ranking(new.record)


def _note_ranking(record: TaskRecord) -> None:
    if record.neural and record.neural.is_ranked:
        corpus = record.corpus_name
        note(
            "it drafts from the newest ranking of its corpus; where there is none, `tasc "
            f"rank-vocabulary {corpus} --from raw` makes one"
        )


@task_app.command("show")
@grouped()
def task_show(
    *,
    name: Task,
    version: Annotated[
        int | None, typer.Option(help="An older version.", show_default="newest")
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Show every field of a task, its versions, and what changed from each to the next."""
    from tasc_jobs.tasks import shown

    with store.open() as url:
        tasks = TaskStore(connect(url))
        past = list(shown.history(tasks, name))
        wanted = past[-1].version if version is None else version
        record = tasks.get(name, wanted)
    content = {
        "name": name,
        "version": wanted,
        "record": shown.as_json(record),
        "versions": [asdict(each) for each in past],
    }
    print_result(content, shown.table(record, wanted, past), as_json)


@task_app.command("list")
@grouped()
def task_list(*, store: StoreOptions, as_json: AsJson = False) -> None:
    """Show every task, its model, adapter and version."""
    from tasc_jobs.tasks import shown

    with store.open() as url:
        found = TaskStore(connect(url)).newest()
    text = "\n".join([shown.LIST_HEADER, *map(shown.listed, found)])
    print_result({"tasks": [shown.listed_as_json(each) for each in found]}, text, as_json)


@task_app.command("use")
@grouped()
def task_use(
    *,
    name: Task,
    version: Annotated[int, typer.Argument(help="A number that `tasc task show` lists.")],
    store: StoreOptions,
) -> None:
    """Roll back: make an older version's record the newest again, under a new number."""
    with store.open() as url:
        newest = TaskStore(connect(url)).use(name, version)
    same = "" if newest == version else f", the same as version {version}"
    print(f"{name} version {newest}{same}")


@task_app.command("delete")
@grouped()
def task_delete(
    *,
    name: Task,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask.", show_default="asks on a terminal")
    ] = False,
    store: StoreOptions,
) -> None:
    """Remove a task for good: its versions, its corpus and its draft indexes.

    Stop services that serve it and ingests first: services go on with what they have loaded, and
    rows that come later are a corpus again. What these leave can be deleted again.
    """
    with store.open() as url:
        client = connect(url)
        what = _what(client, name)
        if not yes:
            _ask(f"Delete {what}?")
        TaskStore(client).delete(name)
    print(f"deleted {what}")


def _what(client: "redis.Redis", name: str) -> str:
    """What the store has of a task; an interrupted deletion may have removed its record."""
    rows = len(CorpusStore(client, name))
    store = TaskStore(client)
    try:
        version = f"version {store.versions(name)[-1]}"
    except UnknownTask:
        if not store.left(name):
            raise
        version = "no record"
    return f"task {name} ({version}, {rows} corpus rows) and its draft indexes"


def _ask(question: str) -> None:
    """Raises UsageError where nobody can be asked, and JobError where the answer is no."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("delete asks first, and there is no terminal to ask at; give --yes")
    note(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise JobError("nothing was deleted")
