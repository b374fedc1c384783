"""The replicas of one task as a gateway sees them: present or not, silent or not, and their load.

The gateway asks each replica for its pulse: Ray takes ten seconds and more to notice a node that is
gone, and does not notice a process that hangs.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RaySystemError,
    TaskCancelledError,
)
from ray.serve.exceptions import RequestCancelledError

from tasc_runtime.errors import EngineBroken
from tasc_runtime.protocol import Pulse, TaskStatus

log = logging.getLogger(__name__)

_MOST_PULSE_S = 1.0
_DIED = (
    RayActorError,
    NodeDiedError,
    ObjectLostError,
    RaySystemError,
    # Of a replica that is being stopped; what we cancel ourselves does not come back as this.
    TaskCancelledError,
    RequestCancelledError,
)


class ReplicaLost(Exception):
    """The replica that a call was sent to does not answer any more.

    Attributes:
        reason: ``died``, ``broken`` or ``silent``.
        at: When it was lost, by `time.monotonic`. A client that reads slowly may learn of it late.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"replica {name} is lost: {reason}")
        self.reason = reason
        self.at = time.monotonic()


def loss_reason(error: BaseException) -> str | None:
    """Say why an error means that the replica is lost.

    Returns:
        ``broken`` if its engine ended, ``died`` if its process or node did, ``silent`` if it did
        not answer in time; None for other errors, with which the request fails.
    """
    if isinstance(error, ReplicaLost):
        return error.reason
    if isinstance(error, EngineBroken):
        return "broken"
    return "died" if isinstance(error, _DIED) else None


class SeenReplica:
    """One replica, from outside.

    Attributes:
        calls: This gateway's calls that it holds.
        gone: Why it was given up, and gets no calls; empty while it does.
        let_go: Whether its connection was ended since it last had a pulse.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.pulse: Pulse | None = None
        self.asking = False
        self.gone = ""
        self.let_go = False
        self._heard = time.monotonic()
        self._pulse_at = 0.0
        self._calls_then = 0

    @property
    def load(self) -> int:
        """Requests that it holds: others' as of its last pulse, and ours."""
        others = self.pulse.outstanding - self._calls_then if self.pulse else 0
        return max(others, 0) + self.calls

    @property
    def has_free_rows(self) -> bool:
        """Whether its engine could begin another request at once; False: nobody knows."""
        return self.pulse is not None and self.load < self.pulse.status.rows

    @property
    def record_version(self) -> int:
        """The newest that it serves, as of its last pulse; 0: nobody knows."""
        return self.pulse.status.record_version if self.pulse else 0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard

    def heard(self, pulse: Pulse, heartbeat_timeout_s: float) -> None:
        """It has answered; one whose engine stands still is as good as silent."""
        self.pulse, self._calls_then = pulse, self.calls
        if pulse.stalled_s < heartbeat_timeout_s:
            self._heard = self._pulse_at = time.monotonic()
            self.gone, self.let_go = "", False

    def give_up(self, reason: str, at: float | None = None) -> None:
        """Give it no more calls until it has a pulse again.

        Args:
            at: When it was lost; nothing happens if it has had a pulse since. None: now.
        """
        if at is None or at >= self._pulse_at:
            self.gone = self.gone or reason

    @contextmanager
    def call(self) -> Iterator[None]:
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1


