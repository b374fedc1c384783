"""Sort a corpus's n-grams in parts, each by a Ray task on this node. It builds no whole index.

A part is cut off by splitters from a sample of whole grams, since first tokens are too skewed to
cut by; so parts are disjoint and lie one behind the other. Tasks read the text from a file, memory-
mapped, and write their part to another: nothing of it goes through the object store. A part whose
worker dies is sorted again, a few times.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tasc_draft.index.corpus_build import Documents, sort_part, splitters
from tasc_draft.tokens import Int32

# Starting a worker takes longer than sorting fewer places than this.
_LEAST_PLACES = 1 << 18
_RETRIES = 3
_ARRAYS = ("text", "offsets", "counts")


def sorted_parts(
    documents: Documents,
    folder: Path,
    parts: int | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[Int32, Int32]]:
    """What ``tasc_draft.corpus_build.assemble`` joins; the same index for any number of parts.

    Args:
        folder: Where the files go, in a folder of their own that is gone when this returns; the
            arrays returned are maps of files without a name.
        parts: How many; by default one a core of this node, fewer for a short text. A single one is
            sorted here.
        progress: Told how many of how many parts are sorted.

    Raises:
        RayError: A part failed, or its workers died four times.
    """
    cores = len(os.sched_getaffinity(0))
    wanted = parts or min(cores, 1 + len(documents.text) // _LEAST_PLACES)
    cuts = [None, *splitters(documents.text, wanted), None]
    total = len(cuts) - 1
    progress(0, total)
    if total == 1:
        found = [sort_part(documents.text, documents.offsets, documents.counts)]
        progress(1, 1)
        return found
    # A task that goes on when another failed may still write there while the folder goes.
    with TemporaryDirectory(prefix="parts-", dir=folder, ignore_cleanup_errors=True) as name:
        own = Path(name)
        for array in _ARRAYS:
            np.save(own / f"{array}.npy", getattr(documents, array))
        _sort_all(own, list(pairwise(cuts)), cores, progress)
        return [(_read(own, f"order-{i}"), _read(own, f"sums-{i}")) for i in range(total)]


def _sort_all(
    folder: Path,
    borders: Sequence[tuple[int | None, int | None]],
    at_a_time: int,
    progress: Callable[[int, int], None],
) -> None:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    task = sort_part_file.options(scheduling_strategy=here)
    waiting = deque(enumerate(borders))
    running: list[ray.ObjectRef[None]] = []
    while waiting or running:
        while waiting and len(running) < at_a_time:
            part, (low, high) = waiting.popleft()
            running.append(task.remote(folder, part, low, high))
        ended, running = ray.wait(running)
        ray.get(ended)
        progress(len(borders) - len(waiting) - len(running), len(borders))


# No logical CPUs: we bound the tasks that run at a time, and where replicas hold all CPUs of the
# node, or a head node has none, a task that needed one would wait for ever.
@ray.remote(num_cpus=0, max_retries=_RETRIES)
def sort_part_file(folder: Path, part: int, low: int | None, high: int | None) -> None:
    """Sort one part of the text in ``folder``, from place ``low`` to ``high``, into two files."""
    text, offsets, counts = (_read(folder, name) for name in _ARRAYS)
    order, sums = sort_part(text, offsets, counts, low=low, high=high)
    np.save(folder / f"order-{part}.npy", order)
    np.save(folder / f"sums-{part}.npy", sums)


def _read(folder: Path, name: str) -> Int32:
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
