"""A gateway's view of one task's replicas: which are present or silent, and their load.

The gateway asks each replica for its heartbeat, because Ray needs ten seconds or more to notice a
lost node, and does not notice a process that hangs.
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
from tasc_runtime.protocol import ReplicaState, TaskStatus

log = logging.getLogger(__name__)

_MAX_HEARTBEAT_S = 1.0
_FIRST_HEARTBEAT_S = 3.0  # after the first look; Serve's report and a heartbeat take about 1 s
_SETTLE_POLL_S = 0.05
_DIED = (
    RayActorError,
    NodeDiedError,
    ObjectLostError,
    RaySystemError,
    # Raised by a replica that is being stopped. Our own cancellations do not raise these errors.
    TaskCancelledError,
    RequestCancelledError,
)


class ReplicaLost(Exception):
    """The replica of a call no longer answers.

    Attributes:
        reason: ``died``, ``broken`` or ``silent``.
        at: Time of the loss, by `time.monotonic`; a slow reader may see the exception later.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"replica {name} is lost: {reason}")
        self.reason = reason
        self.at = time.monotonic()


def loss_reason(error: BaseException) -> str | None:
    """Returns the reason of a loss, if an error means that a replica is lost.

    Returns:
        ``broken`` if the replica's engine ended, ``died`` if its process or node died, ``silent``
        if it did not answer in time; None for other errors, which fail the request.
    """
    if isinstance(error, ReplicaLost):
        return error.reason
    if isinstance(error, EngineBroken):
        return "broken"
    return "died" if isinstance(error, _DIED) else None


