"""The thread that owns an engine and steps it while there is work.

On a GPU, the outputs of a step are passed on while the next forward runs, and new requests are
read. On a CPU, outputs are passed on as soon as the step has ended.

Other threads send this thread requests, cancellations and actions, which it handles in order of
arrival: requests also during a forward, all else between two steps. It sends outputs back. This
module does not depend on HTTP or Ray.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tasc_engine import Output, QueueFull, Request
from tasc_engine.batch_engine import BatchEngine
from tasc_engine.guided import Guidance
from tasc_runtime.protocol import Refusal

log = logging.getLogger(__name__)

Item = Output | Refusal | Exception
Sink = Callable[[Item], None]
_IDLE_S = 0.5


@dataclass(frozen=True)
class _Listener:
    """Where the outputs of a request go."""

    sink: Sink
    streams: bool
    is_idle: bool


class EngineLoop:
    """Runs ``engine`` on a separate thread.

    Each request has a sink: a function that is called with each output of the request and, if the
    engine breaks, with the exception. The sink of a request that does not stream gets only the last
    output.

    Args:
        hand_over: Runs a function that calls all sinks of a round. By default, the function runs on
            the engine's thread, and sinks must not block.
        on_delta: Called with the seconds since the row's previous output, and the number of tokens
            in the new output.
    """

    def __init__(
        self,
        engine: BatchEngine,
        *,
        on_delta: Callable[[float, int], None] = lambda seconds, tokens: None,
        hand_over: Callable[[Callable[[], None]], None] = lambda run: run(),
    ) -> None:
        self._engine = engine
        self._on_delta = on_delta
        self._hand_over = hand_over
        # Pairs: whether the item is a request, and its action. Requests may be read in a forward.
        self._inbox: queue.SimpleQueue[tuple[bool, Callable[[], None]]] = queue.SimpleQueue()
        self._next: Callable[[], None] | None = None  # taken from the inbox, but not done yet
        self._sinks: dict[str, _Listener] = {}
        self._last: dict[str, float] = {}
        self._idle_requests: deque[tuple[Request, Sink, Guidance | None, float]] = deque()
        self._idle_ids: list[str] = []  # idle requests that the engine holds, in order
        self._crowded = False
        self._closed = False
        self._round = time.monotonic()
        self._idle = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread's last completed round; 0 while it is idle."""
        return 0.0 if self._idle else time.monotonic() - self._round

    @property
    def idle_running(self) -> int:
        """Number of requests of `submit_idle` that the engine holds."""
        return len(self._idle_ids)

    def submit(self, request: Request, sink: Sink, guide: Guidance | None = None) -> None:
        """Submits ``request``; if the engine refuses it, the sink gets a refusal.

        Args:
            guide: The request's guide, compiled by the caller: the engine's thread compiles none.
        """
        self._inbox.put((True, partial(self._submit, request, sink, guide)))

    def submit_idle(
        self, request: Request, sink: Sink, guide: Guidance | None, until: float
    ) -> None:
        """Submits a request that uses rows only while no other request needs them.

        The request begins when a row is free and no other request waits. If another request needs
        the row, the idle request is dropped, and its sink gets a refusal of the kind ``full``.

        Args:
            until: Time of `time.monotonic` by which the request must begin; else its sink gets a
                refusal of the kind ``late``.
        """
        self._do(lambda: self._idle_requests.append((request, sink, guide, until)))

    def cancel(self, request_id: str) -> None:
        """Drops a request; its row is free at the next step, and its sink is not called again."""
        self._do(lambda: self._cancel(request_id))

    def between_steps(self, action: Callable[[], None]) -> None:
        """Runs ``action`` on the engine's thread, between two steps, in order of arrival.

        Errors of ``action`` are logged and have no other effect.
        """

        def guarded() -> None:
            try:
                action()
            except Exception:
                log.exception("an action between two steps failed")

        self._do(guarded)

    def close(self, timeout_s: float = 5.0) -> None:
        self._closed = True
        self._do(lambda: None)
        self._thread.join(timeout_s)

    def _do(self, action: Callable[[], None]) -> None:
        """Lets the engine's thread do something between two steps."""
        self._inbox.put((False, action))

    def _run(self) -> None:
        try:
            while not self._closed:
                self._read_inbox()
                self._use_idle_rows()
                self._engine.launch()
                self._crowded = self._engine.waiting > 0  # requests that got no row
                self._pass_outputs_on()
                if self._engine.overlaps:
                    self._read_requests()
                self._engine.collect()
                if not self._engine.overlaps:
                    self._pass_outputs_on()
                self._idle_ids = [id for id in self._idle_ids if self._engine.holds(id)]
        except Exception as error:
            log.exception("the engine broke; this process must be replaced")
            self.failure = error
            with suppress(Exception):
                self._pass_outputs_on()  # answers that ended before the error
            self._refuse_all(error)

    def _pass_outputs_on(self) -> None:
        """Passes on the outputs of the last collected step."""
        now = time.monotonic()
        items: list[tuple[Sink, Item]] = []
        for output in self._engine.outputs():
            if (listener := self._sinks.get(output.id)) is None:
                continue  # cancelled after its last step
            if not listener.is_idle:
                before = self._last.get(output.id)
                if before is not None:
                    self._on_delta(now - before, len(output.tokens))
                self._last[output.id] = now
            if listener.streams or output.result:
                items.append((listener.sink, output))
            if output.result:
                self._forget(output.id)
        self._hand_out(items)

    def _use_idle_rows(self) -> None:
        """Begins one idle request if a row is free; drops all of them if other requests wait.

        If the cache has no room for the newest idle request beside others, only that one is
        dropped.
        """
        engine = self._engine
        if self._crowded and self._idle_ids:
            others_wait = engine.running + engine.waiting > len(self._idle_ids)
            for _ in range(len(self._idle_ids) if others_wait else 1):
                self._drop_idle()
            return
        while self._idle_requests and engine.running + engine.waiting < engine.config.rows:
            request, sink, guide, until = self._idle_requests.popleft()
            if time.monotonic() <= until:
                self._submit(request, sink, guide, idle=True)
                return
            self._hand_out([(sink, Refusal("late", "no row was idle in time"))])

    def _drop_idle(self) -> None:
        """Drops the newest idle request."""
        sink = self._sinks[self._idle_ids[-1]].sink
        self._cancel(self._idle_ids[-1])
        self._hand_out([(sink, Refusal("full", "another request needs the row"))])

    def _refuse_all(self, error: Exception) -> None:
        """Refuses all requests, including later ones, after the engine has ended."""
        while True:
            sinks = [listener.sink for listener in self._sinks.values()]
            sinks += [sink for _, sink, _, _ in self._idle_requests]
            self._sinks.clear()
            self._idle_requests.clear()
            self._idle_ids.clear()
            self._hand_out([(sink, error) for sink in sinks])
            if self._closed:
                return
            self._take()()

    def _read_inbox(self) -> None:
        try:
            self._next_action()()
            while True:
                self._take(block=False)()
        except queue.Empty:
            return

    def _read_requests(self) -> None:
        """Reads requests while a forward runs, up to an item that must wait for the forward.

        At most one request for each row waits in the engine. Nothing is read while idle requests
        hold rows, because a request that takes such a row must wait for the forward.
        """
        engine = self._engine
        most = min(engine.config.rows, engine.config.max_waiting)
        with suppress(queue.Empty):
            while self._next is None and not self._idle_ids and engine.waiting < most:
                is_request, action = self._inbox.get_nowait()
                if is_request:
                    action()
                else:
                    self._next = action

    def _take(self, block: bool = True, timeout: float | None = None) -> Callable[[], None]:
        """Takes the next item; raises queue.Empty if there is none in time."""
        if self._next is not None:
            action, self._next = self._next, None
            return action
        return self._inbox.get(block, timeout)[1]

    def _next_action(self) -> Callable[[], None]:
        """Returns the next action; waits for one if the engine is idle."""
        engine = self._engine
        busy = engine.running or engine.waiting or engine.has_outputs or self._idle_requests
        self._idle = idle = not busy
        try:
            return self._take(idle, _IDLE_S if idle else None)
        finally:
            self._round, self._idle = time.monotonic(), False

    def _submit(
        self, request: Request, sink: Sink, guide: Guidance | None, idle: bool = False
    ) -> None:
        engine = self._engine
        item: Refusal | Exception | None = None
        if self._idle_ids and engine.running + engine.waiting >= engine.config.rows:
            self._drop_idle()  # the request gets the row that it would get without idle requests
        try:
            engine.submit(request, guide)
        except QueueFull as error:
            item = Refusal("full", str(error))
        except ValueError as error:
            item = Refusal("invalid", str(error))
        except Exception as error:
            item = error
        if item:
            self._hand_out([(sink, item)])
            return
        self._sinks[request.id] = _Listener(sink, request.stream, idle)
        if idle:
            self._idle_ids.append(request.id)

    def _cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)
        self._forget(request_id)
        for waiting in [each for each in self._idle_requests if each[0].id == request_id]:
            self._idle_requests.remove(waiting)

    def _forget(self, request_id: str) -> None:
        self._sinks.pop(request_id, None)
        self._last.pop(request_id, None)
        if request_id in self._idle_ids:
            self._idle_ids.remove(request_id)

    def _hand_out(self, items: Sequence[tuple[Sink, Item]]) -> None:
        def run() -> None:
            for sink, item in items:
                sink(item)

        if items:
            self._hand_over(run)
