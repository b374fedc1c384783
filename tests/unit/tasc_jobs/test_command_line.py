"""Tests `--help`, and that a command passes its options on."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import typer
from rich.markup import render
from typer.testing import CliRunner

from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.cli.main import all_commands, app
from tasc_jobs.cli.options import StoreOptions
from tasc_jobs.errors import UsageError
from tasc_jobs.serve import usage_of
from tasc_jobs.tuning.refresh import Refreshed

APP = all_commands()
BORDERS = re.compile(r"[\s│]+")


def rows(command: str) -> list[str]:
    ran = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "110"})
    assert ran.exit_code == 0
    return ran.output.splitlines()


def options(command: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for row in rows(command):
        if option := re.match(r"│ [* ]{0,4}(--[a-z-]+)", row):
            name = option[1]
        if name and row.startswith("│"):
            found[name] = BORDERS.sub(" ", found.get(name, "") + row)
    return found


@pytest.mark.parametrize(
    "command",
    [
        *("stats", "replay", "tune", "build-index", "generate", "refresh"),
        *("task create", "key create", "worker", "evaluate", "forecast-ft", "rank-vocabulary"),
        "train-drafter",
    ],
)
def test_help_of_each_option_has_a_default_or_the_word_required(command):
    shown = options(command)
    assert len(shown) > 5
    without = {n for n, t in shown.items() if not re.search(r"\[default: .*\]|\[required\]", t)}
    assert without == {"--help"}


def test_task_set_takes_the_options_of_task_create():
    shown, created = options("task set"), options("task create")
    assert " ".join(rows("task create")).count("tasc task create ") == 5
    assert shown.keys() - created.keys() == {"--unset"}
    assert created.keys() - shown.keys() == {"--replace", "--from"}
    with_default = {name for name, text in shown.items() if "[default: " in text}
    assert with_default == {"--redis-url", "--data-dir", "--json"}


def commands(of: click.Command) -> list[click.Command]:
    inner = getattr(of, "commands", {}).values()
    return [of, *(found for each in inner for found in commands(each))]


def test_help_texts_keep_their_brackets():
    texts = ((c.help, c.epilog, *(getattr(p, "help", "") for p in c.params)) for c in commands(APP))
    shown = [text for each in texts for text in each if text]
    assert len(shown) > 100
    assert any("\\[" in text for text in shown)
    for text in shown:
        assert render(text).plain == text.replace("\\[", "[")


def test_every_example_in_a_help_text_is_a_valid_command():
    tried = 0
    for each in commands(APP):
        for paragraph in (each.epilog or "").split("\n\n"):
            shown = " ".join(paragraph.replace("\\[", "[").split())
            for example in re.findall(r"(?:^|: |; |\$\()(tasc [a-z][^;]*)", shown):
                command, (_, *words) = APP, shlex.split(example.partition(" > ")[0].rstrip(")"))
                while inner := getattr(command, "commands", None):
                    command = inner[words.pop(0)]
                command.make_context(command.name, words)  # fails for a wrong or a missing option
                tried += 1
    assert tried > 60


def test_command_list_has_the_first_line_of_each_help_text():
    listed: Any = typer.main.get_command(app)
    assert [*listed.commands] == [*APP.commands]
    for name, command in APP.commands.items():
        first, line = (each.split("\n\n")[0] for each in (command.help, listed.commands[name].help))
        assert " ".join(first.split()) == " ".join(line.split())


def test_printed_version_is_the_package_version():
    ran = CliRunner().invoke(app, ["--version"])
    assert (ran.exit_code, ran.output) == (0, f"tasc {version('tasc-serve')}\n")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("tasc bu", "build-index"),
        ("tasc task cr", "create"),
        ("tasc finetune --quant", "--quantization"),
    ],
)
def test_shells_complete_commands_and_options(words: str, completed: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    env = {"_TASC_COMPLETE": "complete_bash", **asked}
    assert CliRunner().invoke(app, [], env=env, prog_name="tasc").output.split() == [completed]


def test_error_of_a_command_without_its_task_names_task_create():
    ran = CliRunner().invoke(app, ["build-index"], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert "missing argument 'task'" in ran.output.lower()
    assert "tasc task create" in ran.output


def ended(*given: object) -> BaseException | None:
    """Returns the exception that ended a command; None if there was none."""
    return CliRunner().invoke(app, [str(each) for each in given]).exception


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes commands open a store that does not exist."""
    monkeypatch.setattr(StoreOptions, "open", lambda self, task=None: nullcontext("redis://none"))
    monkeypatch.setattr("tasc_store.connect", lambda url: None)
    monkeypatch.setattr("tasc_store.batches.files.FileStore.require_shared", lambda files: None)
    monkeypatch.setattr("tasc_store.batches.files.FileStore.__init__", lambda *given: None)


