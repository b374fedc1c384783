"""A tiny model and its tokenizer, made once per run, and the `tasc` command."""

from pathlib import Path

import pytest

import tiny
from tasc_command import InProcess
from tasc_text import TaskTokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> TaskTokenizer:
    return TaskTokenizer.from_folder(folder)


@pytest.fixture
def tasc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    return InProcess(monkeypatch, capsys)
