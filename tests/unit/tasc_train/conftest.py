"""Trainings that tests of several files share, each made once per run."""

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import drafter_training
from drafter_training import SHORT, trained_by
from finetuning import Bench, Made, begin, made_by, make


@pytest.fixture(scope="module", autouse=True)
def _own_garbage() -> Iterator[None]:
    """Excludes objects of other files from garbage collections of fine-tunes."""
    gc.freeze()
    yield
    gc.unfreeze()


OTHER = pytest.param(("gpt_neox", False), marks=pytest.mark.slow("another architecture, untied"))


@pytest.fixture(scope="session", params=[("qwen2", True), OTHER], ids=["qwen2", "gpt_neox"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    architecture, tied = request.param
    return make(tmp_path_factory.mktemp("bench"), architecture, tied=tied)


@pytest.fixture(scope="session")
def whole(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """An uninterrupted fine-tune."""
    return made_by(bench, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def begun(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that was killed after its third step, with the second's checkpoint."""
    output = tmp_path_factory.mktemp("begun")
    begin(bench.job(output), 3)
    return output


@pytest.fixture
def killed(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "killed")


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> drafter_training.Bench:
    return drafter_training.make(tmp_path_factory.mktemp("target") / "qwen2", "qwen2")


@pytest.fixture(scope="session", params=["eagle", "independent"])
def short(request, target, tmp_path_factory):
    """A drafter after an uninterrupted training of two epochs."""
    return trained_by(target, request.param, tmp_path_factory.mktemp("short") / "out", **SHORT)
