"""The output folder of a training: its lock and its newest checkpoint.

Checkpoints are written atomically, so a process may be killed at any moment.
"""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError

from tasc_draft.files import unfinished_files, whole_file
from tasc_engine.errors import is_out_of_memory
from tasc_train.errors import FinetuneError

LOCK = ".lock"
REPORT = "finetune.json"  # moved into place last, so its presence marks a finished fine-tune
DISK_FULL = (OSError, SafetensorError)  # a full disk raises these; in torch.save, RuntimeError


@dataclass(frozen=True)
class OutputKind:
    """The kind of run that uses an output folder.

    Attributes:
        name: Name of the kind with its article, such as "a fine-tune". It is written to `LOCK`.
        writes: Names of the files and folders of its result. In a folder without a lock
            file, files with these names belong to something else and must not be overwritten.
    """

    name: str
    writes: tuple[str, ...]


@contextmanager
def claimed(output: Path, kind: OutputKind) -> Iterator[None]:
    """Lock a folder for the duration of the block. Creates the folder if it does not exist.

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
        _lock(lock, output)
        _write_kind(lock, output, kind)
        yield


def _require_no_foreign_result(output: Path, kind: OutputKind) -> None:
    if existing := [name for name in kind.writes if (output / name).exists()]:
        raise FinetuneError(
            f"{output} has {', '.join(existing)} from something else, which {kind.name} would "
            "overwrite; choose another output"
        )


def _lock(lock: IO[str], output: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FinetuneError(
            f"another process is training in {output}; wait until it ends, or choose another output"
        ) from error
    except OSError as error:  # some network file systems do not support locks
        raise FinetuneError(
            f"the file system of {output} does not support locks ({error}); choose an output on "
            "another file system"
        ) from error


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


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes.

    Attributes:
        losses: Loss of each completed step.
        weights: Trained weights by parameter name.
        optimizer: The ``state_dict`` of the optimizer.
        seconds, tokens: Training time and processed tokens so far, including those before the run
            was resumed.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    seconds: float = 0.0
    tokens: int = 0

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return len(self.losses)


class Checkpoints:
    """Saves and loads the newest checkpoint of a run.

    Args:
        path: File of the checkpoint.
        pins: Inputs and settings that determine the result. `load` refuses a checkpoint that was
            saved with different pins.
    """

    def __init__(self, path: Path, pins: Mapping[str, Any]) -> None:
        self._path, self._pins = path, dict(pins)

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the previous checkpoint, which is kept until the new one is complete.

        Raises:
            FinetuneError: The checkpoint cannot be written.
        """
        try:
            self._remove_unfinished()
            with whole_file(self._path) as file:
                torch.save({**vars(checkpoint), "pins": self._pins}, file)
        except (OSError, RuntimeError) as error:  # torch has no exception class for a full disk
            if is_out_of_memory(error):
                raise
            kept = self.load()
            raise FinetuneError(
                f"the checkpoint of step {checkpoint.step} cannot be written to {self._path} "
                f"({error}); free disk space and run the command again to resume from step "
                f"{kept.step if kept else 0}"
            ) from error

    def load(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, or None if there is none.

        Raises:
            FinetuneError: The checkpoint was saved with different pins.
        """
        if not self._path.is_file():
            return None
        state = torch.load(self._path, map_location="cpu", weights_only=True)
        pins = state.pop("pins")
        if pins != self._pins:
            changed = [k for k in self._pins if pins.get(k) != self._pins[k]]
            raise FinetuneError(
                f"{self._path} belongs to a run with different {', '.join(changed)}; use the "
                "values of that run, or choose another output"
            )
        return Checkpoint(**state)

    def remove(self) -> None:
        """Removes every file of the checkpoints."""
        self._path.unlink(missing_ok=True)
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Removes files that killed processes left. The caller holds the lock of the output."""
        for path in unfinished_files(self._path):
            path.unlink(missing_ok=True)
