"""Batched, lossless speculative decoding of Hugging Face causal LMs.

Modules that need torch are imported at their first use, so that a process that only forwards
requests and results (the gateway) stays small.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tasc_engine.config import EngineConfig
from tasc_engine.errors import EngineError, QueueFull, RequestTooLong, UnsupportedModel
from tasc_engine.stats import EngineTotals, StepRecord
from tasc_protocol import (
    Acceptance,
    FinishReason,
    GenerationResult,
    GuideSpec,
    Output,
    Request,
    Sampling,
    Timings,
    TokenLogprob,
)

if TYPE_CHECKING:
    from tasc_engine.engine import Engine
    from tasc_engine.model.loading import ModelSource
    from tasc_engine.model.target import Target

_NEEDS_TORCH = {
    "Engine": "tasc_engine.engine",
    "ModelSource": "tasc_engine.model.loading",
    "Target": "tasc_engine.model.target",
}

__all__ = [
    "Acceptance",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineTotals",
    "FinishReason",
    "GenerationResult",
    "GuideSpec",
    "ModelSource",
    "Output",
    "QueueFull",
    "Request",
    "RequestTooLong",
    "Sampling",
    "StepRecord",
    "Target",
    "Timings",
    "TokenLogprob",
    "UnsupportedModel",
]

if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _NEEDS_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_NEEDS_TORCH[name]), name)
