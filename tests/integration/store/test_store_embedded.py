"""The server we start: it ends with us, keeps what it should, and leaves nothing else behind."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support import eventually, refused
from tasc_store import EmbeddedRedis, StoreError, StoreUnreachable, connect, open_url
from tasc_store.embedded import redis_binaries

pytestmark = pytest.mark.redis
# The thread that starts the server ends before the process does: the server must not end with it.
ORPHAN = """
import sys, threading, tasc_store as t
def start():
    server = t.EmbeddedRedis.start()
    folder = t.connect(server.url).config_get('dir')['dir']
    print(server.pid, server.url, folder, flush=True)
starter = threading.Thread(target=start)
starter.start()
starter.join()
print('joined', flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders of the test's own process go."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("REDIS_URL", raising=False)
    return folder


def gone(pid: int) -> bool:
    """Ended; one that nobody has waited for yet counts."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def parent(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a parent's death")
def test_the_server_ends_with_a_killed_parent_but_not_with_a_thread(
    parent: subprocess.Popen[str],
) -> None:
    assert parent.stdout is not None
    pid, url, _ = parent.stdout.readline().split()
    assert parent.stdout.readline() == "joined\n"
    with connect(url) as client:
        assert client.info("server")["process_id"] == int(pid)
    parent.kill()
    eventually(lambda: gone(int(pid)))
    with pytest.raises(StoreUnreachable):
        connect(url)


def test_a_parent_that_forgets_to_close_leaves_nothing(
    parent: subprocess.Popen[str], temporary: Path
) -> None:
    assert parent.stdout is not None
    pid, _, directory = parent.stdout.readline().split()
    assert Path(directory).parent == temporary
    parent.communicate()
    assert parent.returncode == 0
    assert gone(int(pid))
    assert not Path(directory).exists()


@pytest.mark.parametrize("binary", redis_binaries(), ids=str)
def test_each_server_program_there_is_works(binary: Path, temporary: Path) -> None:
    with EmbeddedRedis.start(binary=binary) as server, connect(server.url) as client:
        assert client.set("key", "value")
        assert len(list(temporary.iterdir())) == 1
    assert gone(server.pid)
    assert list(temporary.iterdir()) == []
    server.close()


def test_there_is_a_server_program() -> None:
    assert redis_binaries()


def test_data_in_a_directory_of_its_own_outlives_the_server(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path / "data") as server, connect(server.url) as client:
        client.set("key", "value")
    with EmbeddedRedis.start(tmp_path / "data") as server, connect(server.url) as client:
        assert client.get("key") == b"value"


def test_one_directory_takes_one_server(tmp_path: Path) -> None:
    with (
        EmbeddedRedis.start(tmp_path / "data") as first,
        refused(StoreError, str(tmp_path / "data")) as refusal,
    ):
        EmbeddedRedis.start(tmp_path / "data")
    said = str(refusal.value)
    assert f"REDIS_URL={first.url} " in said
    assert "--data-dir (TASC_DATA_DIR)" in said


def test_who_finds_a_directory_in_use_is_told_the_url_of_the_server_there_now(
    tmp_path: Path,
) -> None:
    with EmbeddedRedis.start(tmp_path / "data"):
        pass
    with EmbeddedRedis.start(tmp_path / "data") as second:
        with refused(StoreError, f"REDIS_URL={second.url}"):
            EmbeddedRedis.start(tmp_path / "data")
        with connect(second.url) as client:
            assert client.ping()


def test_a_program_that_is_no_server_is_told_by_its_last_words(
    tmp_path: Path, temporary: Path
) -> None:
    script = tmp_path / "redis-server"
    script.write_text("#!/bin/sh\necho cannot do\nexit 1\n")
    script.chmod(0o755)
    with refused(StoreError, "cannot do"):
        EmbeddedRedis.start(binary=script)
    assert list(temporary.iterdir()) == []


def test_a_port_taken_meanwhile_is_replaced(tmp_path: Path, temporary: Path) -> None:
    script, flag = tmp_path / "redis-server", tmp_path / "flag"
    taken = f"[ -e {flag} ] || {{ touch {flag}; echo Address already in use; exit 1; }}"
    script.write_text(f'#!/bin/sh\n{taken}\nexec {redis_binaries()[0]} "$@"\n')
    script.chmod(0o755)
    with EmbeddedRedis.start(binary=script) as server, connect(server.url) as client:
        assert client.ping()
        assert len(list(temporary.iterdir())) == 1


def test_without_any_url_a_server_lives_for_the_block(temporary: Path) -> None:
    with open_url(None) as url, redis.Redis.from_url(url) as client:
        assert client.ping()
    assert list(temporary.iterdir()) == []
    with pytest.raises(StoreUnreachable):
        connect(url)
