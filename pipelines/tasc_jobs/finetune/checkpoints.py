"""The output folder of a training: who holds it, and the newest checkpoint.

A checkpoint is whole or not there, whenever the process dies.
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
_LOOK_S = 0.1
REPORT = "finetune.json"  # put in its place last, when all is there
NO_ROOM = (OSError, SafetensorError)  # how libraries say that a disk is full
_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True)
class OutputKind:
    """What runs in a folder.

    Attributes:
        name: Of one, in words; it stands in the folder's `LOCK`.
        writes: Names that its result has there. A folder that has one of these, and no lock, is
            somebody's own.
    """

    name: str
    writes: tuple[str, ...]


@contextmanager
def claimed(output: Path, kind: OutputKind, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a folder for the block; it is made.

    Args:
        wait_s: For a process that ends just now.

    Raises:
        FinetuneError: Another process holds it, it has what would be written over, or it cannot be
            made, written to or locked.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not (output / LOCK).is_file():
            _require_room(output, kind)
        lock = (output / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise FinetuneError(f"{output} cannot be written to ({error}); name another") from error
    with lock:
        until = time.monotonic() + wait_s
        while not _taken(lock, output):
            if time.monotonic() >= until:
                raise FinetuneError(
                    f"another process trains in {output}; wait until it ends, or name another "
                    "output"
                )
            time.sleep(_LOOK_S)
        _sign(lock, output, kind)
        yield


def _require_room(output: Path, kind: OutputKind) -> None:
    if there := [name for name in kind.writes if (output / name).exists()]:
        raise FinetuneError(
            f"{output} has {', '.join(there)} of something else, which {kind.name} would write "
            "over; name another output"
        )


def _taken(lock: IO[str], output: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # network file systems without locks
        raise FinetuneError(
            f"the file system of {output} has no locks ({error}); name an output on another"
        ) from error
    return True


def _sign(lock: IO[str], output: Path, kind: OutputKind) -> None:
    lock.seek(0)
    signed = lock.read().strip()
    if signed and signed != kind.name:
        raise FinetuneError(f"{output} is the output of {signed}; name another for {kind.name}")
    if not signed:
        lock.write(kind.name + "\n")
        lock.flush()


FINETUNE = OutputKind("a fine-tune", ("adapter", "model", "README.md", REPORT))


def require_unfinished(output: Path) -> None:
    """Raise FinetuneError where a fine-tune has ended there."""
    if (output / REPORT).is_file():
        raise FinetuneError(
            f"{output} has a fine-tuned model already, and nothing is left to do; name another "
            "output to train one more"
        )


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from.

    Attributes:
        step: Steps that were done.
        losses: Of each of them.
        weights: Of what is trained, by name.
        optimizer: Its ``state_dict``.
    """

    step: int
    losses: list[float]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


class Checkpoints:
    """The newest checkpoint of one run.

    Args:
        pins: What the run was begun with; one begun with anything else is refused.
    """

    def __init__(self, folder: Path, pins: Mapping[str, Any]) -> None:
        self._folder, self._pins = folder, json.loads(json.dumps(pins))
        self._older, self._begun = (
            folder.with_name(f"{folder.name}.{end}") for end in ("older", "begun")
        )

    def save(self, checkpoint: Checkpoint, seconds: float = 0.0, tokens: int = 0) -> None:
        """Put it in the place of the one before, which stays until this one is whole.

        Args:
            seconds, tokens: What the run took up to here, over all its pieces.

        Raises:
            FinetuneError: It cannot be written.
        """
        begun = self._begun
        try:
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir(parents=True)
            save_file(checkpoint.weights, begun / _WEIGHTS)
            _save(checkpoint.optimizer, begun / _OPTIMIZER)
            state = {"step": checkpoint.step, "losses": checkpoint.losses, "pins": self._pins}
            spent = {"seconds": seconds, "tokens": tokens}
            (begun / _STATE).write_text(json.dumps(state | spent))
            for path in (*begun.iterdir(), begun):
                flush(path)
            self._replace(begun)
        except NO_ROOM as error:
            kept = self.load()
            raise FinetuneError(
                f"the checkpoint of step {checkpoint.step} cannot be written to {self._folder}: "
                f"{error}; that of step {kept.step if kept else 0} stays, make room and run again"
            ) from error

    def load(self) -> Checkpoint | None:
        """The newest that is whole; None of a run that has none.

        Raises:
            FinetuneError: It is of a run with other rows or settings.
        """
        folder = self._newest()
        if folder is None:
            return None
        state = json.loads((folder / _STATE).read_text())
        if state["pins"] != self._pins:
            changed = [k for k in self._pins if state["pins"].get(k) != self._pins[k]]
            raise FinetuneError(
                f"{self._folder} is of a run with another {', '.join(changed)}; run it as it "
                "was begun, or name another output"
            )
        optimizer = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
        return Checkpoint(state["step"], state["losses"], load_file(folder / _WEIGHTS), optimizer)

    def spent(self) -> tuple[float, int]:
        """Seconds and tokens that the run took up to the newest; nothing where it does not say."""
        folder = self._newest()
        state = json.loads((folder / _STATE).read_text()) if folder else {}
        return state.get("seconds", 0.0), state.get("tokens", 0)

    def remove(self) -> None:
        for folder in (self._folder, self._older, self._begun):
            shutil.rmtree(folder, ignore_errors=True)

    def _newest(self) -> Path | None:
        return next((f for f in (self._folder, self._older) if f.is_dir()), None)

    def _replace(self, begun: Path) -> None:
        """At every moment one of the two is whole."""
        if self._folder.is_dir():
            shutil.rmtree(self._older, ignore_errors=True)
            self._folder.rename(self._older)
        begun.rename(self._folder)
        shutil.rmtree(self._older, ignore_errors=True)


def _save(optimizer: dict[str, Any], path: Path) -> None:
    try:
        torch.save(optimizer, path)
    except RuntimeError as error:  # torch has no class for a disk that is full
        if is_out_of_memory(error):
            raise
        raise OSError(str(error)) from error


def flush(path: Path) -> None:
    """Have the system write a file, or a folder's names, to the disk.

    Raises:
        OSError: It cannot.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
