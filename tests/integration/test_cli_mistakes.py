"""A wrong task or file is reported before torch or Ray are imported, which takes seconds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import write_rows
from tasc_jobs import demo
from tasc_jobs.cli.main import all_commands

pytestmark = pytest.mark.redis

# Commands that take a task that must exist.
NAMED = ["build-index", "refresh", "stats", "tune", "forecast-ft"]
TASK = [
    *([name, "nothing"] for name in NAMED),
    *(["index", *each] for each in (["list", "nothing"], ["use", "nothing", "1"])),
    ["index", "export", "nothing", "--to", "FOLDER/out"],
    ["task", "show", "nothing"],
    ["task", "set", "nothing", "--max-tokens", "9"],
    ["task", "use", "nothing", "1"],
    ["task", "delete", "nothing", "--yes"],
    ["generate", "nothing", "--input", "ROWS", "--output", "FOLDER/out.jsonl"],
    *([name, "nothing", "--output", "FOLDER/out"] for name in ("enrich", "finetune")),
    ["evaluate", "nothing", "--test", "ROWS"],
    ["calibrate", "nothing", "--rows", "ROWS"],
    ["train-drafter", "nothing", "--kind", "eagle", "--output", "FOLDER/out"],
    ["rank-vocabulary", "nothing", "--from", "raw"],
    ["serve", "--config", "CONFIG"],
]
TRAIN = ["--train", "nothing.jsonl"]
FILE = [
    ["ingest", "t", "nothing.jsonl"],
    ["build-index", "t", "--bigrams", "nothing.npz"],
    *([name, "--config", "nothing.yaml"] for name in ("serve", "worker")),
    ["demo", "--report", "nothing/demo.html"],
    ["generate", "t", "--input", "nothing.jsonl", "--output", "FOLDER/out.jsonl"],
    *([name, *TRAIN] for name in ("stats", "forecast-ft")),
    ["replay", *TRAIN, "--test", "ROWS", "--tokenizer", "MODEL"],
    ["tune", "t", "--step-cost", "nothing.json"],
    *([*command, *TRAIN, "--output", "FOLDER/out"] for command in (["enrich"], ["finetune", "t"])),
    ["evaluate", "t", "--test", "nothing.jsonl"],
    ["calibrate", "t", "--rows", "nothing.jsonl"],
    ["train-drafter", "t", "--kind", "eagle", *TRAIN, "--output", "FOLDER/out"],
    ["rank-vocabulary", "t", "--from", "draft", "--answers", "nothing.jsonl"],
]
# Runs each command in turn; prints its exit code, its last line and the slow modules loaded so far.
RUN = """
import contextlib, io, json, sys
from tasc_jobs.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["tasc", *arguments]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, errors.getvalue(), sorted({"torch", "ray"} & set(sys.modules))]))
"""


@pytest.mark.parametrize("commands", [TASK, FILE], ids=["task", "file"])
def test_usage_mistake_is_reported_before_slow_imports(commands, redis_url, tmp_path) -> None:
    files = {
        "ROWS": str(write_rows(tmp_path / "rows.jsonl", [{"input": "a", "output": "b"}])),
        "CONFIG": str(tmp_path / "serve.yaml"),
        "FOLDER": str(tmp_path),
        "MODEL": str(Path(demo.__path__[0]) / "tasc-demo-7m"),
    }
    Path(files["CONFIG"]).write_text("tasks: [{name: nothing}]\nhttp: {port: 0}\n")
    group = all_commands()
    without = {
        name
        for name, command in group.commands.items()
        if not hasattr(command, "commands") and all(p.name != "as_json" for p in command.params)
    }
    assert without == {"serve", "demo"}
    commands = [each if each[0] in without else [*each, "--json"] for each in commands]
    filled = json.loads(re.sub("[A-Z]{4,}", lambda name: files[name[0]], json.dumps(commands)))
    ran = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(filled)],
        env={**os.environ, "REDIS_URL": redis_url}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    for command, (code, error, slow) in zip(filled, found, strict=True):
        assert code in (1, 2), (command, error)
        assert "nothing" in error, (command, error)
        assert "Traceback" not in error, (command, error)
        assert slow == [], command


def test_every_command_with_a_task_is_tested_with_an_unknown_task() -> None:
    """All commands except those that make a task or keys, or may wait for a task."""
    group = all_commands()
    takes = {
        name
        for name, command in group.commands.items()
        if any(parameter.name == "task" for parameter in command.params)
    }
    assert takes - {"ingest"} <= {command[0] for command in TASK}
