"""The page on two hosts: its blocks run on two hosts that are Linux namespaces."""

import os
import re
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from documents import ROOT, Block, document

from tasc_store.embedded import redis_binaries

PAGE = ROOT / "docs" / "how-to" / "two-nodes.md"
ADDRESSES = {"head": "10.0.0.1", "second host": "10.0.0.2"}
# Each host has processes, a network and a /tmp of its own. They end with its shell.
_OWN = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Ray gives a node 30 s to start, which a busy machine exceeds.
_PATIENT = 'ray() { until command ray "$@"; do [ "$1" = start ] || return 1; done; }'
_COPY = re.compile(r"scp (?P<source>\S+) 10\.0\.0\.2:(?P<target>\S+)")
_IS_READY = "curl -sf -o /dev/null http://10.0.0.1:8000/readyz"
_SHARED = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]


@dataclass(frozen=True)
class Host:
    """A host, which is one shell."""

    shell: subprocess.Popen[str]

    def run(self, commands: str) -> str:
        """Run commands to their end; returns what they print."""
        assert self.shell.stdin
        assert self.shell.stdout
        mark = uuid.uuid4().hex
        self.shell.stdin.write(f"{commands}\necho {mark}\n")
        self.shell.stdin.flush()
        lines: list[str] = []
        for line in self.shell.stdout:
            lines.append(line.removesuffix(f"{mark}\n"))  # output may end without a line break
            if lines[-1] != line:
                return "".join(lines)
        raise AssertionError(f"a command of this block failed:\n{commands}\n{''.join(lines)}")


@contextmanager
def two_hosts(folder: Path) -> Iterator[dict[str, Host]]:
    """Makes two connected hosts; skips the test if the kernel or permissions forbid it."""
    for tool in ("ip", "nsenter", "unshare", "curl", "openssl"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH")
    user = ["unshare", "--user", "--map-root-user"]
    tried = subprocess.run([*user, *_OWN, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespaces can be made: {tried.stderr}")
    with ExitStack() as stack:
        waits = [*user, "sh", "-c", "echo; exec sleep infinity"]
        holder = stack.enter_context(subprocess.Popen(waits, stdout=subprocess.PIPE))
        stack.callback(holder.kill)
        assert holder.stdout
        holder.stdout.readline()  # it is in its namespace now
        inside = ["nsenter", "--user", "--preserve-credentials", f"--target={holder.pid}"]
        hosts = {}
        for name in ADDRESSES:
            home = folder / name.replace(" ", "-")
            home.mkdir()
            shell = subprocess.Popen(
                [*inside, *_OWN, "bash", "-e"], cwd=home, env=_environment(home), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(stack.enter_context(shell).kill)
            hosts[name] = Host(shell)
            hosts[name].run(f"{_own_tmp(home)}\n{_PATIENT}")
        first, second = (host.shell.pid for host in hosts.values())
        cable = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns"]
        at = ["--net", f"--target={first}"]
        subprocess.run(["nsenter", *inside[1:3], *at, *cable, str(second)], check=True)
        for name, address in ADDRESSES.items():
            hosts[name].run(f"ip address add {address}/24 dev eth0")
            hosts[name].run("ip link set lo up\nip link set eth0 up")
        yield hosts


def _environment(home: Path) -> dict[str, str]:
    ours = ("RAY_", "TASC_", "REDIS_", "XDG_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    path = (Path(sys.executable).parent, redis_binaries()[0].parent, env["PATH"])
    env |= {"PATH": os.pathsep.join(map(str, path)), "HOME": str(home), "CLONE": str(ROOT)}
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _own_tmp(home: Path) -> str:
    """Returns commands that give a host an empty /tmp, except for the folders that it needs."""
    tmp, own = Path("/tmp"), home.parent / "tmp"
    kept = [path for path in (*_SHARED, home) if path.is_relative_to(tmp)]
    lines = [f"mkdir -p {own}", f"mount -t tmpfs none {own}"]
    for path in kept:
        there = own / path.relative_to(tmp)
        lines += [f"mkdir -p {there}", f"mount --bind {path} {there}"]
    return "\n".join([*lines, f"mount --rbind {own} {tmp}", f"cd {home}"])


@pytest.mark.slow("two Ray nodes, each on a host that is a network namespace")
@pytest.mark.timeout(1800)
@pytest.mark.ray
@pytest.mark.redis
def test_commands_of_the_page_start_and_stop_a_service_on_two_hosts(tmp_path: Path) -> None:
    blocks = [block for block in document(PAGE).blocks if block.language == "bash"]
    with two_hosts(tmp_path) as hosts:
        *before, stop = blocks  # a host's processes are its own, so its `kill` reaches no others
        printed = "".join([_follow(block, hosts, tmp_path) for block in before])
        assert printed.count("intent: alarm_set") == 2
        _follow(stop, hosts, tmp_path)
        assert "no service" in hosts["head"].run(f"{_IS_READY} || echo no service")
        hosts["head"].run('kill -0 "$(cat ray.pid)"')


def _follow(block: Block, hosts: dict[str, Host], folder: Path) -> str:
    """Runs a block on its host; returns its output."""
    if copy := _COPY.fullmatch(block.text):  # the hosts have no SSH server
        source = Path(hosts["head"].run("pwd").rstrip("\n"), copy["source"])
        assert stat.S_IMODE(source.stat().st_mode) == 0o600
        shutil.copy(source, folder / "second-host" / copy["target"])  # relative to its home
        return ""
    assert block.reason is None
    where, _, commands = block.text.partition("\n")
    if where == "# on both hosts":
        return "".join([host.run(commands) for host in hosts.values()])
    return hosts[where.removeprefix("# on the ")].run(commands)