class Fleet:
    """The replicas of one task. Belongs to one event loop.

    Args:
        present: Names of those that there are.
        ask: Ask one for its pulse.
        heartbeat_timeout_s: A replica not heard of for this long is given up, if there is another.
        seen: Told how many there are that have answered, after each look.
        let_go: Ends the connection to one, by its name, and with it all its calls. It is told why.
    """

    def __init__(
        self,
        task: str,
        present: Callable[[], Collection[str]],
        ask: Callable[[str], Awaitable[Pulse]],
        heartbeat_timeout_s: float,
        seen: Callable[[int], None] = lambda replicas: None,
        let_go: Callable[[str, str], object] = lambda name, reason: None,
    ) -> None:
        self._seen = seen
        self._let_go = let_go
        self._task = task
        self._present = present
        self._ask = ask
        self._silence_s = heartbeat_timeout_s
        self._replicas: dict[str, SeenReplica] = {}
        self._pulses: set[asyncio.Task[None]] = set()

    @property
    def status(self) -> TaskStatus | None:
        """The last status of the replica that `pick` would give a new call.

        Calls that are pinned to its version, such as retries, spread as others do.
        """
        chosen = self.pick((), None)
        return chosen.pulse.status if chosen and chosen.pulse else None

    def pick(self, avoid: Collection[str], record_version: int | None) -> SeenReplica | None:
        """The one with least to do of those that serve a version of the record; None for none.

        Args:
            record_version: None: any. Replicas with the newest version come first while their
                engines have free rows. Beyond that they share the load with the others: early in a
                rolling update one new replica cannot take the load of all.
        """
        fits = [r for r in self._live() if r.name not in avoid and _serves(r, record_version)]
        if record_version is None:
            newest = max((r.record_version for r in fits), default=0)
            preferred = [r for r in fits if r.record_version == newest and r.has_free_rows]
            fits = preferred or fits
        return min(fits, key=lambda r: r.load, default=None)

    def is_behind(self, replica: SeenReplica) -> bool:
        """Whether another one serves a newer version of the record."""
        return any(other.record_version > replica.record_version for other in self._live())

    async def watch(self) -> None:
        """Ask all of them, again and again, until this is cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # unforeseen; the next look must come
                log.exception("task %s: its replicas could not be looked after", self._task)
            await asyncio.sleep(min(_MOST_PULSE_S, self._silence_s / 4))

    def look(self) -> None:
        """Ask whoever is there, forget who is not, give up who is silent."""
        names = set(self._present())
        for name in names - self._replicas.keys():
            self._replicas[name] = SeenReplica(name)
        for replica in list(self._replicas.values()):
            present = replica.name in names
            if present or replica.calls:  # being stopped it still ends what it has
                if present or not replica.let_go:
                    self._begin_to_ask(replica)
                self._judge(replica)
            else:
                del self._replicas[replica.name]
                self._let_go(replica.name, "died")
        self._seen(sum(r.pulse is not None for r in self._live()))

    def _judge(self, replica: SeenReplica) -> None:
        if replica.silent_s < self._silence_s or replica.let_go:
            return  # a client that does not read may keep a call that was ended
        # Waiting for one that may come back is better than for nobody.
        if any(other.silent_s < self._silence_s for other in self._live() if other is not replica):
            log.warning("task %s: replica %s is silent, given up", self._task, replica.name)
            self._give_up(replica, "silent")

    def _give_up(self, replica: SeenReplica, reason: str) -> None:
        replica.give_up(reason)
        replica.let_go = True
        self._let_go(replica.name, replica.gone)

    def _live(self) -> list[SeenReplica]:
        present = self._present()
        return [r for r in self._replicas.values() if r.name in present and not r.gone]

    def _begin_to_ask(self, replica: SeenReplica) -> None:
        if not replica.asking:
            replica.asking = True
            pulse = asyncio.create_task(self._ask_for_pulse(replica))
            self._pulses.add(pulse)
            pulse.add_done_callback(self._pulses.discard)

    async def _ask_for_pulse(self, replica: SeenReplica) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                replica.heard(await self._ask(replica.name), self._silence_s)
        except Exception as error:
            if reason := loss_reason(error):
                self._give_up(replica, reason)
            elif not isinstance(error, TimeoutError):
                log.warning("task %s: replica %s has no pulse: %r", self._task, replica.name, error)
        finally:
            replica.asking = False


def _serves(replica: SeenReplica, record_version: int | None) -> bool:
    if replica.pulse is None:
        return False
    status = replica.pulse.status
    return record_version in (None, status.record_version, *status.older_record_versions)
