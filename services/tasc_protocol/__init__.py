"""The values that travel between the parts of the service, without torch and pydantic."""

from tasc_protocol.output import (
    Acceptance,
    FinishReason,
    GenerationResult,
    Output,
    Timings,
    TokenLogprob,
    TokenText,
    Whole,
)
from tasc_protocol.sampling import PARAMETERS, Parameter, Sampling, SamplingDefaults

__all__ = [
    "PARAMETERS",
    "Acceptance",
    "FinishReason",
    "GenerationResult",
    "Output",
    "Parameter",
    "Sampling",
    "SamplingDefaults",
    "Timings",
    "TokenLogprob",
    "TokenText",
    "Whole",
]
