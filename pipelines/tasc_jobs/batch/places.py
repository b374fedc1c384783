"""Files and folders by their URLs: on disks, in object stores, and on other file systems.

pyarrow reads and writes ``file``, ``s3``, ``gs``, ``abfs`` and ``hdfs``; fsspec the other schemes
for which a package is installed. A path without a scheme is on a disk.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable
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
    FSSpecHandler,
    LocalFileSystem,
    PyFileSystem,
)

from tasc_draft.files import whole_file
from tasc_runtime.errors import FileError

log = logging.getLogger(__name__)

_PAUSES_S = (1.0, 4.0, 16.0, None)  # between attempts, each of which pyarrow repeats for S3
_T = TypeVar("_T")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_PATTERN = re.compile(r"[*\[]")
_LASTING = re.compile(r"AWS Error (ACCESS_DENIED|NO_SUCH_|INVALID_|SIGNATURE_)")
_HIDDEN = ("_", ".")  # names that no reader takes for rows, such as _SUCCESS


def is_url(given: str) -> bool:
    return bool(_SCHEME.match(given))


def is_folder(output: str) -> bool:
    """Whether an output is a folder of parts, and not one file."""
    return is_url(output) or output.endswith("/") or Path(output).is_dir()


@dataclass(frozen=True)
class FileAt:
    """A file of an input, and its state when the job was planned.

    Attributes:
        name: Its path below the folder that was given, or else as it was given.
    """

    filesystem: FileSystem
    path: str
    name: str
    size: int
    mtime_ns: int | None

    def read(self, read: Callable[[Any], _T]) -> _T:
        """Opens the file and reads it, again if that fails.

        Raises:
            FileError: The file cannot be read, or it has changed.
        """
        return told(self.name, self._read, read)

    def _read(self, read: Callable[[Any], _T]) -> _T:
        found = self.filesystem.get_file_info(self.path)
        if (found.size, found.mtime_ns) != (self.size, self.mtime_ns):
            gone = "is gone" if found.size is None else "has changed"
            raise FileError(
                f"{self.name} {gone} since the job began; put the old file back and run the job "
                "again, which does the rest, or start again with --restart"
            )
        with self.filesystem.open_input_file(self.path) as file:
            return read(file)


@dataclass(frozen=True)
class Place:
    """A file, a folder or a pattern on a file system; ``shown`` is its URL without secrets."""

    filesystem: FileSystem
    path: str
    shown: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises FileError if no package reads such URLs."""
        if not is_url(url):
            return cls(LocalFileSystem(), str(Path(url).absolute()), url)
        scheme = url.partition(":")[0]
        try:
            filesystem, path = FileSystem.from_uri(url)
        except pa.ArrowInvalid:  # not one of pyarrow's schemes
            wrapped, path = told(f"{scheme} URLs", url_to_fs, url)
            filesystem = PyFileSystem(FSSpecHandler(wrapped))
        except OSError as error:
            raise FileError(f"cannot use {scheme} URLs: {error}") from error
        path = path.rstrip("/")
        return cls(filesystem, path, f"{scheme}://{path}")

    @property
    def is_local(self) -> bool:
        return str(self.filesystem.type_name) == "local"

    def make(self) -> None:
        """Makes the folder; object stores need none, but their bucket must exist."""
        if self.filesystem.type_name == "s3":
            told(self.shown, self.filesystem.get_file_info, FileSelector(self.path.split("/")[0]))
        else:
            told(self.shown, self.filesystem.create_dir, self.path)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if it does not exist."""
        return told(f"{self.shown}/{name}", self._read, f"{self.path}/{name}")

    def _read(self, path: str) -> bytes | None:
        with suppress(FileNotFoundError), self.filesystem.open_input_file(path) as file:
            return bytes(file.read())
        return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, which nobody sees before it is complete."""
        told(f"{self.shown}/{name}", self._write, f"{self.path}/{name}", content)

    def _write(self, path: str, content: bytes) -> None:
        if self.is_local:
            Path(path).parent.mkdir(exist_ok=True)
            with whole_file(Path(path)) as file:
                file.write(content)
        else:
            with self.filesystem.open_output_stream(path) as stream:
                stream.write(content)

    def names(self) -> set[str]:
        """Returns the paths of all files in the folder and its folders."""
        return {info.path.removeprefix(f"{self.path}/") for info in self._inside()}

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            told(self.shown, self.filesystem.delete_file, f"{self.path}/{name}")

    def files(self, suffixes: tuple[str, ...]) -> list[FileAt]:
        """Returns the file at this place, or those of a folder or a pattern, sorted.

        Raises:
            FileError: There is no such file, or the file system cannot be read.
        """
        if pattern := _PATTERN.search(self.path):
            base = self.path[: pattern.start()].rpartition("/")[0]
            paths = told(self.shown, ArrowFSWrapper(self.filesystem).glob, self.path)
            found = told(self.shown, self.filesystem.get_file_info, sorted(paths))
        else:
            base, found = self.path, [told(self.shown, self.filesystem.get_file_info, self.path)]
            if not found[0].is_file:
                found = sorted(self._inside(), key=lambda info: info.path)
        files = [
            FileAt(
                self.filesystem, i.path, i.path[len(base) + 1 :] or self.shown, i.size, i.mtime_ns
            )
            for i in found
            if i.is_file and (i.path == base or _is_rows(i.path[len(base) :], suffixes))
        ]
        if not files:
            raise FileError(
                f"{self.shown} has no {' or '.join(suffixes)} file; correct the path or the pattern"
            )
        return files

    def _inside(self) -> list[FileInfo]:
        everything = FileSelector(self.path, recursive=True, allow_not_found=True)
        found = told(self.shown, self.filesystem.get_file_info, everything)
        return [info for info in found if info.is_file]


def told(where: str, call: Callable[..., _T], *args: Any) -> _T:
    """Calls a function of a file system, again if it fails; its error names the place.

    Raises:
        FileError: All attempts failed.
    """
    for pause in _PAUSES_S:
        try:
            return call(*args)
        except (OSError, pa.ArrowException, ValueError, ImportError) as error:
            lasting = not isinstance(error, OSError) or error.errno or _LASTING.search(str(error))
            if pause is None or lasting:
                raise FileError(f"cannot use {where}: {error}") from error
            log.warning("%s: %s; again in %g s", where, error, pause)
            time.sleep(pause)
    raise AssertionError


def _is_rows(path: str, suffixes: tuple[str, ...]) -> bool:
    return path.endswith(suffixes) and not any(p.startswith(_HIDDEN) for p in path.split("/"))
