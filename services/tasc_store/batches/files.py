"""Uploaded files and outputs of batches: bytes on an fsspec file system, records in Redis.

A file exists once its record is in Redis. The bytes are written before the record, so that no
process reads half a file. `FileStore.clean` removes bytes that belong to no record. This module
does not interpret the content of files.
"""

import errno
import hashlib
import io
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import fsspec
import redis
from fsspec.implementations.local import LocalFileSystem
from redis.client import Pipeline

from tasc_store import keys
from tasc_store.artifacts import UNSEALED_S, verified
from tasc_store.client import as_text, redact
from tasc_store.errors import (
    CorruptArtifact,
    FileInUse,
    FilesFull,
    FilesNotShared,
    StoreError,
    StoreFull,
    UnknownFile,
)

RECORDS: Final = keys.shared_key("file-records")
HELD: Final = keys.shared_key("held")  # number of unfinished batches that read a file, by file id
_FOLDER: Final = keys.shared_key("files-folder")
_MARKER: Final = "marker"
_BLOCK_BYTES: Final = 8 * 1024 * 1024  # S3 accepts no parts below 5 MiB
# How long the bytes of an expired file are kept, for its last readers and because clocks differ.
_GRACE_S: Final = 600
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class _Listed(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_Listed)


@dataclass(frozen=True)
class Page(Generic[Item]):
    """A part of a list, and whether more items follow."""

    items: tuple[Item, ...]
    has_more: bool

    @classmethod
    def of(
        cls, items: Iterable[Item], after: str, limit: int, *, oldest_first: bool = False
    ) -> "Page[Item]":
        """Returns the items that follow the id ``after``, even if that item no longer exists.

        Args:
            after: The id; empty: from the beginning.
        """
        found = [
            item
            for item in sorted(items, key=lambda item: item.id, reverse=not oldest_first)
            if not after or (item.id > after if oldest_first else item.id < after)
        ]
        return cls(tuple(found[:limit]), len(found) > limit)