@pytest.mark.parametrize(
    ("actors", "given", "cpus", "hosts"),
    [
        (1, "127.0.0.1", 4, ["127.0.0.1"]),
        (7, "::1", 8, ["::1"]),
        (1, "localhost", 4, ["127.0.0.1", "::1"]),
        (1, None, 4, ["10.1.2.3"]),
    ],
)
def test_local_ray_of_a_worker_fits_its_engines_and_its_metrics_have_an_address(
    monkeypatch, store, tmp_path, actors, given, cpus, hosts
):
    started, reported = list[int](), list[str]()

    @contextmanager
    def ray(num_cpus: int) -> Iterator[None]:
        started.append(num_cpus)
        yield

    def port(*args: Any, host: str, **more: Any) -> AbstractContextManager[SimpleNamespace]:
        reported.append(host)
        return nullcontext(SimpleNamespace(target=host))

    idle = SimpleNamespace(run_waiting=lambda: None)
    monkeypatch.setattr("tasc_jobs.ray_local.local_ray", ray)
    monkeypatch.setattr("tasc_serve.metrics.discovery.MetricsPort", port)
    monkeypatch.setattr("tasc_serve.metrics.discovery.node_address", lambda: "10.1.2.3")
    monkeypatch.setattr("tasc_jobs.worker.batch_worker.BatchWorker", lambda *args, **more: idle)
    named = () if given is None else ("--metrics-host", given)
    assert not ended("worker", "--once", "--actors", actors, "--data-dir", tmp_path, *named)
    assert started == [cpus]
    assert reported[0] in hosts


def test_unresolvable_metrics_host_is_refused(store: None, tmp_path: Path) -> None:
    host = ("--metrics-host", "no.such.invalid")
    error = ended("worker", "--once", "--data-dir", tmp_path, *host)
    assert isinstance(error, UsageError)
    assert str(error).startswith("--metrics-host 'no.such.invalid'")


def test_repeated_refresh_counts_rows_since_an_index_was_last_judged(monkeypatch, store):
    """The script is: nothing judged yet, a verdict, too few rows, another verdict."""
    rounds = [(100, 0), (300, 50), (400, 0), (600, 50), (700, 0)]
    left, judged = iter(rounds), []

    def run(*args: Any, **more: Any) -> Refreshed:
        judged.append(more["judged"])
        rows, held = next(left)
        return Refreshed("t", 0, 0, rows, rows, "so", judged_rows=held)

    def sleep(seconds: float) -> None:
        if len(judged) == len(rounds):
            raise SystemExit(7)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("tasc_jobs.tuning.refresh.refresh", run)
    assert isinstance(ended("refresh", "t", "--every", 1), SystemExit)
    assert judged == [0, 0, 300, 300, 600]


def test_input_is_never_overwritten_by_the_default_reject_file(tmp_path: Path) -> None:
    source, output = tmp_path / "x.jsonl.rejected.jsonl", tmp_path / "x.jsonl"
    source.write_text('{"id": "a", "input": "hi"}\n')
    error = ended("generate", "t", "--input", source, "--output", output)
    assert isinstance(error, UsageError)
    assert source.name in str(error)
    with pytest.raises(UsageError):
        generate("redis://nowhere", "t", Source.of(source), output)
    assert not output.exists()


def test_printed_usage_has_an_api_key_if_one_is_required() -> None:
    for keyed in (False, True):
        text = usage_of("http://host:1", "greet", "hi", keyed)
        lines = text.partition("\n\n")[2].partition("import ")[0]
        lines = lines if keyed else lines.partition("from ")[0]
        shell = "tasc() { echo secret; }; curl() { printf '%s\\n' \"$@\"; }\n" + lines
        reported = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        sent = reported.stdout.splitlines()
        assert "http://host:1/v1/chat/completions" in sent
        assert ("Authorization: Bearer secret" in sent) == keyed
        assert json.loads(sent[-1])["model"] == "greet"
        assert ("os.environ" in text) == keyed
