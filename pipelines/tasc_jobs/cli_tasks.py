"""The commands under `tasc task`: the register of tasks. No model is run, nothing is computed."""

import sys
from typing import Annotated

import typer

from tasc_jobs.cli_options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    RedisUrl,
    Task,
    open_store,
    print_result,
)
from tasc_jobs.errors import JobError, UsageError
from tasc_jobs.progress import note
from tasc_jobs.tasks.options import TaskOptions, spread
from tasc_store import CorpusStore, TaskStore, connect

task_app = typer.Typer(
    help="Register tasks, look at them, change them, roll them back.", no_args_is_help=True
)
# Lines of their own: paragraphs are what the help keeps apart.
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

No labels, a pattern: tasc task set tickets --unset choices --regex '[a-z]+'

As it was before: tasc task show tickets; tasc task use tickets 1"""


@task_app.command("create", epilog=_EXAMPLES)
@spread(required=("model", "template"), defaults=True)
def task_create(
    name: Task,
    options: TaskOptions,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Make a new version where there is one.", show_default="refused"
        ),
    ] = False,
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Register a task, after a check that its model can do what is asked."""
    from tasc_jobs.tasks.register import create

    with open_store(redis_url, data_dir) as url:
        version, _ = create(TaskStore(connect(url)), name, options, replace)
    print(f"{name} version {version}")


@task_app.command("set", epilog=_CHANGES)
@spread(defaults=False)
def task_set(
    name: Task,
    options: TaskOptions,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            help="A field to put back to its default, as `tasc task show` names it; repeatable; "
            "sampling and draft are all of their kind.",
            show_default=False,
        ),
    ] = None,
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a new version of a task in which only what is given changes.

    Services and jobs that run keep the version they began with.
    """
    from tasc_jobs.tasks.register import change
    from tasc_jobs.tasks.shown import changes, changes_in_words

    with open_store(redis_url, data_dir) as url:
        version, old, new = change(TaskStore(connect(url)), name, options, unset or ())
    print(f"{name} version {version}: {changes_in_words(changes(old, new)) or 'as it was'}")
    if old.fingerprint != new.fingerprint:
        note(f"the tokenizer is another one: run `tasc build-index {new.corpus_name}` for it")


@task_app.command("show")
def task_show(
    name: Task,
    version: Annotated[
        int | None, typer.Option(help="An older version.", show_default="newest")
    ] = None,
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show every field of a task, its versions, and what changed from each to the next."""
    from tasc_jobs.tasks import shown

    with open_store(redis_url, data_dir) as url:
        store = TaskStore(connect(url))
        past = list(shown.history(store, name))
        wanted = past[-1][0] if version is None else version
        record = store.get(name, wanted)
    content = {
        "name": name,
        "version": wanted,
        "record": shown.as_json(record),
        "versions": [{"version": number, "changed": changed} for number, changed in past],
    }
    print_result(content, shown.table(record, wanted, past), as_json)


@task_app.command("list")
def task_list(
    redis_url: RedisUrl = None, data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False
) -> None:
    """Show every task, its model, adapter and version."""
    from tasc_jobs.tasks import shown

    with open_store(redis_url, data_dir) as url:
        found = TaskStore(connect(url)).newest()
    content = [{**shown.as_json(record), "version": version} for version, record in found]
    print_result({"tasks": content}, "\n".join(shown.listed(*each) for each in found), as_json)


@task_app.command("use")
def task_use(
    name: Task,
    version: Annotated[int, typer.Argument(help="A number that `tasc task show` lists.")],
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Roll back: make an older version's record the newest again, under a new number."""
    with open_store(redis_url, data_dir) as url:
        newest = TaskStore(connect(url)).use(name, version)
    print(f"{name} version {newest}")


@task_app.command("delete")
def task_delete(
    name: Task,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask.", show_default="asks on a terminal")
    ] = False,
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Remove a task for good: its versions, its corpus and its draft indexes.

    Stop services that serve it first: they would go on with what they have loaded.
    """
    with open_store(redis_url, data_dir) as url:
        client = connect(url)
        newest = TaskStore(client).versions(name)[-1]
        rows = len(CorpusStore(client, name))
        what = f"task {name} (version {newest}, {rows} corpus rows) and its draft indexes"
        if not yes:
            _ask(f"Delete {what}?")
        TaskStore(client).delete(name)
    print(f"deleted {what}")


def _ask(question: str) -> None:
    """Raises UsageError where nobody can be asked, and JobError where the answer is no."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("delete asks first, and there is no terminal to ask at; give --yes")
    note(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise JobError("nothing was deleted")
