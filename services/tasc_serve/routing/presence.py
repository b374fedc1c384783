"""The replicas that Ray Serve has for each deployment, as reported by the routers of this process.

This is not in the router's own module, which Serve brings to a process as a copy of its own.
"""

from collections import defaultdict
from collections.abc import Iterable

# Routers run on a thread of their own: a set is replaced whole, so that readers see one state.
_present: defaultdict[str, frozenset[str]] = defaultdict(frozenset)


def tell(deployment: str, replicas: Iterable[str]) -> None:
    """Say which there are now."""
    _present[deployment] = frozenset(replicas)


def present(deployment: str) -> frozenset[str]:
    """Names of those there are; none before the first call to the deployment."""
    return _present[deployment]
