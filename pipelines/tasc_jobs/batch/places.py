"""Files and folders by their URLs: on disks, in object stores, and on other file systems.

pyarrow reads and writes ``file``, ``s3``, ``gs``, ``abfs`` and ``hdfs``; fsspec the other schemes
for which a package is installed. A path without a scheme is on a disk.
"""

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
from fsspec.core import url_to_fs
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow.fs import (
    FileInfo,
    FileSelector,
    FileSystem,
    FileType,
    FSSpecHandler,
    LocalFileSystem,
    PyFileSystem,
)

from tasc_draft.files import whole_file
from tasc_runtime.errors import FileError

log = logging.getLogger(__name__)

_PAUSES_S = (1.0, 4.0, 16.0, None)  # between attempts, each of which pyarrow repeats for S3
_DELETERS = 16  # threads
_T = TypeVar("_T")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_PATTERN = re.compile(r"[*\[]")
# Errors that another attempt would meet again.
_LASTING = re.compile(r"AWS Error (ACCESS_DENIED|NO_SUCH_|INVALID_|SIGNATURE_)")
_LASTING_TYPES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_LASTING_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EEXIST)


def is_url(given: str) -> bool:
    return bool(_SCHEME.match(given))


def is_folder(output: str) -> bool:
    """Whether an output is a folder of parts, and not one file."""
    return is_url(output) or output.endswith("/") or Path(output).is_dir()


def is_hidden(path: str) -> bool:
    """Whether readers leave a file out, such as ``_SUCCESS`` or a file in ``.git``."""
    return any(name.startswith(("_", ".")) for name in path.split("/"))


@dataclass(frozen=True)
class FileAt:
    """A file of an input, and its state when the job was planned.

    Attributes:
        name: Its path below the folder that was given, or else as it was given.
        changed: When it was changed last; in seconds in object stores, whose listings are more
            exact than their answers for one file.
    """

    filesystem: FileSystem
    path: str
    name: str
    size: int
    changed: int | None

    @classmethod
    def of(cls, filesystem: FileSystem, name: str, info: FileInfo) -> Self:
        return cls(filesystem, info.path, name, *_state(filesystem, info))

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    @property
    def key(self) -> tuple[str, str]:
        """Equal for equal files, also if links lead to them."""
        path = os.path.realpath(self.path) if self.is_local else self.path
        return self.filesystem.type_name, path

    def read(self, read: Callable[[Any], _T]) -> _T:
        """Opens the file and reads it, again if that fails.

        Raises:
            FileError: The file cannot be read, or it has changed.
        """
        return persisting(self.name, self._read, read)

    def _read(self, read: Callable[[Any], _T]) -> _T:
        self._require_same()
        with self.filesystem.open_input_file(self.path) as file:
            found = read(file)
        self._require_same()
        return found

    def _require_same(self) -> None:
        found = self.filesystem.get_file_info(self.path)
        if _state(self.filesystem, found) != (self.size, self.changed):
            raise FileError(
                f"{self.name} {'has changed' if found.is_file else 'is gone'} since the job began; "
                "put the old file back with its time (cp -p) and run the job again, which does the "
                "rest, or start again with --restart"
            )


def _state(filesystem: FileSystem, info: FileInfo) -> tuple[int, int | None]:
    exact = isinstance(filesystem, LocalFileSystem) or info.mtime_ns is None
    return info.size, info.mtime_ns if exact else info.mtime_ns // 10**9


