"""Tests that a user's files are in the folders of the XDG variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tasc_draft
import tasc_jobs
from tasc_draft.files import cache_folder, data_folder

# A process that cannot write beside its own code, as in another user's installation.
PLACES = """
import os
os.access = lambda path, mode: False
from tasc_draft.compiled import Compiler, Path
from tasc_jobs.cli.options import StoreOptions
print(StoreOptions().data_dir, Compiler(Path("a"))._cache_dir)
"""


@pytest.mark.parametrize("value", [None, "", "relative/folder"])
def test_default_folders_are_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert cache_folder() == tmp_path / ".cache" / "tasc-serve"
    assert data_folder() == tmp_path / ".local" / "share" / "tasc-serve"


def test_commands_and_compiled_code_follow_xdg_variables(tmp_path: Path) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path / "c"), "XDG_DATA_HOME": str(tmp_path / "d")}
    left = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", PLACES], env=left | variables, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    store, code = map(Path, done.stdout.split())
    assert store == tmp_path / "d" / "tasc-serve"
    assert code.parent == tmp_path / "c" / "tasc-serve"


def test_no_other_code_uses_the_home_folder() -> None:
    services, pipelines = (Path(package.__file__).parents[1] for package in (tasc_draft, tasc_jobs))
    found = [
        path.name
        for folder in (services, pipelines)
        for path in folder.rglob("*.py")
        if "Path.home" in path.read_text(encoding="utf-8")
    ]
    assert found == ["files.py"]
