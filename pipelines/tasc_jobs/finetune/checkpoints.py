"""The output folder of a training: its lock and its newest checkpoint.

Checkpoints are written atomically, so a process may be killed at any moment.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tasc_engine.errors import is_out_of_memory
from tasc_jobs.errors import FinetuneError

LOCK = ".lock"
_RETRY_S = 0.1
REPORT = "finetune.json"  # moved into place last, so its presence marks a finished fine-tune
DISK_FULL = (OSError, SafetensorError)  # what libraries raise when a disk is full
_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True)
class OutputKind:
    """The kind of run that uses an output folder.

    Attributes:
        name: Name of the kind with its article, such as "a fine-tune". It is written to `LOCK`.
        writes: Names of the files and folders of its result. If a folder without a lock has one of
            these, they belong to something else and must not be overwritten.
    """

    name: str
    writes: tuple[str, ...]


@contextmanager
def claimed(output: Path, kind: OutputKind, wait_s: float = 0.0) -> Iterator[None]:
    """Lock a folder for the duration of the block. Creates the folder if it does not exist.

    Args:
        wait_s: How long to wait for the lock, for example for a process that is about to exit.

    Raises:
        FinetuneError: Another process has locked the folder, it has files that would be
            overwritten, or it cannot be created, written to or locked.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not (output / LOCK).is_file():
            _require_no_foreign_result(output, kind)
        lock = (output / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise FinetuneError(
            f"{output} cannot be written to ({error}); choose another output"
        ) from error
    with lock:
        deadline = time.monotonic() + wait_s
        while not _try_lock(lock, output):
            if time.monotonic() >= deadline:
                raise FinetuneError(
                    f"another process is training in {output}; wait until it ends, or choose "
                    "another output"
                )
            time.sleep(_RETRY_S)
        _write_kind(lock, output, kind)
        yield


def _require_no_foreign_result(output: Path, kind: OutputKind) -> None:
    if existing := [name for name in kind.writes if (output / name).exists()]:
        raise FinetuneError(
            f"{output} has {', '.join(existing)} from something else, which {kind.name} would "
            "overwrite; choose another output"
        )


def _try_lock(lock: IO[str], output: Path) -> bool:
    """Returns whether the lock was free and is now held by this process."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems do not support locks
        raise FinetuneError(
            f"the file system of {output} does not support locks ({error}); choose an output on "
            "another file system"
        ) from error
    return True


def _write_kind(lock: IO[str], output: Path, kind: OutputKind) -> None:
    lock.seek(0)
    existing = lock.read().strip()
    if existing and existing != kind.name:
        raise FinetuneError(
            f"{output} is the output of {existing}; choose another output for {kind.name}"
        )
    if not existing:
        lock.write(kind.name + "\n")
        lock.flush()


FINETUNE = OutputKind("a fine-tune", ("adapter", "model", "README.md", REPORT))


def require_unfinished(output: Path) -> None:
    """Raises FinetuneError if the folder has the result of a finished fine-tune."""
    if (output / REPORT).is_file():
        raise FinetuneError(
            f"{output} already has a fine-tuned model; choose another output to train a new one"
        )


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes.

    Attributes:
        step: Number of completed steps.
        losses: Loss of each completed step.
        weights: Trained weights by parameter name.
        optimizer: The ``state_dict`` of the optimizer.
    """

    step: int
    losses: list[float]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


class Checkpoints:
    """Saves and loads the newest checkpoint of a run.

    Args:
        folder: Folder of the checkpoint.
        pins: Inputs and settings that determine the result. `load` refuses a checkpoint that was
            saved with different pins.
    """

    def __init__(self, folder: Path, pins: Mapping[str, Any]) -> None:
        self._folder, self._pins = folder, json.loads(json.dumps(pins))
        self._older, self._partial = (
            folder.with_name(f"{folder.name}.{suffix}") for suffix in ("older", "begun")
        )

    def save(self, checkpoint: Checkpoint, seconds: float = 0.0, tokens: int = 0) -> None:
        """Replace the previous checkpoint, which is kept until the new one is complete.

        Args:
            seconds, tokens: Training time and trained tokens so far, including those before the
                run was resumed.

        Raises:
            FinetuneError: The checkpoint cannot be written.
        """
        partial = self._partial
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file(checkpoint.weights, partial / _WEIGHTS)
            _save(checkpoint.optimizer, partial / _OPTIMIZER)
            state = {"step": checkpoint.step, "losses": checkpoint.losses, "pins": self._pins}
            spent = {"seconds": seconds, "tokens": tokens}
            (partial / _STATE).write_text(json.dumps(state | spent))
            for path in (*partial.iterdir(), partial):
                flush(path)
            self._replace(partial)
        except DISK_FULL as error:
            kept = self.load()
            raise FinetuneError(
                f"the checkpoint of step {checkpoint.step} cannot be written to {self._folder}: "
                f"{error}; the run can resume from step {kept.step if kept else 0}: free disk "
                "space and run it again"
            ) from error

    def load(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, or None if there is none.

        Raises:
            FinetuneError: The checkpoint belongs to a run with other rows or settings.
        """
        folder = self._newest()
        if folder is None:
            return None
        state = json.loads((folder / _STATE).read_text())
        if state["pins"] != self._pins:
            changed = [k for k in self._pins if state["pins"].get(k) != self._pins[k]]
            raise FinetuneError(
                f"{self._folder} belongs to a run with different {', '.join(changed)}; use the "
                "values of that run, or choose another output"
            )
        optimizer = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
        return Checkpoint(state["step"], state["losses"], load_file(folder / _WEIGHTS), optimizer)

    def spent(self) -> tuple[float, int]:
        """Returns the training seconds and tokens up to the newest checkpoint, or zeros."""
        folder = self._newest()
        state = json.loads((folder / _STATE).read_text()) if folder else {}
        return state.get("seconds", 0.0), state.get("tokens", 0)

    def remove(self) -> None:
        """Removes every file of the checkpoints."""
        for folder in (self._folder, self._older, self._partial):
            shutil.rmtree(folder, ignore_errors=True)

    def _newest(self) -> Path | None:
        return next((f for f in (self._folder, self._older) if f.is_dir()), None)

    def _replace(self, partial: Path) -> None:
        """Moves a new checkpoint into place; the previous one stays available until then."""
        if self._folder.is_dir():
            shutil.rmtree(self._older, ignore_errors=True)
            self._folder.rename(self._older)
        partial.rename(self._folder)
        shutil.rmtree(self._older, ignore_errors=True)


def _save(optimizer: dict[str, Any], path: Path) -> None:
    try:
        torch.save(optimizer, path)
    except RuntimeError as error:  # torch has no exception class for a full disk
        if is_out_of_memory(error):
            raise
        raise OSError(str(error)) from error


def flush(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk.

    Raises:
        OSError: The system cannot write it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
