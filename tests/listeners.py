"""The sockets on which a process and its descendants listen, from Linux's /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

from killable import descendants

_LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
_LISTENS = "0A"


@dataclass(frozen=True)
class Listener:
    port: int
    loopback: bool


def family() -> set[int]:
    """Returns the ids of this process and its descendants."""
    return {os.getpid(), *descendants(os.getpid())}


def listeners(pids: set[int]) -> list[Listener]:
    sockets = {link for pid in pids for link in _links(pid) if link.startswith("socket:[")}
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    places = [
        fields[1].split(":")
        for fields in lines
        if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets
    ]
    return [Listener(int(port, 16), address in _LOOPBACK) for address, port in places]


def _links(pid: int) -> list[str]:
    try:
        return [os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []  # it ended while we looked
