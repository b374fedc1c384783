"""Brings a gateway's request for a connection to the replica that it names, inside Serve's router.

The router also reports the replicas that are present.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from tasc_serve.routing import presence
from tasc_serve.wire import AttachRequest


class ChosenReplicaRouter(RequestRouter):
    """Sends an `AttachRequest` to the replica that it names, on whatever node."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request:  # else Serve tries again without a pause, and nothing else runs
            pending_request.routing_context.should_backoff = True
        wanted = _named(pending_request.args) if pending_request else None
        chosen = [r for r in candidate_replicas if r.replica_id.unique_id == wanted]
        return [chosen or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        names = (replica.unique_id for replica in self.curr_replicas)
        presence.tell(self._deployment_id.name, names)


def _named(args: Sequence[Any]) -> str | None:
    """The replica that a request's first argument names."""
    first = args[0] if args else None
    return first.replica_id if isinstance(first, AttachRequest) else None
