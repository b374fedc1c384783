"""What can go wrong in the engine. Every message names the value, the limit and the way out."""

from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def out_of_memory_is(doing: str, moved: bool) -> Iterator[None]:
    """Raise what torch says of memory as `OutOfMemory`; everything else as it is."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{doing} did not fit the memory; lower rows, prefill_chunk or max_draft_tokens", moved
        ) from error


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


class RankingError(EngineError, ValueError):
    """A ranked vocabulary is damaged, another tokenizer's, or asked for what it has not."""
