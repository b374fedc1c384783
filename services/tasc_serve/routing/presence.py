"""The replicas that Ray Serve has for each deployment, as reported by the routers of this process.

This module is separate from `replica_router`, because Serve gives each process a second copy of
`replica_router`.
"""

from collections import defaultdict
from collections.abc import Iterable

# Routers run on another thread. Sets are replaced, never changed, so readers see a valid state.
_present: defaultdict[str, frozenset[str]] = defaultdict(frozenset)


def report(deployment: str, replicas: Iterable[str]) -> None:
    """Reports the replicas of a deployment that exist now."""
    _present[deployment] = frozenset(replicas)


def present(deployment: str) -> frozenset[str]:
    """Returns the names of existing replicas; none before the first call to the deployment."""
    return _present[deployment]
