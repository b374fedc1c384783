"""Tests the content of both wheels, and that they work without the repository."""

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
from packaging.requirements import Requirement
from test_dockerfile import ROOT, of

from documentation.documents import document
from tasc_jobs.demo.tasks import MODEL, TASKS, demo_record, read_split
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


# Appended to the example; prints the libraries that it loaded, and the files of our packages.
LOADED = """
import json, sys
loaded = {name.split(".")[0] for name in sys.modules if not name.startswith("_")}
ours = [module.__file__ for name, module in sys.modules.items() if name.startswith("tasc_")]
print(json.dumps([sorted(loaded - sys.stdlib_module_names), ours]))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels by distribution, built by the command and from the files of the image's stage."""
    folder = tmp_path_factory.mktemp("wheel")
    context = folder / "src"
    context.mkdir()
    for name in {source for line in of("wheel", "COPY") for source in line.split()[:-1]}:
        given, seen = ROOT / name, context / name
        if given.is_dir():
            hidden = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            shutil.copytree(given, seen, ignore=hidden)
        else:
            shutil.copy(given, seen)
    (command,) = (line for line in of("wheel", "RUN") if line.startswith("pip wheel"))
    assert command.endswith("/wheels ./services .")
    arguments = [*command.split()[1:-3], str(folder), str(context / "services"), str(context)]
    pip(*arguments, "--no-build-isolation", "--no-index")
    return {built.name.split("-")[0]: built for built in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of tasc_draft; what one test compiles there, the next one loads."""
    folder = tmp_path_factory.mktemp("installed")
    install(wheels["tasc_draft"], folder)
    return folder


def install(wheel: Path, to: Path) -> None:
    pip("install", "--upgrade", "--no-deps", "--no-index", "--target", str(to), str(wheel))


def environment(installed: Path) -> dict[str, str]:
    """The environment of a user, who compiles drafting at the first start."""
    unset = ("NUMBA_CACHE_DIR", "REDIS_URL", "RAY_ADDRESS")
    own = {name: value for name, value in os.environ.items() if name not in unset}
    return own | {"PYTHONPATH": str(installed)}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wheels_have_all_files_of_our_packages_once(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == {"tasc_draft", "tasc_serve"}
    inside = [name for wheel in wheels.values() for name in zipfile.ZipFile(wheel).namelist()]
    packaged = [name for name in inside if ".dist-info/" not in name]
    command = [
        "git",
        "ls-files",
        "-co",
        "--exclude-standard",
        "services/tasc_*",
        "pipelines/tasc_*",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(packaged) == sorted(name.split("/", 1)[1] for name in listed.stdout.splitlines())
    for wheel in wheels.values():
        assert any(name.endswith("/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_wheel_of_tasc_draft_is_small_and_has_the_packages_that_know_no_model(
    wheels: dict[str, Path],
) -> None:
    wheel = wheels["tasc_draft"]
    assert wheel.stat().st_size < 1_000_000
    inside = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    (modelless,) = (
        contract["source_modules"]
        for contract in tools["importlinter"]["contracts"]
        if contract["name"] == "protocol, text, draft and store know no model"
    )
    assert {name for name in inside if not name.endswith(".dist-info")} == set(modelless)


def _project(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return found


@pytest.mark.parametrize(
    "packed", [False, pytest.param(True, marks=pytest.mark.slow("compiles all of drafting"))]
)
def test_example_of_tasc_draft_needs_only_its_packages_and_requirements(
    packed: bool, wheels: dict[str, Path], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    used = request.getfixturevalue("installed") if packed else ROOT / "services"
    env = environment(used) if packed else os.environ | {"PYTHONPATH": str(used)}
    shutil.copytree(MODEL, tmp_path / "my-model", ignore=shutil.ignore_patterns("*.safetensors"))
    (example,) = (
        b for b in document(ROOT / "services" / "README.md").blocks if b.language == "python"
    )
    command = [sys.executable, "-c", example.text + LOADED]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *drafted, loaded = done.stdout.splitlines()
    assert "set alarm" in "".join(drafted)
    libraries, files = json.loads(loaded)
    required, known = (
        {Requirement(text).name.replace("-", "_") for text in _project(root)["dependencies"]}
        for root in (ROOT / "services", ROOT)
    )
    assert known.intersection(libraries) == required | {"tasc_draft"}
    packages = {Path(file).relative_to(used).parts[0] for file in files}
    assert packages <= {
        name.split("/")[0] for name in zipfile.ZipFile(wheels["tasc_draft"]).namelist()
    }


def test_wheel_has_the_tasc_command_and_the_demo_data(wheels: dict[str, Path]) -> None:
    wheel = wheels["tasc_serve"]
    names = zipfile.ZipFile(wheel).namelist()
    assert "tasc_serve/app.py" in names
    (entry,) = (name for name in names if name.endswith("entry_points.txt"))
    assert b"tasc = tasc_jobs.cli.main:main" in zipfile.ZipFile(wheel).read(entry)
    found = (ROOT / "pipelines" / "tasc_jobs" / "demo").rglob("*")
    files = {file for file in found if file.is_file() and not file.suffix.startswith(".py")}
    assert len(files) > 10
    assert {str(file.relative_to(ROOT / "pipelines")) for file in files} <= set(names)


@pytest.mark.slow("compiles what an installed package compiles at its first start, or loads it")
def test_wheels_work_in_an_empty_folder(
    wheels: dict[str, Path], installed: Path, tmp_path: Path
) -> None:
    install(wheels["tasc_serve"], installed)
    (empty := tmp_path / "empty").mkdir()
    env = environment(installed) | {"HOME": str(tmp_path)}

    def run(*command: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=empty, env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    tasc = installed / "bin" / "tasc"
    assert run(tasc, "--version") == f"tasc {_project(ROOT)['version']}\n"
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
