"""The ``tasc`` command: reads arguments, calls one job, prints its result.

Results go to stdout, progress and errors to stderr. Exit codes: 0 success, 1 the job failed (the
message has the reason and a solution), 2 wrong usage, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tasc_jobs.cli.doctor import doctor
from tasc_jobs.cli.examples import EXAMPLES
from tasc_jobs.cli.generate import generate
from tasc_jobs.cli.index import index_app, refresh
from tasc_jobs.cli.keys import key_app
from tasc_jobs.cli.options import (
    AsJson,
    Command,
    ModelOptions,
    NamedTask,
    RowIdOptions,
    StoreOptions,
    Task,
    grouped,
    print_result,
    require_files,
)
from tasc_jobs.cli.stats import stats
from tasc_jobs.cli.tasks import task_app
from tasc_jobs.cli.tuning import calibrate, replay, tune
from tasc_jobs.cli.worker import worker
from tasc_jobs.errors import JobError, exit_code, in_short, known_errors, require_writable
from tasc_jobs.hints import use_store
from tasc_runtime.progress import Clock, note, show_progress
from tasc_store import connect

_START = """\
A demonstration on shipped data: tasc demo

A task of your own: tasc task create tickets --model ./my-model --template 'label: {input}\\n'

Its corpus and draft index: tasc ingest tickets train.jsonl; tasc build-index tickets

Answers to a file: tasc generate tickets --input rows.jsonl --output answers.jsonl"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


# Commands of the package `tasc_train`, which are imported when they are called: names, and lines in
# the list of all commands.
_FINE_TUNE = {
    "enrich": "Merge the frequent n-grams of task outputs into single tokens (step 1 of TASC-ft).",
    "finetune": "Train an adapter, and embeddings of new tokens, on outputs of TASK (step 2 of "
    "TASC-ft).",
    "forecast-ft": "Forecast what `tasc enrich` and `tasc finetune` would gain, by number of new "
    "tokens.",
    "train-drafter": "Train a draft model for the model of TASK on answers of that model.",
    "rank-vocabulary": "Rank the tokens of TASK's answers by frequency, and make the ranking "
    "current.",
}
_EVALUATE = {
    "evaluate": "Measure quality and cost of a model's answers to test rows: metrics, tokens, "
    "steps, time."
}


class _Commands(TyperGroup):
    """All commands. Those of `tasc_train` are imported when one of them is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> None:
        """Replaces the entry of a command of `tasc_train` by the command itself."""
        if name not in _FINE_TUNE | _EVALUATE:
            return
        own = name.replace("-", "_")
        module = import_module(f"tasc_train.cli.{own}")
        alone = typer.Typer(add_completion=False)
        panel = "Fine-tune" if name in _FINE_TUNE else "Measure"
        add = alone.command(cls=NamedTask, rich_help_panel=panel, epilog=module.EXAMPLES)
        add(getattr(module, own))
        self.commands[name] = typer.main.get_command(alone)


def all_commands() -> Any:
    """Returns the group of all commands after importing them, for docs and tests."""
    group: Any = typer.main.get_command(app)
    for name in _FINE_TUNE | _EVALUATE:
        group.load(name)
    return group


app = typer.Typer(
    cls=_Commands,
    help="Batched, lossless generation for task-specific small language models.",
    epilog=_START,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"tasc {version('tasc-serve')}")
        raise typer.Exit


@app.callback()
def _options_of_tasc(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@grouped()
def ingest(
    *,
    task: Task,
    files: Annotated[list[Path], typer.Argument(help=".jsonl, .jsonl.gz or .parquet")],
    row: RowIdOptions,
    reject: Annotated[
        Path | None,
        typer.Option(help="File for rejected rows.", show_default="TASK.rejected.jsonl"),
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Append the rows of FILES to the corpus of TASK. Rows that are already in it are skipped.

    The command fails if no line is a row.
    """
    from tasc_jobs.index.ingest import ingest as run
    from tasc_store import TaskStore

    with store.open() as url, show_progress("ingest", None) as bar:
        client = connect(url)
        tasks = TaskStore(client)
        known = task in tasks.names()
        report = run(
            client,
            task,
            files,
            fields=row.fields,
            reject=reject or Path(f"{task}.rejected.jsonl"),
            labels=frozenset(tasks.get(task).choices if known else ()),
            progress=bar.advance,
        )
    rejected = f" (first: {report.first_rejected}; see {report.reject_file})"
    if not report.added + report.known:
        raise JobError(
            f"no rows in {', '.join(map(str, files))}: {report.rejected} lines were rejected"
            f"{rejected if report.rejected else ''}. Correct them, or name the fields with "
            "--input-field, --output-field and --id-field"
        )
    text = f"{report.added} rows added, {report.known} already known, {report.rejected} rejected"
    text += rejected if report.rejected else ""
    if report.outside_labels:
        text += (
            f"; {report.outside_labels} rows have outputs that are not labels of {task}, so no "
            "answer can equal them: correct them, or change --choices with `tasc task set`"
        )
    if not known:
        text += f"; task {task} is not registered yet, see `tasc task create --help`"
    print_result(asdict(report), text, as_json)


