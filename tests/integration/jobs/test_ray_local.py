"""Tests that a local Ray uses loopback only, has no password file and leaves nothing behind."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from support import eventually
from tasc_jobs.errors import RaySetupError
from tasc_jobs.index.build import build_and_publish
from tasc_jobs.ray_local import local_ray
from tasc_jobs.statistics.task_statistics import corpus_statistics
from tasc_store import TaskRecord

pytestmark = pytest.mark.ray


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path that is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        yield Path(folder)


SCRIPT = """
import contextlib
import io
import os
import sys
import time
from pathlib import Path

import ray
from ray.data import DataContext

from listeners import family, listeners
from support import DEADLINE_S
from tasc_jobs.ray_local import local_ray


@ray.remote
def double(x):
    return 2 * x


@ray.remote(max_retries=0)
def die():
    os._exit(1)


before = dict(os.environ)
with local_ray(num_cpus=2, object_store_mb=100):
    assert ray.get([double.remote(n) for n in range(4)]) == [0, 2, 4, 6]
    context = DataContext.get_current()
    assert context.execution_no_progress_timeout_s == 90
    assert not context.enable_progress_bars
    with local_ray():
        pass
    assert ray.is_initialized()
    sys.stderr = io.StringIO()
    with contextlib.suppress(ray.exceptions.WorkerCrashedError):
        ray.get(die.remote())
    deadline = time.monotonic() + DEADLINE_S
    while "died" not in sys.stderr.getvalue() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "died" in sys.stderr.getvalue()
    sys.stderr = sys.__stderr__
    members = family()
    found = listeners(members)
    folder = ray._private.worker._global_node.get_session_dir_path()
assert not ray.is_initialized()
os.environ.pop("PYTHONBREAKPOINT", None)  # Ray's own, it stays
assert dict(os.environ) == before
left, deadline = members, time.monotonic() + DEADLINE_S
while left != {os.getpid()} and time.monotonic() < deadline:
    left = {pid for pid in members if Path(f"/proc/{pid}").exists()}
assert len(members) > 4 and left == {os.getpid()}, (members, left)
assert len(found) >= 4 and all(listener.loopback for listener in found), found
print(folder)
"""
# Ray Data warns of its own defaults when it creates its context.
STRICT = ("-W", "error", "-W", "ignore::DeprecationWarning:ray.data.context")


def without_ray() -> dict[str, str]:
    """Returns this process's environment without the variables of its Ray."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name != "PYTHONBREAKPOINT"
    }


def ran(code: str, *strict: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process without Ray, up to its end."""
    env = without_ray() | env
    tests = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join([tests, env.get("PYTHONPATH", "")])
    command = [sys.executable, *strict, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow("a Ray of its own")
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at Linux's /proc")
def test_local_ray_listens_on_loopback_only_and_leaves_no_files(tmp_path):
    home, long = tmp_path / "home", tmp_path / ("x" * 60)
    home.mkdir()
    long.mkdir()
    # TMPDIR is too long for Ray's sockets
    done = ran(SCRIPT, *STRICT, HOME=str(home), TMPDIR=str(long))
    session = Path(done.stdout.strip())
    assert session.parent.name.startswith("tasc-ray-")
    assert not session.parent.exists()
    assert list(long.iterdir()) == []
    assert not (home / ".ray").exists()
    assert done.stderr == ""


SERVING = """
import grpc
from ray import serve

from listeners import family, listeners
from tasc_jobs.ray_local import local_ray


@serve.deployment
class Quiet:
    async def __call__(self):
        return 1


def reply(port, token):
    headers = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        try:
            call(b"", metadata=headers, timeout=30)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


with local_ray(num_cpus=2, object_store_mb=100):
    import os
    serve.start(http_options={"host": "127.0.0.1", "port": 0, "location": "HeadOnly"})
    serve.run(Quiet.bind(), route_prefix=None)
    for listener in listeners(family()):
        if not listener.loopback:
            tokens = None, "0" * 64, os.environ["RAY_AUTH_TOKEN"]
            print("SAID", *(reply(listener.port, token) for token in tokens))
    serve.shutdown()
"""


@pytest.mark.slow("a Ray of its own")
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at Linux's /proc")
def test_replica_ports_beyond_loopback_require_the_ray_token():
    done = ran(SERVING)
    reply = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert reply, done.stdout
    for without, wrong, right in reply:
        assert (without, wrong) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        assert right != "UNAUTHENTICATED"


def test_cluster_at_ray_address_is_joined_and_keeps_running(ray_cluster):
    code = """
import ray
from tasc_jobs.ray_local import local_ray
with local_ray(num_cpus=99):
    print(ray.cluster_resources()["CPU"], len(ray.nodes()))
assert not ray.is_initialized()
"""
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == (["4.0", "1"], 0), done.stderr
    assert ray.cluster_resources()["CPU"] == 4.0


@pytest.mark.slow("a Ray of its own")
def test_running_ray_of_ray_start_is_found(short_folder):
    """A local Ray beside it does not affect it."""
    env = {"RAY_TMPDIR": str(short_folder)}
    command = ["ray", "start", "--head", "--block", "--port=0", "--num-cpus=1"]
    command += ["--include-dashboard=false", "--object-store-memory=80000000"]
    code = "from tasc_runtime.ray_private import running_ray; print(running_ray())"
    assert ran(code, **env).stdout.split() == ["None"]
    head = subprocess.Popen(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        env=without_ray() | env | {"RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: ran(code, **env).stdout.split() != ["None"])
        both = """
import ray
from tasc_jobs.ray_local import local_ray
from tasc_runtime.ray_private import running_ray
other = running_ray()
with local_ray(num_cpus=3, object_store_mb=80):
    print(ray.cluster_resources()["CPU"], ray.get_runtime_context().gcs_address != other)
"""
        assert ran(both, **env).stdout.split() == ["3.0", "True"]
        address = ran(code, **env).stdout.strip()
        joining = both.replace("!=", "==")
        assert ran(joining, RAY_ADDRESS=address, **env).stdout.split() == ["1.0", "True"]
    finally:
        head.terminate()
        head.wait(60)
    assert ran(code, **env).stdout.split() == ["None"]


def test_initialised_ray_is_used_and_left_running(ray_cluster):
    node = ray.get_runtime_context().get_node_id()
    with local_ray():
        assert ray.get_runtime_context().get_node_id() == node
    assert ray.is_initialized()


def test_job_without_ray_raises_a_setup_error(redis_url, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(RaySetupError):
        corpus_statistics(redis_url, "any")
    with pytest.raises(RaySetupError):
        build_and_publish(redis_url, TaskRecord("any", "m", "f", "{input}"))
