"""A binary heap of the paths of all trees of a step, the likeliest on top. Compiled; bounded.

The first entry holds the size, in ``node``; entries count from 1.
"""

from typing import Any

import numpy as np

from tasc_draft.compiled import borrowing

# path: probability, or a bound of it; closed: the node has not been looked into yet
ENTRY = np.dtype([("path", np.float32), ("node", np.int32), ("closed", np.int32)])


def room(nodes: int) -> int:
    """Entries that trees of so many nodes need: each node closed, or with its next child."""
    return 2 * nodes + 1


@borrowing
def push(heap: Any, path: float, node: int, closed: bool) -> None:
    heap[0].node += 1
    i = heap[0].node
    while i > 1 and heap[i >> 1].path < path:
        _move(heap, i >> 1, i)
        i >>= 1
    heap[i].path = path
    heap[i].node = node
    heap[i].closed = closed


@borrowing
def pop(heap: Any) -> tuple[float, int, bool]:
    """Take the likeliest entry off; the heap must not be empty."""
    path, node, closed = heap[1].path, heap[1].node, heap[1].closed
    size = heap[0].node
    heap[0].node = size - 1
    moved, i, child = heap[size].path, 1, 2
    while child < size:
        if child + 1 < size and heap[child + 1].path > heap[child].path:
            child += 1
        if moved >= heap[child].path:
            break
        _move(heap, child, i)
        i = child
        child = 2 * i
    _move(heap, size, i)
    return path, node, closed != 0


@borrowing
def _move(heap: Any, source: int, target: int) -> None:
    heap[target].path = heap[source].path
    heap[target].node = heap[source].node
    heap[target].closed = heap[source].closed
