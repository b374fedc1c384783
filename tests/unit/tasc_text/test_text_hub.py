"""A model is a folder as it is, or a hub name in the hub's cache; no network is needed for either.

The hub's client reads its environment when it is imported, so each case is a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasc_text import TextError, resolve_folder

COMMIT, OTHER = "a" * 40, "b" * 40
CODE = """
import sys
from tasc_text import TextError, resolve_folder
try:
    print(resolve_folder(sys.argv[1], sys.argv[2] or None, weights=False))
except TextError as error:
    print("TextError:", error)
"""


def resolve_offline(home: Path, model: str, revision: str = "", **environment: str) -> str:
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)} | environment
    left = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE, model, revision],
        env={**left, **settings},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The hub's cache with two commits of one model; ``main`` is the first of them."""
    model = tmp_path / "hub" / "models--team--tiny"
    for commit in (COMMIT, OTHER):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return model


def test_a_folder_is_itself_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = (tmp_path / "model").resolve()
    for name in ("model", "./model", str(tmp_path / "model"), "~/model"):
        assert resolve_folder(name, "any-revision") == expected


def test_a_folder_wins_over_a_hub_name_of_the_same_spelling(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "team" / "tiny").mkdir(parents=True)
    assert resolve_offline(tmp_path, "team/tiny") == str(tmp_path / "team" / "tiny")


def test_a_cached_hub_name_resolves_without_network(cache: Path, tmp_path: Path) -> None:
    assert resolve_offline(tmp_path, "team/tiny") == str(cache / "snapshots" / COMMIT)


def test_a_revision_chooses_the_snapshot(cache: Path, tmp_path: Path) -> None:
    assert resolve_offline(tmp_path, "team/tiny", OTHER) == str(cache / "snapshots" / OTHER)
    assert "TextError: model 'team/tiny'" in resolve_offline(tmp_path, "team/tiny", "c" * 40)


@pytest.mark.parametrize(
    "environment", [{}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_a_name_that_is_not_to_be_had_is_refused_with_the_way_out(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    said = resolve_offline(tmp_path, "team/missing", **environment)
    assert said.startswith("TextError: model 'team/missing' is neither a folder here nor")
    assert said.endswith("check the spelling, or name a local folder")


@pytest.mark.parametrize("name", ["no/such/folder", "a b"])
def test_what_cannot_be_a_hub_name_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(TextError, match=r"neither a folder here.*or name a local folder"):
        resolve_folder(name)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "../nowhere", "~/nowhere/at/all"])
def test_a_path_is_no_hub_name(name: str) -> None:
    with pytest.raises(TextError, match=f"^there is no folder {name}; check the spelling"):
        resolve_folder(name)
