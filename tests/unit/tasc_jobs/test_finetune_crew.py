"""Workers that share a fine-tune wait for their first, whatever else runs in its output."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finetuning import Bench, make
from tasc_jobs.finetune.claim import claimed
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.finished import FINETUNE
from tasc_jobs.finetune.job import CHECKPOINT, finetune


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make(tmp_path_factory.mktemp("bench"), "qwen2")


class Killed(Exception):
    """As if the process had ended."""


def begin(bench: Bench, folder: Path, step: int) -> None:
    """Leaves the checkpoint of the step before."""

    def kill(stage: str, done: int, total: int | None) -> None:
        if done == step:
            raise Killed

    with pytest.raises(Killed):
        finetune(replace(bench.job(folder), checkpoint_s=0.0), kill)


class Second:
    """The second of two workers, by itself; what it meets the first for is done in its place."""

    rank, size = 1, 2

    def __init__(self, *done: Callable[[Sequence[torch.Tensor]], object]) -> None:
        self._done = iter(done)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        next(self._done, lambda tensors: None)(tensors)


class First:
    """The first of as many as there are."""

    rank, size = 0, 1

    def __init__(self, output: Path) -> None:
        self._output = output

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        with (
            pytest.raises(FinetuneError, match="another process trains"),
            claimed(self._output, FINETUNE),
        ):
            pass


def test_a_crew_goes_on_from_what_its_first_worker_finds(bench: Bench, tmp_path: Path) -> None:
    begin(bench, tmp_path / "dying", step=5)
    later, job = tmp_path / "dying" / CHECKPOINT, bench.job(tmp_path / "crew")
    begin(bench, job.output, step=3)
    there, seen = job.output / CHECKPOINT, list[int]()

    def save(tensors: object) -> None:  # the dying one's last, before the first has the claim
        shutil.rmtree(there)
        shutil.copytree(later, there)

    second = Second(save, lambda tensors: shutil.rmtree(there))
    finetune(job, lambda stage, done, total: seen.append(done), second)
    assert seen == [4, 5, 6, 7, 8, 9]


def test_a_crew_that_begins_again_behind_its_result_says_what_it_is_like(
    bench: Bench, tmp_path: Path
) -> None:
    job, seen = bench.job(tmp_path), list[str]()
    found = finetune(job, crew=First(tmp_path))
    (tmp_path / CHECKPOINT).mkdir()

    def look(stage: str, done: int, total: int | None) -> None:
        seen.append(stage)

    assert finetune(job, look, First(tmp_path)) == found
    assert not (tmp_path / CHECKPOINT).exists()
    assert finetune(job, look, Second(lambda tensors: tensors[0].add_(1))) == found
    assert not seen
    with pytest.raises(FinetuneError, match="has a fine-tuned model already"):
        finetune(bench.job(tmp_path, epochs=1), crew=First(tmp_path))
