"""The values that travel between the parts of the service, without torch and pydantic.

A `Request` is made where it enters (HTTP, command, `LLM`, line of a batch), an `Output` in a step.
"""

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
from tasc_protocol.request import FieldError, GuideSpec, Prompt, Request
from tasc_protocol.sampling import PARAMETERS, Parameter, Sampling, SamplingDefaults

__all__ = [
    "PARAMETERS",
    "Acceptance",
    "FieldError",
    "FinishReason",
    "GenerationResult",
    "GuideSpec",
    "Output",
    "Parameter",
    "Prompt",
    "Request",
    "Sampling",
    "SamplingDefaults",
    "Timings",
    "TokenLogprob",
    "TokenText",
    "Whole",
]
