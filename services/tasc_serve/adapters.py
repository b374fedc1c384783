"""What a task is told whose adapters cannot be loaded. It loads none."""

from collections.abc import Iterator
from contextlib import contextmanager

from tasc_serve.errors import AdapterRefused
from tasc_store import TaskRecord

_MOST_SAID = 500  # characters of what a loader says


@contextmanager
def refused_adapters(record: TaskRecord) -> Iterator[None]:
    """Whatever is raised in this block is of a record's adapters.

    Raises:
        AdapterRefused: In its place; folders, files and shapes of others may be wrong in any way.
    """
    try:
        yield
    except Exception as error:
        places = [record.adapter] if record.adapter else [place for _, place in record.adapters]
        shown = " ".join(str(error).split())[:_MOST_SAID] or type(error).__name__
        raise AdapterRefused(f"adapter {', '.join(places) or 'none'}: {shown}") from error