def new_id(prefix: str, now: float | None = None) -> str:
    """Makes an id that cannot be guessed; later ids sort after earlier ones."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{prefix}-{milliseconds:011x}{secrets.token_hex(8)}"


def _created_at(id_: str) -> float:
    """Returns the time at which `new_id` made an id; infinity for other texts."""
    try:
        return int(id_.partition("-")[2][:11], 16) / 1000
    except ValueError:
        return float("inf")


@dataclass(frozen=True)
class StoredFile:
    """The record of one file.

    Attributes:
        purpose: Purpose of the upload; ``batch_output`` for files that a batch wrote.
        sha256: SHA-256 of the whole file, hexadecimal.
        created_at: Seconds since the epoch; so is ``expires_at``, the time when the file expires.
        owner: Owner of the file; empty if users are not distinguished.
        lines: Number of lines, including blank lines.
    """

    id: str
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    created_at: int
    expires_at: int
    owner: str = ""
    lines: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class FileLimits:
    """Maximum number and total bytes of all files, including a new file.

    Output files of batches count, but are always accepted, so accepted batches may exceed the
    limits. One owner may have half of each limit, and always at least one file.
    """

    max_files: int
    max_bytes: int

    def require_room(self, files: Iterable[StoredFile], size: int, owner: str) -> None:
        """Raises FilesFull if there is no room for a further file of ``size`` bytes."""
        files = [*files]
        total = size + sum(file.size_bytes for file in files)
        own = [file.size_bytes for file in files if owner and file.owner == owner]
        if len(files) >= self.max_files:
            found = f"there are {self.max_files} files, which is the limit"
        elif total > self.max_bytes:
            found = f"files would have more than {self.max_bytes} bytes together"
        elif own and len(own) >= self.max_files / 2:
            found = f"this key has half of the {self.max_files} files that are kept"
        elif own and size + sum(own) > self.max_bytes / 2:
            found = f"files of this key would have more than half of {self.max_bytes} bytes"
        else:
            return
        raise FilesFull(f"{found}; delete some, or wait until some expire")


class Upload:
    """An upload into the store. Its bytes are removed after a while unless `keep` is called.

    Use it from one thread at a time, except that `abandon` may be called while another thread
    writes. Every method except `abandon` raises `StoreError` if the bytes cannot be stored.
    """

    def __init__(self, store: "FileStore") -> None:
        self.id = new_id("file")
        self.size_bytes = 0
        self._store = store
        self._lock = threading.Lock()
        self._file: Any = None
        self._digest = hashlib.sha256()
        self._line_ends, self._open_line = 0, False
        self._abandoned = False

    def write(self, data: bytes) -> None:
        with self._lock, self._store.translated():
            if self._abandoned:
                return
            if self._file is None:
                self._file = self._store.open(self.id, "wb")
            self._file.write(data)
        self.size_bytes += len(data)
        self._digest.update(data)
        self._line_ends += data.count(b"\n")
        self._open_line = not data.endswith(b"\n") if data else self._open_line

    def keep(
        self, limits: FileLimits, filename: str, purpose: str, ttl_s: float, owner: str = ""
    ) -> StoredFile:
        """Makes a file of all written bytes.

        Raises:
            ValueError: Nothing was written.
            FilesFull: There is no room for the file.
        """
        if not self.size_bytes:
            raise ValueError("the file is empty; there is nothing to keep")
        try:
            file = self.end(filename, purpose, ttl_s, owner)
        except StoreError:
            self.abandon()
            raise
        try:
            self._store.add(file, limits)
        except FilesFull:  # not after other errors: Redis may have the record
            self.abandon()
            raise
        return file

    def end(self, filename: str, purpose: str, ttl_s: float, owner: str = "") -> StoredFile:
        """Completes the bytes; returns a record that is not stored yet.

        Raises:
            StoreError: The upload took almost an hour (after an hour, `FileStore.clean` may remove
                it), or not all bytes were stored.
        """
        if time.time() > _created_at(self.id) + UNSEALED_S - _GRACE_S:
            raise StoreError(
                f"the upload took more than {UNSEALED_S - _GRACE_S} s; send it faster, or in parts"
            )
        with self._lock, self._store.translated():
            self._file.flush()
            with suppress(io.UnsupportedOperation):  # a bucket has no file descriptors
                os.fsync(self._file.fileno())
            self._file.close()
        if (found := self._store.size_of(self.id)) != self.size_bytes:
            raise StoreError(
                f"{found} of {self.size_bytes} bytes were stored; the upload was "
                "removed: send it again"
            )
        now = time.time()
        return StoredFile(
            id=self.id,
            filename=filename,
            purpose=purpose,
            size_bytes=self.size_bytes,
            sha256=self._digest.hexdigest(),
            created_at=int(now),
            expires_at=int(now + ttl_s),
            owner=owner,
            lines=self._line_ends + self._open_line,
        )

    def abandon(self) -> None:
        """Removes the written bytes. If this fails, `FileStore.clean` removes them later."""
        with self._lock:
            self._abandoned = True
            if self._file is not None:
                with suppress(Exception):  # in a bucket, this stores the file; it is removed below
                    self._file.close()
                with suppress(StoreError):
                    self._store.remove(self.id)


class FileStore:
    """All files. Every method raises `StoreError` when Redis or the file system fails.

    Files are in a folder named by Redis, so that several stores may share one URL. The folder has a
    marker: a process that does not see the marker uses another disk than its creator.

    Args:
        url: A folder, or any URL of fsspec, such as ``s3://bucket/files``. All processes that use
            files of the same Redis must see the same files there.
    """

    def __init__(self, client: redis.Redis, url: str) -> None:
        self._url, self._client = url, client
        self._checked_folder = ""

    def require_shared(self) -> None:
        """Raises FilesNotShared if this process does not see the files of other processes."""
        with self.translated():
            self._at("")

    def begin(self) -> Upload:
        return Upload(self)

    def require_room(self, limits: FileLimits, owner: str = "") -> None:
        """Raises FilesFull if there is no room for another file, even for one byte."""
        limits.require_room(self._files(), 1, owner)

    def add(self, file: StoredFile, limits: FileLimits) -> None:
        """Stores the record of a file whose bytes are complete. May be repeated.

        Raises:
            FilesFull: There is no room for the file.
        """

        def change(pipe: Pipeline) -> None:
            if not pipe.hexists(RECORDS, file.id):
                limits.require_room(self._files(pipe), file.size_bytes, file.owner)
                pipe.multi()
                pipe.hset(RECORDS, file.id, file.to_json())

        self._client.transaction(change, RECORDS)

    def get(self, id_: str) -> StoredFile:
        """Returns a file's record; raises UnknownFile if it does not exist or has expired."""
        text = self._client.hget(RECORDS, id_)
        file = None if text is None else _parsed(text)
        if file is None or file.expires_at <= time.time():
            raise UnknownFile(f"there is no file {id_[:64]!r}; it was deleted, or has expired")
        return file

    def page(
        self,
        *,
        after: str = "",
        limit: int = 100,
        oldest_first: bool = False,
        wanted: Callable[[StoredFile], bool] = lambda file: True,
    ) -> Page[StoredFile]:
        """Returns the files that follow the file with id ``after``, even if it no longer exists."""
        return Page.of(filter(wanted, self._files()), after, limit, oldest_first=oldest_first)

    def delete(self, id_: str) -> None:
        """Deletes a file; raises UnknownFile, or FileInUse if an unfinished batch reads it."""

        def change(pipe: Pipeline) -> None:
            if pipe.hexists(HELD, id_):
                raise FileInUse(
                    f"file {id_} is read by a batch that has not ended; cancel the batch first"
                )
            pipe.multi()
            pipe.hdel(RECORDS, id_)

        self.get(id_)
        self.require_shared()
        self._client.transaction(change, RECORDS, HELD)
        self.remove(id_)

    def head(self, file: StoredFile, count: int) -> bytes:
        """Returns the first bytes of a file; raises CorruptArtifact if its bytes are missing."""
        with self._reading(file) as stored, self.translated():
            return bytes(stored.read(count))

    def blocks(self, file: StoredFile) -> Iterator[bytes]:
        """Yields a file's bytes, block by block.

        Raises:
            CorruptArtifact: The bytes are missing. Raised after the last block if the bytes differ
                from the written ones.
        """

        def read() -> Iterator[bytes]:
            with self._reading(file) as stored:
                while block := self._block(stored):
                    yield block

        return verified(read(), file.size_bytes, file.sha256, partial(_damaged, file))

    def clean(self) -> None:
        """Removes the bytes of expired files and of uploads that were never completed."""
        with self.translated():
            filesystem, folder = self._at("")
            names = [path.rpartition("/")[2] for path in filesystem.ls(folder, detail=False)]
        now, files = time.time(), {file.id: file for file in self._files(expired=True)}
        if ended := [id_ for id_, file in files.items() if file.expires_at + _GRACE_S < now]:
            self._client.hdel(RECORDS, *ended)
        for name in names:
            file = files.get(name)
            end = file.expires_at + _GRACE_S if file else _created_at(name) + UNSEALED_S
            if end < now:
                with suppress(StoreError):  # the next call tries again; go on with other files
                    self.remove(name)

    def open(self, id_: str, mode: str) -> Any:
        """Opens the bytes of an id. Call this within `FileStore.translated`."""
        filesystem, path = self._at(id_)
        return filesystem.open(path, mode, block_size=_BLOCK_BYTES)

    def size_of(self, id_: str) -> int:
        """Number of bytes stored under an id, whether or not the id has a record."""
        with self.translated(), suppress(FileNotFoundError):
            filesystem, path = self._at(id_)
            return int(filesystem.size(path) or 0)
        return 0

    def remove(self, id_: str) -> None:
        """Removes the bytes of an id, if there are any."""
        with self.translated(), suppress(FileNotFoundError):
            filesystem, path = self._at(id_)
            filesystem.rm_file(path)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Converts errors of the file system to `StoreError`."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # each file system has different errors
            place = f"the storage of uploaded files, {redact(self._url)},"
            if isinstance(error, OSError) and error.errno in _FULL:
                raise StoreFull(f"{place} is full: {error}") from error
            raise StoreError(
                f"{place} cannot be used: {error!r}; check files_url, its permissions and the "
                "packages that it needs"
            ) from error

    @contextmanager
    def _reading(self, file: StoredFile) -> Iterator[Any]:
        with self.translated():
            try:
                stored = self.open(file.id, "rb")
            except FileNotFoundError as error:
                raise _damaged(file, "no bytes") from error
        with stored:
            yield stored

    def _block(self, stored: Any) -> bytes:
        with self.translated():
            return bytes(stored.read(_BLOCK_BYTES))

    def _at(self, name: str) -> tuple[Any, str]:
        """Returns the file system and a path in the folder that Redis names.

        The folder is checked at its first use, and when Redis names another folder.
        """
        # A cached listing would hide the files of other processes.
        filesystem, root = fsspec.url_to_fs(self._url, use_listings_cache=False)
        found = self._client.get(_FOLDER)
        folder = json.loads(found or self._made(filesystem, root))
        path = f"{root}/{folder['name']}"
        if folder["name"] != self._checked_folder:
            if not filesystem.exists(f"{path}/{_MARKER}"):
                raise FilesNotShared(
                    f"{redact(self._url)} on {socket.gethostname()} does not have the files of "
                    f"this Redis, which are in {folder['url']} on {folder['host']}; set files_url "
                    "to a bucket or to a folder that all nodes and workers share, or, if those "
                    f"files are lost, delete the key {_FOLDER}"
                )
            self._checked_folder = folder["name"]
        return filesystem, f"{path}/{name}"

    def _made(self, filesystem: Any, root: str) -> bytes | str:
        """Makes the folder for this Redis, unless there is one; returns the folder's record."""
        name = secrets.token_hex(8)
        if isinstance(filesystem, LocalFileSystem):
            Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(root, name).mkdir(mode=0o700)  # uploads are for users of this service only
        filesystem.makedirs(f"{root}/{name}", exist_ok=True)
        filesystem.pipe_file(f"{root}/{name}/{_MARKER}", b"files of tasc-serve\n")
        folder = {"name": name, "url": redact(self._url), "host": socket.gethostname()}
        if not self._client.set(_FOLDER, json.dumps(folder), nx=True):
            filesystem.rm(f"{root}/{name}", recursive=True)
        return self._client.get(_FOLDER) or json.dumps(folder)

    def _files(self, client: Any = None, *, expired: bool = False) -> list[StoredFile]:
        texts = (client or self._client).hvals(RECORDS)
        files, now = [_parsed(text) for text in texts], time.time()
        return [file for file in files if expired or file.expires_at > now]


def _damaged(file: StoredFile, found: str) -> CorruptArtifact:
    return CorruptArtifact(f"file {file.id} is damaged or deleted (found {found}); upload it again")


def _parsed(text: bytes | str) -> StoredFile:
    return StoredFile(**json.loads(as_text(text)))
