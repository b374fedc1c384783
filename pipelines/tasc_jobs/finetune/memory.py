"""Says in words that memory was too little. It frees none."""

from collections.abc import Iterator
from contextlib import contextmanager

from tasc_engine.errors import is_out_of_memory
from tasc_jobs.finetune.errors import FinetuneError


@contextmanager
def memory_to(do: str, way_out: str) -> Iterator[None]:
    """Raise what torch says of memory as FinetuneError; everything else as it is.

    Args:
        do: What the block does, as in "load the model".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FinetuneError(f"too little memory to {do}; {way_out}") from error
