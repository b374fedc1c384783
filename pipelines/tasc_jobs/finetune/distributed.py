"""Fine-tuning by several Ray Train workers, on one machine or many.

The steps are those of one process; the rows of each step are divided among the workers.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, distributed

from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.checkpoints import FINETUNE, claimed
from tasc_jobs.finetune.finetuning import Finetune, finetune, plan_of, report_of
from tasc_runtime.progress import StageProgress, silent

_LOOK_S = 0.5


class Ranks:
    """The workers of the initialised `torch.distributed` group."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def sum(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            distributed.all_reduce(tensor)


@ray.remote(num_cpus=0)
class _Board:
    """Holds the progress that rank 0 reports.

    Ray Train passes on progress only with a Ray checkpoint, and we write our own.
    """

    def __init__(self) -> None:
        self._at: tuple[str, int, int | None] | None = None
        self._said = ""

    def write(self, stage: str, done: int, total: int | None, said: str) -> None:
        self._at, self._said = (stage, done, total), said

    def read(self) -> tuple[tuple[str, int, int | None] | None, str]:
        return self._at, self._said


def finetune_by(
    workers: int,
    job: Finetune,
    progress: StageProgress = silent,
    say: Callable[[str], None] = lambda text: None,
    *,
    gpus: bool,
    retries: int = 2,
) -> dict[str, Any]:
    """Runs `finetune` with several workers on the running Ray; all must see the job's folders.

    If a worker dies, all start again from the last checkpoint. Rank 0 locks the output. If Ray
    replaces a rank 0 that is still alive, the new one waits until the old one exits.

    Args:
        gpus: Each worker gets a GPU.
        retries: How many times the workers may be started again.

    Raises:
        FinetuneError: See `finetune`; or the workers failed more than ``retries`` times.
    """
    plan_of(job)  # its errors are raised before workers are started
    with claimed(job.output, FINETUNE):
        pass
    board = _Board.remote()  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="tasc-train-") as folder:
        trainer = TorchTrainer(
            _work,
            train_loop_config={"job": job, "board": board},
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
            torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
            run_config=RunConfig(
                storage_path=folder, failure_config=FailureConfig(max_failures=retries)
            ),
        )
        _watch(trainer, board, progress, say)
    return report_of(job.output)


def _work(given: dict[str, Any]) -> None:
    job, board, ranks = given["job"], given["board"], Ranks()
    told, said = 0.0, ""

    def say(text: str) -> None:
        nonlocal said
        said = text

    def tell(stage: str, done: int, total: int | None) -> None:
        nonlocal told
        if done == total or time.monotonic() - told > _LOOK_S:
            board.write.remote(stage, done, total, said)
            told = time.monotonic()

    torch.set_num_threads(1)
    finetune(job, tell if ranks.rank == 0 else silent, ranks, say)


def _watch(trainer: Any, board: Any, progress: StageProgress, say: Callable[[str], None]) -> None:
    """Forwards the progress on the board until the workers have ended."""
    ended: list[Any] = []

    def fit() -> None:
        try:
            ended.append(trainer.fit())
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        at, said = ray.get(board.read.remote())
        if at:
            say(said)
            progress(*at)
    (result,) = ended
    if isinstance(result, Exception):
        raise FinetuneError(f"the workers failed: {str(result).splitlines()[-1]}") from result
