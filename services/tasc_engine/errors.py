"""What can go wrong in the engine. Every message names the value, the limit and the way out."""


class EngineError(Exception):
    """Root of this package's errors."""


class UnsupportedModel(EngineError):
    """The model cannot be decoded exactly here; refused when it is loaded."""


class OutOfMemory(EngineError):
    """A forward did not fit the device's memory; rows hold in the cache what they held.

    Attributes:
        moved: Whether the moves that came with the step were made.
    """

    def __init__(self, message: str, moved: bool) -> None:
        super().__init__(message)
        self.moved = moved


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch ran out of memory; it has a class for that on GPUs only, and not always."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    words = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    return known or (isinstance(error, RuntimeError) and any(w in str(error) for w in words))


class RequestTooLong(EngineError, ValueError):
    """Prompt and ``max_tokens`` together do not fit a row."""


class QueueFull(EngineError):
    """As many requests wait as may."""


class GuideError(EngineError, ValueError):
    """A guide that allows nothing, does not fit the request, or is too large to follow."""
