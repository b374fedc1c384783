"""A router for Ray Serve that sends a gateway's `AttachRequest` to the replica that it names.

The router also reports the present replicas to `presence`.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from tasc_serve.routing import presence
from tasc_serve.wire import AttachRequest


class ChosenReplicaRouter(RequestRouter):
    """Sends an `AttachRequest` to the replica that it names, on any node."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request:  # otherwise Serve retries without a pause and blocks its loop
            pending_request.routing_context.should_backoff = True
        wanted = _named(pending_request.args) if pending_request else None
        chosen = [r for r in candidate_replicas if r.replica_id.unique_id == wanted]
        return [chosen or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._report()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._report()

    def _report(self) -> None:
        names = (replica.unique_id for replica in self.curr_replicas)
        presence.report(self._deployment_id.name, names)


def _named(args: Sequence[Any]) -> str | None:
    """Returns the replica that a request's first argument names, if it is an `AttachRequest`."""
    first = args[0] if args else None
    return first.replica_id if isinstance(first, AttachRequest) else None