class SeenReplica:
    """A gateway's knowledge about one replica.

    Attributes:
        calls: Number of this gateway's calls that the replica is answering.
        gone: The reason why the replica gets no more calls; empty if it may get calls.
        disconnected: Whether the connection was ended after the last heartbeat.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.heartbeat: ReplicaState | None = None
        self.asking = False
        self.gone = ""
        self.disconnected = False
        self._last_heard_at = time.monotonic()
        self._heartbeat_at = 0.0
        self._calls_then = 0

    @property
    def load(self) -> int:
        """Requests of other gateways at the last heartbeat, plus this gateway's current calls."""
        others = self.heartbeat.outstanding - self._calls_then if self.heartbeat else 0
        return max(others, 0) + self.calls

    @property
    def has_free_rows(self) -> bool:
        """Whether the engine can start another request at once; False if unknown."""
        return self.heartbeat is not None and self.load < self.heartbeat.status.rows

    @property
    def record_version(self) -> int:
        """The newest record version of the replica, by its last heartbeat; 0 if unknown."""
        return self.heartbeat.status.record_version if self.heartbeat else 0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._last_heard_at

    def on_heartbeat(self, heartbeat: ReplicaState, heartbeat_timeout_s: float) -> None:
        """Notes a heartbeat. If the engine is stalled, the replica still counts as silent."""
        self.heartbeat, self._calls_then = heartbeat, self.calls
        if heartbeat.stalled_s < heartbeat_timeout_s:
            self._last_heard_at = self._heartbeat_at = time.monotonic()
            self.gone, self.disconnected = "", False

    def give_up(self, reason: str, at: float | None = None) -> None:
        """Sends the replica no more calls until its next heartbeat.

        Args:
            at: Time of the loss. The loss is ignored if a heartbeat came later. None: now.
        """
        if at is None or at >= self._heartbeat_at:
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
        present: Returns the names of the replicas that exist.
        ask: Asks a replica for its heartbeat.
        heartbeat_timeout_s: A replica that is silent for longer is given up, if another one
            answers.
        seen: Called after each look with the number of replicas that have answered.
        disconnect: Called with a name and a reason; ends the replica's connection and its calls.
    """

    def __init__(
        self,
        task: str,
        present: Callable[[], Collection[str]],
        ask: Callable[[str], Awaitable[ReplicaState]],
        heartbeat_timeout_s: float,
        seen: Callable[[int], None] = lambda replicas: None,
        disconnect: Callable[[str, str], object] = lambda name, reason: None,
    ) -> None:
        self._task, self._present, self._ask = task, present, ask
        self._silence_s, self._seen, self._disconnect = heartbeat_timeout_s, seen, disconnect
        self._replicas: dict[str, SeenReplica] = {}
        self._heartbeats: set[asyncio.Task[None]] = set()
        self._looked_at: float | None = None  # time of the first look

    async def settled(self) -> None:
        """Waits for a replica's first heartbeat, until `_FIRST_HEARTBEAT_S` after the first look.

        Until then, it is unknown whether there is a replica.
        """
        while self.status is None:
            since = self._looked_at
            if since is not None and time.monotonic() - since > _FIRST_HEARTBEAT_S:
                return
            await asyncio.sleep(_SETTLE_POLL_S)

    @property
    def status(self) -> TaskStatus | None:
        """The last status of the replica that `pick` would choose for a new call.

        Calls that are pinned to this record version still go to any replica that serves it.
        """
        chosen = self.pick((), None)
        return chosen.heartbeat.status if chosen and chosen.heartbeat else None

    def pick(self, avoid: Collection[str], record_version: int | None) -> SeenReplica | None:
        """Returns the least loaded replica that serves a version of the record, or None.

        Args:
            avoid: Names of replicas that must not be chosen.
            record_version: The version that must be served; None for any. Replicas with the newest
                version are preferred while their engines have free rows. Otherwise the load is
                shared by all: early in a rolling update, one new replica cannot take all the load.
        """
        fits = [r for r in self._live() if r.name not in avoid and _serves(r, record_version)]
        if len(fits) == 1:
            return fits[0]
        if record_version is None:
            newest = max((r.record_version for r in fits), default=0)
            preferred = [r for r in fits if r.record_version == newest and r.has_free_rows]
            fits = preferred or fits
        return min(fits, key=lambda r: r.load, default=None)

    def is_outdated(self, replica: SeenReplica) -> bool:
        """Whether another replica serves a newer version of the record."""
        return any(other.record_version > replica.record_version for other in self._live())

    async def watch(self) -> None:
        """Calls `look` repeatedly, until this coroutine is cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # unexpected; the loop must continue
                log.exception("task %s: the replicas could not be checked", self._task)
            await asyncio.sleep(min(_MAX_HEARTBEAT_S, self._silence_s / 4))

    def look(self) -> None:
        """Asks present replicas for a heartbeat, gives up silent ones, and forgets absent ones."""
        if self._looked_at is None:
            self._looked_at = time.monotonic()
        names = set(self._present())
        for name in names - self._replicas.keys():
            self._replicas[name] = SeenReplica(name)
        for replica in list(self._replicas.values()):
            present = replica.name in names
            if present or replica.calls:  # a stopping replica finishes its calls
                if present or not replica.disconnected:
                    self._begin_to_ask(replica)
                self._judge(replica)
            else:
                del self._replicas[replica.name]
                self._disconnect(replica.name, "died")
        self._seen(sum(r.heartbeat is not None for r in self._live()))

    def _judge(self, replica: SeenReplica) -> None:
        if replica.silent_s < self._silence_s or replica.disconnected:
            return  # a disconnected replica has calls left if their clients do not read
        # A silent replica may come back. If there is no other replica, calls wait for it.
        if any(other.silent_s < self._silence_s for other in self._live() if other is not replica):
            log.warning(
                "task %s: replica %s is silent; other replicas get its calls until it answers",
                self._task,
                replica.name,
            )
            self._give_up(replica, "silent")

    def _give_up(self, replica: SeenReplica, reason: str) -> None:
        replica.give_up(reason)
        replica.disconnected = True
        self._disconnect(replica.name, replica.gone)

    def _live(self) -> list[SeenReplica]:
        present = self._present()
        return [r for r in self._replicas.values() if r.name in present and not r.gone]

    def _begin_to_ask(self, replica: SeenReplica) -> None:
        if not replica.asking:
            replica.asking = True
            heartbeat = asyncio.create_task(self._ask_for_heartbeat(replica))
            self._heartbeats.add(heartbeat)
            heartbeat.add_done_callback(self._heartbeats.discard)

    async def _ask_for_heartbeat(self, replica: SeenReplica) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                replica.on_heartbeat(await self._ask(replica.name), self._silence_s)
        except Exception as error:
            if reason := loss_reason(error):
                self._give_up(replica, reason)
            elif not isinstance(error, TimeoutError):
                where = f"task {self._task}: replica {replica.name}"
                log.warning("%s sent no heartbeat: %r", where, error)
        finally:
            replica.asking = False


def _serves(replica: SeenReplica, record_version: int | None) -> bool:
    if replica.heartbeat is None:
        return False
    status, version = replica.heartbeat.status, record_version
    return version is None or version in (status.record_version, *status.older_record_versions)
