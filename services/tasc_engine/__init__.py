"""Batched, lossless speculative decoding of Hugging Face causal LMs."""

from tasc_engine.config import EngineConfig
from tasc_engine.engine import Engine
from tasc_engine.errors import EngineError, QueueFull, RequestTooLong, UnsupportedModel
from tasc_engine.request import (
    Acceptance,
    Delta,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Timings,
)
from tasc_engine.stats import EngineTotals, StepRecord
from tasc_engine.target import ModelSource, Target

__all__ = [
    "Acceptance",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineTotals",
    "FinishReason",
    "GenerationRequest",
    "GenerationResult",
    "ModelSource",
    "QueueFull",
    "RequestTooLong",
    "StepRecord",
    "Target",
    "Timings",
    "UnsupportedModel",
]
