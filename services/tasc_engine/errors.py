"""What can go wrong in the engine. Every message names the value, the limit and the way out."""


class EngineError(Exception):
    """Root of this package's errors."""


class UnsupportedModel(EngineError):
    """The model cannot be decoded exactly here; refused when it is loaded."""


class OutOfMemory(EngineError):
    """A forward did not fit the device's memory; what the cache holds is whole."""


class RequestTooLong(EngineError, ValueError):
    """Prompt and ``max_tokens`` together do not fit a row."""


class QueueFull(EngineError):
    """As many requests wait as may."""
