"""Brings each call to the replica that the gateway has chosen for it, inside Ray Serve's router.

The gateway chooses (`fleet`); the router reports the replicas that are present.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from tasc_runtime.protocol import Call, PulseRequest
from tasc_serve.routing import presence


class ChosenReplicaRouter(RequestRouter):
    """Sends a `Call` or `PulseRequest` to the replica it names; without one, to the least queue.

    Nodes do not matter: replicas of other nodes would stand idle until those of a gateway's own
    are full.
    """

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
    return first.replica_id if isinstance(first, Call | PulseRequest) else None
