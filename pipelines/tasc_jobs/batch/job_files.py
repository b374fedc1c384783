"""Which files a batch job reads and writes, checked before anything slow begins.

It reads no rows and imports nothing heavy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasc_runtime.errors import FileError
from tasc_runtime.rows import SUFFIXES, check_file

REDIS = "redis:"  # in front of a task's name, in place of a file
_JSON = ("", ".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    Attributes:
        given: Files and folders, or one ``redis:TASK``.
    """

    given: tuple[str, ...]
    input_field: str = "input"
    id_field: str = "id"

    @classmethod
    def of(cls, *paths: Path | str, **fields: str) -> "Source":
        return cls(tuple(map(str, paths)), **fields)

    @property
    def files(self) -> list[Path]:
        """Files and folders; none of a corpus."""
        return [] if self._is_corpus else [Path(one) for one in self.given]

    @property
    def _is_corpus(self) -> bool:
        return any(one.startswith(REDIS) for one in self.given)

    def check(self) -> None:
        """Raises FileError: a corpus is to be read together with something else."""
        if self._is_corpus and len(self.given) > 1:
            raise FileError(f"{' and '.join(self.given)}: a corpus is read alone; name one input")


def job_folder(output: Path) -> Path:
    """Where the state of a job with this output is."""
    return output.with_name(output.name + ".job")


def check_output(path: Path) -> None:
    """Raise FileError for a suffix that is not known, or where nothing can be written."""
    if path.is_dir():
        raise FileError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileError(f"there is no folder {path.parent}; make it or name another")
    if path.suffix not in (*_JSON, ".parquet"):
        raise FileError(f"{path} is neither .jsonl nor .parquet; name it so")


def reject_file(output: Path) -> Path:
    """Where rejects go if nobody says."""
    return output.with_name(f"{output.stem}.rejected.jsonl")


def files_of(given: Sequence[Path]) -> list[tuple[str, Path]]:
    """Files, those of folders sorted by name, each with what it is called.

    Raises:
        FileError: One is not there, a folder has none, or one is named twice.
    """
    found: dict[Path, str] = {}
    for path in given:
        if not path.exists():
            raise FileError(f"cannot read rows from {path}: it is not there; correct its name")
        inside = [p for p in sorted(path.iterdir()) if _is_rows(p)] if path.is_dir() else [path]
        if not inside:
            raise FileError(f"folder {path} has no {', '.join(SUFFIXES)}; name one that has")
        for file in inside:
            if file.resolve() in found:
                raise FileError(f"{file} is named twice; its rows can be answered once")
            found[file.resolve()] = str(file.relative_to(path)) if path.is_dir() else str(file)
    names = list(found.values())
    if double := next((name for name in names if names.count(name) > 1), None):
        raise FileError(f"two folders have a file {double}; rename one, or name one folder")
    return [(name, path) for path, name in found.items()]


def check_files(given: Sequence[Path], input_field: str, written: Sequence[Path]) -> None:
    """Look at the beginning of each file, and that none of them, nor their folder, is written to.

    Raises:
        FileError: One cannot be read as what its suffix says, or would be an output too.
    """
    for _, path in files_of(given):
        check_file(path, (input_field,))
    check_written(given, written)


def check_written(given: Sequence[Path], written: Sequence[Path]) -> None:
    """Raise FileError for a file that is to be read, or lies in a folder that is, and written."""
    for path in written:
        for one in given:
            if path.resolve() == one.resolve():
                raise FileError(f"{one} is to be read and to be written; name another output")
            if one.is_dir() and path.resolve().parent == one.resolve():
                raise FileError(f"{path} would lie in {one}, which is read; name another output")


def _is_rows(path: Path) -> bool:
    return path.is_file() and path.name.endswith(SUFFIXES) and not path.name.startswith(".")
