"""Tests files that are replaced whole: killed and concurrent writers, errors, and leftovers."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasc_draft.files import unfinished_files, whole_file

_KILLED = """
import os, signal, sys
from pathlib import Path
from tasc_draft.files import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write(b"new" * 10_000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file[1].json"
    path.write_bytes(b"old")
    return path


@pytest.mark.parametrize("sync", [True, False])
def test_file_is_replaced_at_the_end_of_the_block(path: Path, sync: bool) -> None:
    with whole_file(path, sync=sync) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert len(unfinished_files(path)) == 1
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_killed_writer_leaves_the_old_file_and_its_partial_file_is_removed_later(
    path: Path,
) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (left,) = unfinished_files(path)
    with whole_file(path) as file:
        file.write(b"new")
    assert unfinished_files(path) == [left], "its writer may be alive"
    long_ago = time.time() - 90_000
    os.utime(left, (long_ago, long_ago))
    with whole_file(path) as file:
        file.write(b"newer")
    assert list(path.parent.iterdir()) == [path]


def test_error_in_the_block_keeps_the_old_file(path: Path) -> None:
    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_concurrent_writers_do_not_mix_their_content(path: Path) -> None:
    def write(i: int) -> bytes:
        content = bytes([i]) * 200_000
        with whole_file(path, sync=False) as file:
            for start in range(0, len(content), 1000):
                file.write(content[start : start + 1000])
                file.flush()
        return path.read_bytes()

    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(write, range(16)):
            assert len(found) == 200_000
            assert len(set(found)) == 1
    assert list(path.parent.iterdir()) == [path]
