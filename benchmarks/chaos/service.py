"""A service of two Ray nodes on one machine, and its faults."""

import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from benchmarks.serve.service import served

if TYPE_CHECKING:
    from killable import RedisServer

TASK = "alpha"
REPLICAS = GATEWAYS = 2
FAULTS = ("replica", "hang", "gateway", "redis", "node")
_ROWS, _QUEUED, _MODEL_LEN = 8, 512, 256


@dataclass
class Watched:
    """A running service as seen from outside.

    Attributes:
        base: The URL for clients.
        operators: The URL for operators.
    """

    store: "RedisServer"
    base: str
    operators: str

    def whole(self) -> bool:
        """Whether all replicas, all gateways and the store are up."""
        try:
            with urlopen(f"{self.operators}/readyz", timeout=5) as answer:
                ready = json.load(answer)["status"] == "ready"
            seen = self.metric("tasc_replicas_reachable")
        except OSError:
            return False
        processes = len(self.pids(TASK)), len(self.pids("gateway"))
        return ready and seen == REPLICAS and processes == (REPLICAS, GATEWAYS)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, from the merged metrics of the gateways."""
        with urlopen(f"{self.operators}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    def pids(self, deployment: str) -> list[int]:
        """The processes of a deployment that are not stopped."""
        name = f"ray::ServeReplica:tasc:{deployment}"
        found = (int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if _is(p, name))
        return sorted(pid for pid in found if not _is_stopped(pid))


@dataclass
class Chaos(Watched):
    """A service of two Ray nodes on this machine."""

    cluster: Any
    node: Any
    node_args: dict[str, Any]
    redis_down_s: float
    _stopped: list[int] = field(default_factory=list)

    def harm(self, fault: str) -> None:
        """Cause a fault; restart what is not restarted by the service."""
        if fault == "replica":
            os.kill(self.pids(TASK)[0], signal.SIGKILL)
        elif fault == "hang":
            self._stopped.append(self.pids(TASK)[0])
            os.kill(self._stopped[-1], signal.SIGSTOP)
        elif fault == "gateway":
            os.kill(self.pids("gateway")[0], signal.SIGKILL)
        elif fault == "redis":
            self.store.kill()
            time.sleep(self.redis_down_s)
            self.store.start()
        else:
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.node = self.cluster.add_node(**self.node_args)

    def mend(self) -> None:
        """Kill processes that hang, as Serve may not have noticed them yet."""
        while self._stopped:
            pid = self._stopped.pop()
            if _is_stopped(pid):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running(folder: Path, redis_down_s: float) -> Iterator[tuple[Chaos, Any]]:
    """Run the service; yields it, and its task."""
    os.environ.update(environment(folder))
    os.environ["SERVE_SOCKET_REUSE_PORT_ENABLED"] = "1"  # both nodes have a proxy at the same port
    import ray
    from ray.cluster_utils import Cluster
    from serving import make_task

    from killable import RedisServer
    from tasc_store import TaskStore, connect

    with ExitStack() as stack:
        store = RedisServer(folder / "redis")
        stack.callback(store.kill)
        task = make_task(folder / TASK, TASK)
        with connect(store.url) as client:
            TaskStore(client).put(task.record)
        node_args = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node_args)
        stack.callback(cluster.shutdown)
        del node_args["include_dashboard"]
        node = cluster.add_node(**node_args)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        stack.callback(ray.shutdown)
        base = stack.enter_context(served(settings_of(folder), store.url))
        yield Chaos(store, base, base, cluster, node, node_args, redis_down_s), task


def environment(folder: Path) -> dict[str, str]:
    """What Ray's nodes have in their environment, in the image too."""
    from tasc_serve.http.ray_proxy import environment as of_proxy
    from tasc_serve.settings import HttpSettings

    return of_proxy(HttpSettings(), folder) | {
        # Ray's sockets are open to others, so that they need a token.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }


def settings_of(folder: Path) -> dict[str, Any]:
    """Settings by which each node has one replica and one gateway."""
    replicas = {"replicas": REPLICAS, "max_replicas_per_node": 1, "num_cpus": 0.1}
    gateways = {"gateways": GATEWAYS, "max_gateways_per_node": 1, "gateway_num_cpus": 0.1}
    return {
        "tasks": [{"name": TASK, **replicas}],
        "http": {"port": 0, **gateways},
        "engine": {"rows": _ROWS, "max_model_len": _MODEL_LEN, "cost_aware": False},
        "limits": {"max_queued_requests": _QUEUED, "drain_timeout_s": 5},
        "failover": {"heartbeat_timeout_s": 3, "no_replica_timeout_s": 40, "max_retries": 6},
        "metrics": {"host": "127.0.0.1"},
        "cache_dir": str(folder / "cache"),
    }


def _is(command: Path, name: str) -> bool:
    try:
        return command.read_text().startswith(name)
    except OSError:
        return False


def _is_stopped(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
