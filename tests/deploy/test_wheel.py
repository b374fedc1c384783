"""Tests the content of the wheel, and that it works without the repository."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_dockerfile import ROOT, of

from tasc_jobs.demo.tasks import TASKS, demo_record, read_split
from tasc_runtime.llm import LLM

# Gets the inputs; prints the names that the wheel provides, and the demo's answers.
PROGRAM = """
import json, sys
import tasc_serve
loaded = sorted(sys.modules)
from tasc_serve import LLM
from tasc_jobs.demo.tasks import TASKS, demo_record, read_split
record = demo_record("massive_en")
llm = LLM(record.model, adapter=record.adapter, template=record.template, cost_aware=False)
answers = llm.generate(json.loads(sys.argv[1]))
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("tasc_")]
rows = {f"{task} {split}": len(read_split(task, split))
        for task in TASKS for split in ("train", "test")}
print(json.dumps({"loaded": loaded, "texts": [answer.text for answer in answers],
                  "files": files, "rows": rows}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the command and from the files of the image's stage."""
    folder = tmp_path_factory.mktemp("wheel")
    context = folder / "src"
    context.mkdir()
    for name in {source for line in of("wheel", "COPY") for source in line.split()[:-1]}:
        given, seen = ROOT / name, context / name
        if given.is_dir():
            hidden = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(given, seen, ignore=hidden)
        else:
            shutil.copy(given, seen)
    (command,) = (line for line in of("wheel", "RUN") if line.startswith("pip wheel"))
    arguments = command.replace("/wheels .", f"{folder} {context}").split()[1:]
    pip(*arguments, "--no-build-isolation", "--no-index")
    (built,) = folder.glob("*.whl")
    return built


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wheel_has_the_tasc_command_and_the_demo_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "tasc_serve/app.py" in names
    (entry,) = (name for name in names if name.endswith("entry_points.txt"))
    assert b"tasc = tasc_jobs.cli.main:main" in zipfile.ZipFile(wheel).read(entry)
    found = (ROOT / "pipelines" / "tasc_jobs" / "demo").rglob("*")
    files = {file for file in found if file.is_file() and not file.suffix.startswith(".py")}
    assert len(files) > 10
    assert {str(file.relative_to(ROOT / "pipelines")) for file in files} <= set(names)


@pytest.mark.slow("compiles what an installed package compiles at its first start")
def test_wheel_works_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    pip("install", "--no-deps", "--no-index", "--target", str(installed), str(wheel))
    empty.mkdir()
    unset = ("NUMBA_CACHE_DIR", "REDIS_URL", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(installed), "HOME": str(tmp_path)}

    def run(*command: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=empty, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    tasc = installed / "bin" / "tasc"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert run(tasc, "--version") == f"tasc {project['version']}\n"
    assert "generate" in run(tasc, "--help")
    inputs = [row["input"] for row in read_split("massive_en", "test")[:3]]
    found: dict[str, Any] = json.loads(run("-c", PROGRAM, json.dumps(inputs)))
    assert not {"torch", "ray", "transformers"} & set(found["loaded"])
    assert all(Path(file).is_relative_to(installed) for file in found["files"])
    assert found["rows"] == {
        f"{task} {split}": len(read_split(task, split))
        for task in TASKS
        for split in ("train", "test")
    }
    record = demo_record("massive_en")
    llm = LLM(record.model, adapter=record.adapter, template=record.template, cost_aware=False)
    assert found["texts"] == [answer.text for answer in llm.generate(inputs)]
    assert all(found["texts"])
