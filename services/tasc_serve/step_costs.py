"""Step costs of a replica's target: measured at the first start on a machine, then from a file.

The file is named by all that changes a step's time: model, adapter, dtype, device and threads, the
engine's shape, and torch. It decides nothing about drafts.
"""

import dataclasses
import hashlib
import json
import logging
from pathlib import Path

import torch

from tasc_engine import ModelSource, Target
from tasc_engine.cost import StepCosts, kept, measure

log = logging.getLogger(__name__)


def default_cost_dir() -> Path:
    return Path.home() / ".cache" / "tasc-serve" / "costs"


def step_costs(target: Target, source: ModelSource, folder: Path | None = None) -> StepCosts:
    """What this target's steps cost here.

    Args:
        folder: Where files of costs lie; made if need be.

    Raises:
        EngineError: The file cannot be written.
    """
    path = (folder or default_cost_dir()) / f"{_key(target, source)}.json"

    def measured() -> StepCosts:
        log.info("measuring what steps of %s cost here, kept in %s", source.folder.name, path)
        return measure(target, source.folder.name)

    return kept(path, measured)


def _key(target: Target, source: ModelSource) -> str:
    written = [p.stat().st_mtime_ns for p in sorted(source.folder.glob("*.safetensors"))]
    facts = [
        str(source.folder.resolve()), written, str(source.adapter), target.dtype_name,
        target.device_name, dataclasses.asdict(target.config), torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
