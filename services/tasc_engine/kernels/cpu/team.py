"""Threads that run one compiled function together, each with its part of the work."""

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from tasc_engine.kernels.cpu.compiling import ordered

_SPINS = 2000  # looks at the counter before the processor is offered to others, some microseconds


@intrinsic
def _arrive(_: Any, counter: Any) -> Any:
    """Adds 1 to ``int64[1]``; who sees it sees all earlier writes of this thread, too."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = make_array(counter)(context, builder, args[0]).data
        builder.atomic_rmw("add", where, ir.IntType(64)(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(counter), lower


@intrinsic
def _arrived(_: Any, counter: Any) -> Any:
    """The value of ``int64[1]``."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = make_array(counter)(context, builder, args[0]).data
        return builder.load_atomic(where, "seq_cst", 8)

    return types.int64(counter), lower


@intrinsic
def _yield(_: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, made, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), lower


@ordered
def meet(counter: Any, target: int, parts: int) -> int:
    """Waits until all threads have come here; returns the target of the next meeting.

    Args:
        counter: ``int64[1]``, the number of times that a thread of the team came to a meeting.
        target: The counter after this meeting.
    """
    if parts > 1:
        _arrive(counter)
        spins = 0
        while _arrived(counter) < target:
            spins += 1
            if spins >= _SPINS:
                _yield()
    return target + parts


class Team:
    """Runs compiled functions on as many threads as torch uses, this one included.

    A team serves one caller at a time. Its threads are started when they are first needed, and end
    with the process.
    """

    def __init__(self) -> None:
        self._waiting: list[SimpleQueue[Callable[[], None]]] = []
        self._counter = np.zeros(1, np.int64)
        self._compiled = set[Callable[..., None]]()

    def run(
        self, function: Callable[..., None], *shared: Any, own: Callable[[int, int], Any]
    ) -> None:
        """Calls ``function(*shared, own, part, parts, counter, target)`` for each part.

        The first call of a function compiles it, on this thread alone.

        Args:
            function: Ends with a `meet`, and begins with this target.
            own: Returns what the function gets for a part of so many parts.
        """
        parts = torch.get_num_threads() if function in self._compiled else 1
        target = int(self._counter[0]) + parts
        calls = [
            partial(function, *shared, own(part, parts), part, parts, self._counter, target)
            for part in range(parts)
        ]
        for queue, call in zip(self._queues(parts - 1), calls[1:], strict=True):
            queue.put(call)
        calls[0]()
        self._compiled.add(function)

    def _queues(self, count: int) -> list["SimpleQueue[Callable[[], None]]"]:
        while len(self._waiting) < count:
            queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), daemon=True).start()
            self._waiting.append(queue)
        return self._waiting[:count]


def _serve(queue: "SimpleQueue[Callable[[], None]]") -> None:
    while True:
        queue.get()()
