"""Errors of the engine. Each message names the value, the limit and a remedy."""

from collections.abc import Iterator
from contextlib import contextmanager


class EngineError(Exception):
    """Base class of this package's errors."""


class UnsupportedModel(EngineError):
    """The model cannot be decoded exactly; raised when it is loaded."""


class OutOfMemory(EngineError):
    """A forward did not fit the device's memory; the cached keys and values are unchanged."""


@contextmanager
def out_of_memory_is(
    doing: str, limits: str = "rows, prefill_chunk, max_draft_tokens or max_model_len"
) -> Iterator[None]:
    """Raises torch's memory errors again as `OutOfMemory`; other errors pass unchanged.

    Args:
        doing: What did not fit.
        limits: The settings that limit it.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{doing} did not fit the memory; lower {limits}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; torch's own class covers only some GPU errors."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    words = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    return known or (isinstance(error, RuntimeError) and any(w in str(error) for w in words))


class RequestTooLong(EngineError, ValueError):
    """Prompt and ``max_tokens`` together do not fit a row."""


class QueueFull(EngineError):
    """The maximum number of requests is already waiting."""


class GuideError(EngineError, ValueError):
    """A guide allows nothing, does not fit the request, or is too large to follow."""


class RankingError(EngineError, ValueError):
    """A ranked vocabulary is damaged, is for another tokenizer, or lacks requested tokens."""
