"""Tests that the ``tasc`` command can parse the commands in deploy files; it runs none of them."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import typer
import yaml

from tasc_jobs.cli.main import all_commands

DEPLOY = Path(__file__).parents[2] / "deploy"


def _commands() -> dict[str, list[str]]:
    """Returns argument lists by the file that has them."""
    image = (DEPLOY / "Dockerfile").read_text("utf-8")
    (default,) = re.findall(r"^CMD (\[.*\])$", image, re.M)
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    worker = yaml.safe_load((DEPLOY / "kubernetes" / "batch-worker.yaml").read_text("utf-8"))
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    found = {
        "Dockerfile": json.loads(default),
        "compose.yaml": shlex.split(compose["services"]["batches"]["command"]),
        "batch-worker.yaml": container["command"],
    }
    for job in sorted((DEPLOY / "kubernetes" / "jobs").glob("*/kustomization.yaml")):
        for entrypoint in re.findall(r"path: /spec/entrypoint, value: (.*)}", job.read_text()):
            found[job.parent.name] = shlex.split(entrypoint)
    return found


def test_commands_and_options_in_deploy_files_exist():
    commands = _commands()
    assert set(commands) == {
        "Dockerfile", "compose.yaml", "batch-worker.yaml", "build-index", "generate",
    }  # fmt: skip
    group: Any = all_commands()
    for file, (program, name, *arguments) in commands.items():
        assert program == "tasc", file
        command = group.get_command(typer.Context(group), name)
        assert command is not None, file
        assert command.make_context(name, arguments).params, file
