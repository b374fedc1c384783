"""Values that the parts of the service exchange; the package imports neither torch nor pydantic.

A `Request` is made where the service receives it (HTTP, command, `LLM`, line of a batch). An
`Output` is made in a step of the engine.
"""

from tasc_protocol.output import (
    Acceptance,
    FinishReason,
    GenerationResult,
    LabelScores,
    Output,
    Timings,
    TokenLogprob,
    TokenText,
    Whole,
)
from tasc_protocol.request import FieldError, GuideSpec, Prompt, Request, Scoring
from tasc_protocol.sampling import PARAMETERS, Parameter, Sampling, SamplingDefaults

__all__ = [
    "PARAMETERS",
    "Acceptance",
    "FieldError",
    "FinishReason",
    "GenerationResult",
    "GuideSpec",
    "LabelScores",
    "Output",
    "Parameter",
    "Prompt",
    "Request",
    "Sampling",
    "SamplingDefaults",
    "Scoring",
    "Timings",
    "TokenLogprob",
    "TokenText",
    "Whole",
]
