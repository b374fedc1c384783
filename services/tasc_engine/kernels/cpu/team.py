"""Threads that run one compiled function together, each with its part of the work."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from tasc_engine.kernels.cpu.compiling import ordered

_ABORTED = 2**62  # of a counter
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


class _Call:
    """One call of all parts.

    Attributes:
        counter: See `meet`.
        ended: Released once by each part that runs on another thread.
        failure: The exception of such a part.
    """

    def __init__(self) -> None:
        self.counter = np.zeros(1, np.int64)
        self.ended = threading.Semaphore(0)
        self.failure: BaseException | None = None

    def abort(self) -> None:
        """Lets all parts pass all meetings, so that they end, with wrong results."""
        self.counter[0] = _ABORTED


class Team:
    """Runs compiled functions on as many threads as torch uses, this one included.

    A team serves one caller at a time. Its threads are started when they are first needed, and end
    with the team.
    """

    def __init__(self) -> None:
        self._queues: list[_Queue] = []
        self._compiled = set[Callable[..., None]]()
        self._unused = np.zeros(1, np.int64)  # the counter of a single part
        self._left = list[_Call]()  # parts of aborted calls that may not have ended
        weakref.finalize(self, _end, self._queues)

    def run(
        self, function: Callable[..., None], *shared: Any, own: Callable[[int, int], Any]
    ) -> None:
        """Calls ``function(*shared, own, part, parts, counter, target)`` for each part.

        The first call of a function compiles it, on this thread alone.

        Args:
            function: Begins with this target, and ends with a `meet`.
            own: Returns what the function gets for a part of so many parts.

        Raises:
            BaseException: That of a part; the others have ended, and their results are wrong.
        """
        self._wait()
        parts = torch.get_num_threads() if function in self._compiled else 1
        if parts == 1:
            function(*shared, own(0, 1), 0, 1, self._unused, 1)
            self._compiled.add(function)
            return
        call, begun = _Call(), 0
        calls = [
            partial(function, *shared, own(part, parts), part, parts, call.counter, parts)
            for part in range(parts)
        ]
        self._start(parts - 1)
        try:
            for queue, part in zip(self._queues, calls[1:], strict=False):
                begun += 1
                queue.put((part, call))
            calls[0]()
            if call.failure is not None:
                raise call.failure
        except BaseException:
            call.abort()
            self._left += [call] * begun
            self._wait()
            raise

    def _wait(self) -> None:
        """Waits for parts of aborted calls, which wait for nothing and so end."""
        while self._left:
            self._left[-1].ended.acquire()
            self._left.pop()

    def _start(self, count: int) -> None:
        while len(self._queues) < count:
            queue: _Queue = SimpleQueue()
            name = f"engine part {len(self._queues) + 1}"
            threading.Thread(target=_serve, args=(queue,), name=name, daemon=True).start()
            self._queues.append(queue)


_Queue: TypeAlias = "SimpleQueue[tuple[Callable[[], None], _Call] | None]"


def _serve(queue: _Queue) -> None:
    while (given := queue.get()) is not None:
        part, call = given
        try:
            part()
        except BaseException as error:
            call.failure = error
            call.abort()
        finally:
            call.ended.release()
        del given, part, call  # an idle thread keeps no arrays alive


def _end(queues: list[_Queue]) -> None:
    for queue in queues:
        queue.put(None)
