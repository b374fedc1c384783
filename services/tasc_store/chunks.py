"""Long byte strings in Redis as numbered pieces. It knows no task, version or pointer."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import redis

# Pieces nobody makes permanent within this time go away by themselves.
UNSEALED_S = 3600


@dataclass
class Sum:
    """Running size in bytes and SHA-256 of blocks."""

    size: int = 0
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def add(self, block: bytes) -> None:
        self.size += len(block)
        self._digest.update(block)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class ChunkError(Exception):
    """A piece is not there; the message says which of how many."""


def chunk_names(prefix: str, count: int) -> list[str]:
    """Keys of the pieces under a prefix, in order."""
    return [f"{prefix}:{i}" for i in range(count)]


def write_chunks(
    client: redis.Redis, prefix: str, file: BinaryIO, chunk_bytes: int
) -> tuple[int, Sum]:
    """Write a file's bytes as pieces that expire; their number and sum.

    Whatever stops it, the pieces written so far are removed: a server that became full by them
    would else stay full until they expire.
    """
    total, count = Sum(), 0
    try:
        while block := file.read(chunk_bytes):
            count += 1
            client.set(f"{prefix}:{count - 1}", block, ex=UNSEALED_S)
            total.add(block)
    except BaseException:
        remove_chunks(client, prefix, count)
        raise
    return count, total


def remove_chunks(client: redis.Redis, prefix: str, count: int) -> None:
    """Remove pieces if Redis still can; they expire if not."""
    with suppress(redis.RedisError):
        if count:
            client.unlink(*chunk_names(prefix, count))


def read_chunks(
    client: redis.Redis, prefix: str, count: int, sink: Callable[[bytes], object]
) -> Sum:
    """Hand each piece to ``sink`` in order; their sum.

    Raises:
        ChunkError: A piece is not there.
    """
    total = Sum()
    for i, name in enumerate(chunk_names(prefix, count)):
        block = client.get(name)
        if not isinstance(block, bytes):
            raise ChunkError(f"no chunk {i} of {count}")
        total.add(block)
        sink(block)
    return total
