"""Step costs of a target: measured at the first start on a machine, then read from a file.

The file name depends on everything that changes a step's time: model, adapter, dtype, processor and
threads, the engine's shape, torch and this program. This module makes no decisions about drafts.
"""

import contextlib
import hashlib
import json
import logging
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

import tasc_engine
from tasc_draft.compiled import digest_of
from tasc_draft.files import cache_folder
from tasc_engine import ModelSource, Target
from tasc_engine.step.cost import SECONDS, StepCosts, effort_on, kept, measure, processor, write

WAIT_S = 120.0  # maximum wait for other measurements; less than the start-up limit
PATIENCE_S = 1.0  # a wait without a message, since others may only be reading the file

log = logging.getLogger(__name__)


def step_costs(
    target: Target,
    source: ModelSource,
    folder: Path | None = None,
    say: Callable[[str], None] = log.info,
    seconds: float = SECONDS,
) -> tuple[StepCosts, Callable[[StepCosts], None]]:
    """Returns a target's step costs on this machine, and a function that keeps corrected costs.

    Args:
        folder: Folder of cost files, created if needed. Unset: in `cache_folder`.
        say: Called with a line for waiting users about work that takes seconds.
        seconds: Maximum time of a measurement; on a GPU it is at most three seconds.
    """
    folder = folder or cache_folder() / "costs"
    path = folder / f"{_key(target, source)}.json"

    def measured() -> StepCosts:
        effort = effort_on(target.device.type)
        most = min(seconds, effort.seconds)
        say(
            f"measuring the step costs of {source.folder.name} on {platform.node()}, up to about "
            f"{most:.0f} s; later starts with these settings on this machine read {path}"
        )
        target.warm_up()  # captures graphs, which is not part of a step
        return measure(target, source.folder.name, most, effort=effort)

    def keep(costs: StepCosts) -> None:
        """Writes on another thread, so that no step waits for a slow disk."""
        log.info("real steps have corrected the step costs; writing %s", path)
        threading.Thread(target=write, args=(path, costs), name="step-costs", daemon=True).start()

    with _alone(folder, say):
        return kept(path, measured), keep


@contextlib.contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Allows one measurement at a time, as two would disturb each other."""
    lock = FileLock(folder / "measuring.lock")  # the lock is also released when its process dies
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(PATIENCE_S)
        except Timeout:
            say(f"waiting: another process measures step costs on {platform.node()}")
            lock.acquire(WAIT_S - PATIENCE_S)
    except Timeout:
        log.warning("another process has measured for %.0f s; measuring at the same time", WAIT_S)
    except OSError:
        log.warning("cannot write to %s; other processes may measure at the same time", folder)
    try:
        yield
    finally:
        lock.release()


def _key(target: Target, source: ModelSource) -> str:
    config = target.config
    facts = [
        str(source.folder.resolve()),
        [p.stat().st_mtime_ns for p in sorted(source.folder.glob("*.safetensors"))],
        [str(source.adapter), str(source.adapters), source.quantization],
        target.dtype_name,
        target.device_name,
        processor(),
        [config.rows, config.max_model_len, config.max_draft_tokens, target.cache.slots],
        [torch.__version__, digest_of(Path(tasc_engine.__file__).parent)],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
