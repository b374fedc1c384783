"""The values that travel between the parts of the service, without torch and pydantic."""

from tasc_protocol.sampling import PARAMETERS, Parameter, Sampling, SamplingDefaults

__all__ = ["PARAMETERS", "Parameter", "Sampling", "SamplingDefaults"]
