"""What `--help` says: every default, what is drafted, and how tasks are registered."""

import re

import click
import pytest
import typer
from rich.markup import render
from typer.testing import CliRunner

from tasc_jobs.cli.main import app

APP = typer.main.get_command(app)
BORDERS = re.compile(r"[\s│]+")


def rows(command: str) -> list[str]:
    ran = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "110"})
    assert ran.exit_code == 0
    return ran.output.splitlines()


def options(command: str) -> dict[str, str]:
    """What is said of each option, by its name."""
    found: dict[str, str] = {}
    name = ""
    for row in rows(command):
        if option := re.match(r"│ [* ]*(--[a-z-]+)", row):
            name = option[1]
        if name and row.startswith("│"):
            found[name] = BORDERS.sub(" ", found.get(name, "") + row)
    return found


@pytest.mark.parametrize(
    "command",
    [
        *("stats", "replay", "tune", "forecast", "build-index", "generate", "refresh"),
        *("task create", "key create", "worker", "evaluate", "forecast-ft", "rank-vocabulary"),
        "train-drafter",
    ],
)
def test_each_option_says_its_default_or_that_it_must_be_given(command):
    said = options(command)
    assert len(said) > 5
    without = {
        n for n, text in said.items() if not re.search(r"\[default: .*\]|\[required\]", text)
    }
    assert without == {"--help"}


def test_defaults_that_stand_for_a_list_or_a_place_are_said():
    assert "[default: (mixed)]" in options("replay")["--proposer"]
    assert "[default: (4,8,16,32)]" in options("replay")["--budget"]
    assert "[default: 0.02]" in options("tune")["--node-cost"]
    assert "[default: (1,8,32)]" in options("forecast")["--rows"]


def test_create_says_its_defaults_and_shows_how():
    said = options("task create")
    for name, default in (
        ("--dtype", "float32"), ("--max-tokens", "256"), ("--temperature", "0"),
        ("--repetition-penalty", "1"), ("--mixture", "mixed"), ("--num-speculative-tokens", "16"),
    ):  # fmt: skip
        assert f"[default: ({default})]" in said[name]
    assert {name for name, text in said.items() if "[required]" in text} == {
        "--model",
        "--template",
    }
    assert " ".join(rows("task create")).count("tasc task create ") == 3


def test_set_takes_what_create_takes_and_says_no_defaults():
    said, created = options("task set"), options("task create")
    assert said.keys() - created.keys() == {"--unset"}
    assert created.keys() - said.keys() == {"--replace"}
    with_default = {name for name, text in said.items() if "[default: " in text}
    assert with_default == {"--redis-url", "--data-dir"}


def commands(of: click.Command) -> list[click.Command]:
    inner = getattr(of, "commands", {}).values()
    return [of, *(found for each in inner for found in commands(each))]


def test_no_help_text_loses_what_stands_in_brackets():
    found = commands(APP)
    texts = [
        t for c in found for t in (c.help, c.epilog, *(getattr(p, "help", "") for p in c.params))
    ]
    said = [text for text in texts if text]
    assert len(said) > 100
    assert any("\\[" in text for text in said)
    for text in said:
        assert render(text).plain == text.replace("\\[", "[")


@pytest.mark.parametrize("name", ["create", "set"])
def test_examples_are_shown_as_they_are_to_be_typed(name):
    epilog = APP.commands["task"].commands[name].epilog
    examples = [" ".join(each.split()).replace("\\[", "[") for each in epilog.split("\n\n")]
    assert len(examples) > 3
    said = " ".join(" ".join(rows(f"task {name}")).split())
    for example in examples:
        assert example in said
