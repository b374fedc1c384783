"""Completes calls when replicas die: another replica continues after the received tokens.

If the answer is not streamed, the whole answer is requested again. For a stream, the next replica
gets the token ids received so far and sends the ids that follow. The result is the same as without
a failure, because an answer depends only on its call.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

from msgspec import structs

from tasc_protocol import Output, Request
from tasc_runtime.protocol import Refusal
from tasc_serve.http_errors import ApiError
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.routing.fleet import Fleet, ReplicaLost, SeenReplica, loss_reason
from tasc_serve.routing.replica_client import ReplicaClient
from tasc_serve.settings import FailoverSettings

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_MAX_PAUSE_S = 1.0  # until a full replica is asked again


class RetryBudget:
    """Limits repeated calls: each new call adds ``share`` to the budget, up to ``size``."""

    def __init__(self, share: float, size: float) -> None:
        self._share, self._size, self._left = share, size, size

    def earn(self) -> None:
        self._left = min(self._left + self._share, self._size)

    def spend(self) -> bool:
        """Takes one repeated call from the budget; returns False if none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Run:
    """The progress of one request.

    Attributes:
        request: The original request.
        committed: Token ids received so far.
        begun: Whether a replica has accepted the request, so that the client has a status code.
        record_version: Version of the task's record that must answer; None: any.
        full: Refusals of replicas that are full or do not serve the version, by replica name.
        outdated: Names of replicas that refused the request as invalid, but serve an older
            version than other replicas.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.committed = list(request.committed_ids)
        self.begun = bool(self.committed)
        self.record_version = request.record_version
        self.losses = 0
        self.full: dict[str, Refusal] = {}
        self.outdated: set[str] = set()
        self.lost_at: float | None = None
        self.began = time.monotonic()

    @property
    def avoided(self) -> Collection[str]:
        """Names of the replicas that refused the request."""
        return self.full.keys() | self.outdated

    def rest(self) -> Request:
        """Returns the request for the next replica, with received tokens and the remaining time."""
        if not self.losses and self.record_version == self.request.record_version:
            return self.request
        timeout_s = self.request.timeout_s
        left = timeout_s and max(timeout_s - (time.monotonic() - self.began), 0)
        return structs.replace(
            self.request,
            committed_ids=tuple(self.committed),
            record_version=self.record_version,
            timeout_s=left,
        )

    def took(self, output: Output) -> None:
        self.begun = True
        self.committed += output.tokens
        if output.tokens:  # before the first token, any version may answer
            self.record_version = output.record_version


class Failover:
    """Sends the calls of one task to its replicas.

    Args:
        budget: The retry budget, shared by all tasks of a gateway.
    """

    def __init__(
        self,
        task: str,
        fleet: Fleet,
        client: ReplicaClient,
        settings: FailoverSettings,
        budget: RetryBudget,
        metrics: GatewayMetrics,
    ) -> None:
        self._task, self._fleet, self._client = task, fleet, client
        self._settings, self._budget, self._metrics = settings, budget, metrics

    async def complete(self, request: Request) -> Output | Refusal:
        """Returns the output with the whole answer, or a refusal if no replica accepts the request.

        Raises:
            ApiError: There is no replica, or too many were lost.
        """
        self._budget.earn()
        run = _Run(request)
        while True:
            replica = self._fleet.pick(
                run.avoided, run.record_version
            ) or await self._wait_for_replica(run)
            if isinstance(replica, Refusal):
                return replica
            try:
                with replica.call():
                    answer = await self._client.complete(replica.name, run.rest())
            except Exception as error:
                self._lose(run, replica, error)
                continue
            if not self._may_try_another(run, replica, answer):
                if isinstance(answer, Output):
                    self._found(run)
                return answer

    async def stream(self, request: Request) -> AsyncGenerator[Output | Refusal, None]:
        """Yields the outputs of the answer, each exactly once, even if several replicas send them.

        Raises:
            ApiError: There is no replica, or too many were lost.
        """
        self._budget.earn()
        run = _Run(request)
        while True:
            replica = self._fleet.pick(
                run.avoided, run.record_version
            ) or await self._wait_for_replica(run)
            if isinstance(replica, Refusal):
                yield replica
                return
            try:
                with replica.call():
                    async with aclosing(self._client.stream(replica.name, run.rest())) as items:
                        async for item in items:
                            if self._may_try_another(run, replica, item):
                                break
                            if isinstance(item, Output):
                                run.took(item)
                                if item.tokens or item.result:
                                    self._found(run)
                            yield item
                            if isinstance(item, Refusal) or item.result:
                                return
                        else:
                            raise ReplicaLost(replica.name, "died")
            except Exception as error:
                self._lose(run, replica, error)

    async def _wait_for_replica(self, run: _Run) -> SeenReplica | Refusal:
        """Returns the next replica to ask; may wait, e.g. until a dead replica is replaced."""
        deadline = time.monotonic() + self._settings.no_replica_timeout_s
        while True:
            if found := self._fleet.pick(run.avoided, run.record_version):
                return found
            pause_s = _LOOK_S
            if run.begun and run.full:  # an accepted call waits for a free place
                waits = [refusal.retry_after_s or _LOOK_S for refusal in run.full.values()]
                pause_s = min(_MAX_PAUSE_S, max(_LOOK_S, min(waits)))
                run.full.clear()
            if self._has_changed(run):
                return Refusal("changed", self._changed(run))
            if run.full:
                return _soonest(run.full.values())
            if time.monotonic() > deadline:
                raise ApiError(503, f"no replica of {self._task} answers; try again later")
            await asyncio.sleep(pause_s)

    def _lose(self, run: _Run, replica: SeenReplica, error: Exception) -> None:
        """Counts a loss. Raises if the call may not be sent again, or ``error`` is not a loss."""
        reason = loss_reason(error)
        if reason is None:
            raise error
        replica.give_up(reason, error.at if isinstance(error, ReplicaLost) else None)
        run.losses += 1
        run.lost_at = run.lost_at or time.monotonic()
        run.full.clear()
        run.outdated.clear()
        where = f"task {self._task}: call {run.request.id}, after {len(run.committed)} tokens"
        log.warning("%s: lost replica %s (%s): %s", where, replica.name, reason, error)
        if run.losses > self._settings.max_retries or not self._budget.spend():
            self._metrics.failovers_refused(self._task).inc()
            raise ApiError(503, f"replicas of {self._task} died; try again") from error
        self._metrics.failovers(self._task, reason).inc()

    def _found(self, run: _Run) -> None:
        """Records the time from a loss to the next tokens, which the client saw as a pause."""
        if run.lost_at is not None:
            seconds = time.monotonic() - run.lost_at
            self._metrics.failover_seconds(self._task).observe(seconds)
            run.lost_at = None

    def _has_changed(self, run: _Run) -> bool:
        """Whether there are replicas, but none serves the record version of the call."""
        status, version = self._fleet.status, run.record_version
        return bool(status and version and not self._fleet.pick((), version))

    def _changed(self, run: _Run) -> str:
        version = run.record_version
        return f"version {version} of task {self._task} is no longer served; send a new request"

    def _may_try_another(self, run: _Run, replica: SeenReplica, item: Output | Refusal) -> bool:
        """Whether another replica may accept a call that this one refused; notes the refusal."""
        if not isinstance(item, Refusal):
            return False
        if item.kind in ("full", "changed"):
            run.full[replica.name] = item
            return True
        # A newer version may have, for example, an adapter that this replica does not know.
        early = item.kind == "invalid" and not run.committed
        if early and self._fleet.is_outdated(replica):
            run.outdated.add(replica.name)
            return True
        return False


def _soonest(refusals: Collection[Refusal]) -> Refusal:
    """Returns the refusal with the shortest wait.

    The wait is divided by the number of refusals, since each of these replicas frees places.
    """
    soonest = min(refusals, key=lambda refusal: refusal.retry_after_s or 0)
    if not soonest.retry_after_s:
        return soonest
    return dataclasses.replace(soonest, retry_after_s=soonest.retry_after_s / len(refusals))
