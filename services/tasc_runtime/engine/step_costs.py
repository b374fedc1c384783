"""Step costs of a replica's target: measured at the first start on a machine, then from a file.

The file is named by what changes a step's time: model, adapter, dtype, processor and threads, the
engine's shape, torch and this program. It decides nothing about drafts.
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
from tasc_draft.user_folders import cache_folder
from tasc_engine import ModelSource, Target
from tasc_engine.step.cost import SECONDS, StepCosts, kept, measure, processor, write

WAIT_S = 120.0  # for others that measure on this machine; the start-up limit is longer
PATIENCE_S = 1.0  # others may only be reading, which is nothing to tell people

log = logging.getLogger(__name__)


def step_costs(
    target: Target,
    source: ModelSource,
    folder: Path | None = None,
    say: Callable[[str], None] = log.info,
    seconds: float = SECONDS,
) -> tuple[StepCosts, Callable[[StepCosts], None]]:
    """What this target's steps cost here, and what keeps corrected costs for the next start.

    Args:
        folder: Where files of costs lie; made if need be. Unset: in `cache_folder`.
        say: Told, in a line for people who wait, of what takes seconds.
        seconds: Most that a measurement takes.
    """
    folder = folder or cache_folder() / "costs"
    path = folder / f"{_key(target, source)}.json"

    def measured() -> StepCosts:
        say(
            f"measuring what steps of {source.folder.name} cost on {platform.node()}, up to about "
            f"{seconds:.0f} s; once for these settings, later starts on this machine read {path}"
        )
        return measure(target, source.folder.name, seconds)

    def keep(costs: StepCosts) -> None:
        """Write on another thread: no step waits for a slow disk."""
        log.info("real steps have corrected what steps cost here; writing %s", path)
        threading.Thread(target=write, args=(path, costs), name="step-costs", daemon=True).start()

    with _alone(folder, say):
        return kept(path, measured), keep


@contextlib.contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One measurement at a time: two would measure each other. Without a folder, at any time."""
    lock = FileLock(folder / "measuring.lock")  # let go when its process dies, too
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(PATIENCE_S)
        except Timeout:
            say(f"waiting: another process measures step costs on {platform.node()}")
            lock.acquire(WAIT_S - PATIENCE_S)
    except Timeout:
        log.warning("others have measured for %.0f s; measuring beside them", WAIT_S)
    except OSError:
        log.warning("cannot write to %s; others may measure at the same time", folder)
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
