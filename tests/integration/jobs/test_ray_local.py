"""A local Ray keeps to itself: loopback only, no password file, nothing left when it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tasc_jobs.errors import RaySetupError
from tasc_jobs.ray_local import local_ray
from tasc_jobs.statistics import corpus_statistics

pytestmark = pytest.mark.ray

SCRIPT = """
import os
import time
from pathlib import Path

import ray
from ray.data import DataContext

from tasc_jobs.ray_local import local_ray


def family():
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[pid] = rest[1]
    mine = {str(os.getpid())}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return mine


def listening(pids):
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


@ray.remote
def double(x):
    return 2 * x


before = dict(os.environ)
with local_ray(num_cpus=2, object_store_mb=100):
    assert ray.get([double.remote(n) for n in range(4)]) == [0, 2, 4, 6]
    context = DataContext.get_current()
    assert context.execution_no_progress_timeout_s == 90
    assert not context.enable_progress_bars
    with local_ray():
        pass
    assert ray.is_initialized()
    members = family()
    addresses = listening(members)
    folder = ray._private.worker._global_node.get_session_dir_path()
assert not ray.is_initialized()
os.environ.pop("PYTHONBREAKPOINT", None)  # Ray's own, it stays
assert dict(os.environ) == before
left, deadline = members, time.monotonic() + 20
while left != {str(os.getpid())} and time.monotonic() < deadline:
    left = {pid for pid in members if Path(f"/proc/{pid}").exists()}
assert len(members) > 4 and left == {str(os.getpid())}, (members, left)
print(len(addresses), *sorted(set(addresses)))
print(folder)
"""
# Ray Data warns of defaults of its own when it makes its context.
STRICT = ("-W", "error", "-W", "ignore::DeprecationWarning:ray.data.context")
LOOPBACK = {
    "0100007F",
    "0000000000000000FFFF00000100007F",
    "00000000000000000000000001000000",
}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at Linux's /proc")
def test_it_listens_on_loopback_only_and_leaves_nothing_behind(tmp_path):
    home, long = tmp_path / "home", tmp_path / ("x" * 60)
    home.mkdir()
    long.mkdir()
    ours = ("RAY_ADDRESS", "RAY_AUTH_MODE", "PYTHONBREAKPOINT")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env |= {"HOME": str(home), "TMPDIR": str(long)}  # TMPDIR is too long for Ray's sockets
    ran = subprocess.run(
        [sys.executable, *STRICT, "-c", SCRIPT], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    sockets, folder = ran.stdout.splitlines()
    count, *addresses = sockets.split()
    assert int(count) >= 4
    assert set(addresses) <= LOOPBACK
    session = Path(folder)
    assert session.parent.name.startswith("tasc-ray-")
    assert not session.parent.exists()
    assert list(long.iterdir()) == []
    assert not (home / ".ray").exists()
    assert ran.stderr == ""


def test_with_ray_address_it_joins_that_cluster_and_leaves_it_running(ray_cluster):
    code = """
import ray
from tasc_jobs.ray_local import local_ray
with local_ray(num_cpus=99):
    print(ray.cluster_resources()["CPU"], len(ray.nodes()))
assert not ray.is_initialized()
"""
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (ran.stdout.split(), ran.returncode) == (["4.0", "1"], 0), ran.stderr
    assert ray.cluster_resources()["CPU"] == 4.0


def test_a_ray_that_runs_already_is_used_and_left_running(ray_cluster):
    node = ray.get_runtime_context().get_node_id()
    with local_ray():
        assert ray.get_runtime_context().get_node_id() == node
    assert ray.is_initialized()


def test_without_ray_the_statistics_job_says_how_to_start_one(redis_url, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(RaySetupError, match="local_ray"):
        corpus_statistics(redis_url, "any")
