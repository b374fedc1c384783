"""Takes a trainer through all its steps, with checkpoints on the way. It knows no model."""

import time
from collections.abc import Callable
from typing import Any

from tasc_jobs.finetune.checkpoints import Checkpoints
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.training import Trainer, TrainingProgress
from tasc_jobs.runtime.progress import note
from tasc_jobs.runtime.stages import StageProgress

_LAST_LOSSES = 10  # steps whose mean loss is told of a run


def run_through(
    trainer: Trainer,
    checkpoints: Checkpoints | None,
    every_s: float,
    progress: StageProgress,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Take the steps that are left, and say what all of them were like.

    Seconds and tokens are of the whole run: those of its earlier pieces are in the checkpoint that
    the trainer goes on from.

    Ctrl-C, or an exit that a signal asks for, loses none that was whole.

    Args:
        checkpoints: None for those of a crew that save none.
        every_s: Seconds between two of them.
        say: TrainingProgress in words how it goes.

    Raises:
        FinetuneError: See `Trainer.run`; or a checkpoint cannot be written.
    """
    saved = time.monotonic()
    before, tokens = checkpoints.spent() if checkpoints else (0.0, 0)
    begun = saved - before

    def tell(told: TrainingProgress) -> None:
        nonlocal saved, tokens
        tokens += told.tokens
        rate = tokens / max(time.monotonic() - begun, 1e-9)
        say(f"loss {told.loss:.3f}, {rate:,.0f} tokens/s")
        progress("train", told.step, told.steps)
        if checkpoints and time.monotonic() - saved > every_s:
            checkpoints.save(trainer.checkpoint, time.monotonic() - begun, tokens)
            saved = time.monotonic()

    progress("train", trainer.checkpoint.step, trainer.steps)
    try:
        trainer.run(tell)
        if checkpoints:
            checkpoints.save(trainer.checkpoint, time.monotonic() - begun, tokens)
    except (KeyboardInterrupt, SystemExit):
        if checkpoints:
            _keep(trainer, checkpoints, time.monotonic() - begun, tokens)
        raise
    losses = trainer.checkpoint.losses
    last = losses[-_LAST_LOSSES:]
    seconds = time.monotonic() - begun
    return {
        "steps": trainer.steps,
        "first_loss": losses[0],
        "loss": sum(last) / len(last),
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "seconds": seconds,
    }


def _keep(trainer: Trainer, checkpoints: Checkpoints, seconds: float, tokens: int) -> None:
    """Save what is whole of an interrupted run, and say so; also if it cannot be saved."""
    if not (step := trainer.checkpoint.step):
        return
    try:
        checkpoints.save(trainer.checkpoint, seconds, tokens)
        note(f"step {step} of {trainer.steps} is kept; the same command goes on behind it")
    except FinetuneError as error:
        note(str(error))