@dataclass(frozen=True)
class Place:
    """A file, a folder or a pattern on a file system; ``shown`` is its URL without secrets."""

    filesystem: FileSystem
    path: str
    shown: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises FileError if no package reads such URLs, or if the URL cannot be read."""
        if not is_url(url):
            return cls(LocalFileSystem(), os.path.realpath(url), url.rstrip("/") or "/")
        scheme, _, rest = url.partition("://")
        try:
            filesystem, path = FileSystem.from_uri(f"{scheme.lower()}://{rest}")
        except pa.ArrowInvalid as error:
            if "Unrecognized filesystem type" not in str(error):
                raise FileError(
                    f"a URL of {scheme} cannot be read; encode characters such as blanks and "
                    "brackets by percents, and a / in a key"
                ) from None  # the cause has the URL, which may have a key
            wrapped, path = persisting(f"{scheme} URLs", url_to_fs, url)
            filesystem = PyFileSystem(FSSpecHandler(wrapped))
        except OSError as error:
            shown = rest.rpartition("@")[2].partition("?")[0]
            way_out = "check the bucket, the credentials and the endpoint (AWS_ENDPOINT_URL)"
            raise FileError(f"cannot use {scheme}://{shown}: {error}; {way_out}") from error
        if "://" in path:
            raise FileError(f"{scheme} has no folders of files; copy the files to a disk")
        path = path.rstrip("/")
        return cls(filesystem, path, f"{scheme}://{path}")

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    def make(self) -> None:
        """Makes the folder; object stores need none."""
        if self.filesystem.type_name != "s3":
            persisting(self.shown, self.filesystem.create_dir, self.path)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if it does not exist."""
        return persisting(f"{self.shown}/{name}", self._read, f"{self.path}/{name}")

    def _read(self, path: str) -> bytes | None:
        with suppress(FileNotFoundError), self.filesystem.open_input_file(path) as file:
            return bytes(file.read())
        return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, which nobody sees before it is complete, on disks and in S3."""
        persisting(f"{self.shown}/{name}", self._write, f"{self.path}/{name}", content)

    def _write(self, path: str, content: bytes) -> None:
        if self.is_local:
            file = Path(path)
            file.parent.mkdir(exist_ok=True)
            with whole_file(file) as partial:
                partial.write(content)
        else:
            with self.filesystem.open_output_stream(path) as stream:
                stream.write(content)

    def names(self) -> set[str]:
        """Returns the paths of all files in the folder and its folders."""
        return {info.path.removeprefix(f"{self.path}/") for info in self._inside()}

    def delete(self, names: Iterable[str]) -> None:
        """Deletes files, in no order."""

        def delete(name: str) -> None:
            persisting(self.shown, self.filesystem.delete_file, f"{self.path}/{name}")

        with ThreadPoolExecutor(_DELETERS) as pool:
            list(pool.map(delete, names))  # raises the errors

    def files(self, suffixes: tuple[str, ...]) -> list[FileAt]:
        """Returns the file at this place, or those of a folder or a pattern, sorted.

        Raises:
            FileError: There is no such file, or the file system cannot be read.
        """
        here = persisting(self.shown, self.filesystem.get_file_info, self.path)
        base, found = self.path, [here] if here.is_file else self._inside()
        if not found and (pattern := _PATTERN.search(self.path)):
            base = self.path[: pattern.start()].rpartition("/")[0]
            paths = persisting(self.shown, ArrowFSWrapper(self.filesystem).glob, self.path)
            found = persisting(self.shown, self.filesystem.get_file_info, list(paths))
        files = [
            FileAt.of(self.filesystem, info.path[len(base) + 1 :] or self.shown, info)
            for info in sorted(found, key=lambda info: str(info.path))
            if info.path == base or _is_rows(info, info.path[len(base) :], suffixes)
        ]
        if not files:
            is_there = found or here.type == FileType.Directory
            has = f"has no {' or '.join(suffixes)} file" if is_there else "does not exist"
            raise FileError(f"{self.shown} {has}; correct the path or the pattern")
        return files

    def _inside(self) -> list[FileInfo]:
        everything = FileSelector(self.path, recursive=True, allow_not_found=True)
        found = persisting(self.shown, self.filesystem.get_file_info, everything)
        return [info for info in found if info.is_file]


def _is_rows(info: FileInfo, path: str, suffixes: tuple[str, ...]) -> bool:
    return bool(info.is_file) and path.endswith(suffixes) and not is_hidden(path)


def persisting(where: str, call: Callable[..., _T], *args: Any) -> _T:
    """Calls a function of a file system, again if it fails; its error names the place.

    Raises:
        FileError: All attempts failed.
    """
    for pause in _PAUSES_S:
        try:
            return call(*args)
        except (OSError, pa.ArrowException, ValueError, ImportError) as error:
            if pause is None or _is_lasting(error):
                raise FileError(f"cannot use {where}: {error}") from error
            log.warning("%s: %s; again in %g s", where, error, pause)
            time.sleep(pause)
    raise AssertionError


def _is_lasting(error: Exception) -> bool:
    if not isinstance(error, OSError) or isinstance(error, _LASTING_TYPES):
        return True
    return error.errno in _LASTING_NUMBERS or bool(_LASTING.search(str(error)))
