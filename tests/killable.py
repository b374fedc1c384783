"""Processes that tests and benchmarks kill: a restartable Redis server, and child processes."""

import os
import subprocess
from pathlib import Path

import redis

from support import eventually, free_port
from tasc_store.embedded import redis_binaries


class RedisServer:
    """A Redis server on its own port; its data on disk survives a restart."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.host = folder, host
        self.port = free_port(host)
        self.url = f"redis://{host}:{self.port}/0"
        self.log = folder / "appendonly.aof"
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", self.host, "--dir", str(self.folder)]
        options += ["--protected-mode", "no"]  # otherwise it listens on loopback only
        durable = ["--save", "", "--appendonly", "yes", "--auto-aof-rewrite-percentage", "0"]
        command = [str(redis_binaries()[0]), *options, *durable, "--logfile", "redis.log"]
        self.process = subprocess.Popen(command)
        eventually(lambda: redis_answers(self.url))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def cut(self, size: int) -> int:
        """Discard all data after ``size`` bytes, like a failing machine; returns how many bytes."""
        there = self.log.stat().st_size
        os.truncate(self.log, min(size, there))
        return max(0, there - size)


def redis_answers(url: str) -> bool:
    with redis.Redis.from_url(url, retry=None) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def descendants(pid: int) -> dict[int, str]:
    """Returns the descendants of a process, and their commands."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
        parents.setdefault(parent, []).append(int(stat.parent.name))
    found, new = dict[int, str](), parents.get(pid, [])
    while new:
        for each in new:
            try:
                found[each] = Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        new = [child for each in new for child in parents.get(each, [])]
    return found


def pids(command: str, below: int | None = None) -> list[int]:
    """Returns the ids of descendants of this (or another) process with these words in a command."""
    found = descendants(os.getpid() if below is None else below)
    return [pid for pid, words in found.items() if command in words]