@grouped()
def build_index(
    *,
    task: Task,
    parallelism: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of parallel tasks for reading and for sorting.",
            show_default="by rows and CPUs for reading, one per core for sorting",
        ),
    ] = None,
    bigrams: Annotated[
        Path | None,
        typer.Option(
            help="File from `tasc model-bigrams`.", show_default="that of the current index"
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            help="Maximum bytes of the outputs in the index. Outputs with the lowest expected gain "
            "are left out, together with their prompts.",
            show_default="no cap",
        ),
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Build the draft index of TASK from its corpus and make it current."""
    from tasc_draft.index.corpus_build import check_cap

    check_cap(max_bytes)
    require_files(bigrams)
    from tasc_runtime.progress import Stages, note
    from tasc_store import TaskStore

    with store.open(task) as url:
        record = TaskStore(connect(url)).get(task)
        note("starting Ray ...")
        from tasc_jobs.index.build import NOTES, STAGES, build_and_publish
        from tasc_jobs.index.publish import IndexReport
        from tasc_jobs.ray_local import local_ray

        with local_ray(), Stages(f"index {task}", STAGES, notes=NOTES) as stages:
            artifact, index = build_and_publish(
                url,
                record,
                parallelism=parallelism,
                bigrams=bigrams,
                max_bytes=max_bytes,
                progress=stages,
            )
    report = IndexReport(artifact, index, stages.seconds, max_bytes)
    print_result(report.as_json, report.in_words, as_json)


@grouped()
def serve(
    *,
    config: Annotated[Path, typer.Option(help="Settings file; see deploy/serve.yaml.")],
    store: StoreOptions,
) -> None:
    """Serve tasks over HTTP until Ctrl-C or SIGTERM.

    The store is that of --redis-url, else of REDIS_URL, else of `redis_url` in the settings file.
    Without any of them, the command starts a Redis server on --data-dir.
    """
    clock = Clock()
    clock.note(f"reading {config}")
    from tasc_serve.settings import load_settings, require_free
    from tasc_store import TaskStore

    settings = load_settings(config)
    require_free(settings.http.host, settings.http.port)
    store = store.or_of(settings)
    with store.open() as url:
        if not store.redis_url:
            use_store(url, None)  # other commands need the URL while this command runs
            settings = settings.model_copy(update={"files_url": store.files_url(settings)})
        clock.note(f"store: {store.in_words(url)}")
        for served in settings.tasks:
            TaskStore(connect(url)).get(served.name)  # fails for an unknown task before Ray starts
        cluster = os.environ.get("RAY_ADDRESS")
        clock.note(f"joining the Ray cluster {cluster} ..." if cluster else "starting Ray ...")
        from tasc_jobs import ray_local
        from tasc_jobs.serve import logical_cpus, run_service
        from tasc_runtime.ray_private import running_ray
        from tasc_serve.http import ray_proxy

        cpus = logical_cpus(settings)
        proxy = partial(ray_proxy.environment, settings.http)
        ray_used = ray_local.in_words(cpus, cluster, running_ray())
        with ray_local.local_ray(num_cpus=cpus, environment=proxy):
            clock.note(f"Ray: {ray_used}; {ray_proxy.in_words(settings.http)}")
            run_service(settings, url, _wait_for_signal, say=clock.note)


@grouped()
def model_bigrams(
    *,
    named: ModelOptions,
    output: Annotated[Path, typer.Option(help="File to write, .npz.")],
    top: Annotated[int, typer.Option(min=1, help="Number of next tokens to keep per token.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Write the most likely next tokens of MODEL after each token.

    The index drafts from them if its corpus has no continuation.
    """
    require_writable("--output", output)
    from tasc_jobs.index.model_bigrams import make_bigrams
    from tasc_text import TaskTokenizer

    source = named.source
    size = TaskTokenizer.from_folder(source.folder).vocab_size
    with show_progress("model bigrams", size, "tokens") as bar:
        report = make_bigrams(source, output, name=named.model, top=top, progress=bar.advance)
    print_result(asdict(report), report.in_words, as_json)


def demo(
    keep_serving: Annotated[
        bool, typer.Option("--serve", help="Only start the service and keep it running.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the service with --serve; 0: a free one.")
    ] = 8000,
    report: Annotated[
        Path, typer.Option(help="HTML file for the plots; not written with --serve.")
    ] = Path("demo.html"),
) -> None:
    """Run the whole workflow on shipped data: corpus, statistics, index, service, answers."""
    from tasc_serve.settings import HttpSettings, require_free

    http = HttpSettings(port=port if keep_serving else 0)
    if keep_serving:
        require_free(http.host, http.port)
    else:
        require_writable("--report", report)
    cluster = os.environ.get("RAY_ADDRESS")
    start = f"joining the Ray cluster {cluster}" if cluster else "starting Ray"
    note(f"{start} ...")
    # Ray Serve reads environment variables when it is imported. As in `serve`, it must read them
    # before `local_ray` sets them, so it is imported here: the thread below may import it later.
    import ray.serve  # noqa: F401

    from tasc_jobs.demo.tasks import TASK, TASKS
    from tasc_jobs.ray_local import local_ray
    from tasc_serve.http import ray_proxy
    from tasc_store import open_url

    environment = partial(ray_proxy.environment, http)
    with (
        open_url(None) as url,
        TemporaryDirectory(prefix="tasc-demo-") as files,
        ExitStack() as using_ray,
        ThreadPoolExecutor(1) as aside,
    ):
        # The imports take as long as Ray's start. Modules that are needed first are imported first.
        preparing = aside.submit(import_module, "tasc_jobs.demo.prepare")
        running = aside.submit(import_module, "tasc_jobs.demo.run")
        try:
            using_ray.enter_context(local_ray(environment=environment))
            # Serve starts while the jobs run. On a shared cluster, it starts after them.
            ahead = not (keep_serving or cluster)
            listening = aside.submit(lambda: running.result().listen(http)) if ahead else None
            preparing.result().prepare(url, TASKS if keep_serving else [TASK])
            if keep_serving:
                running.result().serve_demo(url, http, files, _wait_for_signal)
            else:
                base = listening.result() if listening else None
                running.result().run_demo(url, http, files, report, base)
        except BaseException:
            aside.shutdown(wait=False, cancel_futures=True)  # Serve is no longer needed
            raise


_PANELS: dict[str, tuple[Command | tuple[str, typer.Typer] | dict[str, str], ...]] = {
    "Prepare": (
        *(("task", task_app), ingest, build_index, ("index", index_app), refresh, model_bigrams),
    ),
    "Serve": (serve, ("key", key_app), demo),
    "Batch": (generate, worker),
    "Fine-tune": (_FINE_TUNE,),
    "Measure": (doctor, stats, replay, tune, calibrate, _EVALUATE),
}
for _panel, _members in _PANELS.items():
    for _member in _members:
        if isinstance(_member, tuple):
            app.add_typer(_member[1], name=_member[0], rich_help_panel=_panel)
        elif isinstance(_member, dict):
            for _name, _line in _member.items():
                app.command(_name, help=_line, rich_help_panel=_panel)(lambda: None)
        else:
            _example = EXAMPLES[_member.__name__]
            app.command(cls=NamedTask, rich_help_panel=_panel, epilog=_example)(_member)


def main() -> None:
    """Entry point: turns the errors of this project into one line and exit code 1 or 2."""
    signal_codes: list[int] = []

    def on_signal(signum: int, frame: Any) -> None:
        """Exits by unwinding the stack, which stops the processes that the command started.

        Ignores further signals, because they would interrupt the cleanup.
        """
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        note("stopping ...")
        signal_codes.append(128 + signum)
        sys.exit(signal_codes[0])

    for signum in _SIGNALS:
        signal.signal(signum, on_signal)
    # Torch reads these variables when it is loaded or first allocates memory. Without them, idle
    # OpenMP threads spin and slow down busy cores, and weights are not in huge pages.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        app()
    except known_errors() as error:
        if not signal_codes:
            print(f"tasc: {in_short(error)}", file=sys.stderr)
        sys.exit(signal_codes[0] if signal_codes else exit_code(error))
    except SystemExit as error:  # a library may have replaced the exit code of `on_signal`
        sys.exit(signal_codes[0] if signal_codes else error.code)


def _wait_for_signal() -> None:
    """Blocks until a signal handler raises SystemExit."""
    threading.Event().wait()
