"""Compiles hot paths with numba. The code is cached on disk and runs without the interpreter lock.

numba keys its cache by the file of the compiled function and does not notice changes in other files
that the function calls. So each state of a package's sources has its own cache folder.
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite.binding import ffi

from tasc_draft.files import cache_folder

_KEPT_S = 86_400


def _hide_dict() -> None:
    """Lets llvmlite's library object say that it has no ``__dict__``.

    The object answers any name with a function. vLLM 0.32 for CPUs, which reads the ``__dict__`` of
    all objects in modules, would not start after an import of numba.
    """
    kind: Any = type(ffi.lib)
    named = getattr(kind, "__getattr__", None)
    if named is None:  # another version, which may need no help
        return

    def get(lib: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return named(lib, name)

    kind.__getattr__ = get


_hide_dict()


class Compiler:
    """Compiles a function at its first call with new types. Later processes load the result.

    Args:
        folders: Folders with the sources of all compiled functions and of everything they call. The
            cache is kept in the first folder.
    """

    def __init__(self, *folders: Path) -> None:
        self._cache_dir = str(_cache_dir(folders))

    def compiled(self, function: Callable[..., Any]) -> Any:
        return self._jit(function)

    def borrowing(self, function: Callable[..., Any]) -> Any:
        """Compiles a function that does not allocate, without reference counting.

        By default, numba counts references with an atomic operation for each named array. These
        operations took half of the time of a draft.
        """
        return self._jit(function, _nrt=False)

    def arithmetic(self, function: Callable[..., Any]) -> Any:
        """Compile a borrowing function whose sums may be reordered; NaN is still honoured."""
        return self._jit(
            function, _nrt=False, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
        )

    def ordered(self, function: Callable[..., Any]) -> Any:
        """Compile like `arithmetic`, but round each sum and product, in the order of the source."""
        return self._jit(function, _nrt=False, error_model="numpy", fastmath={"nsz"})

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = self._cache_dir
        try:
            return numba.njit(cache=True, nogil=True, boundscheck=False, **options)(function)
        finally:
            numba.config.CACHE_DIR = before


def digest_of(*folders: Path) -> str:
    """A hash of all Python sources in some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_dir(folders: tuple[Path, ...]) -> Path:
    folder = folders[0]
    home = folder / "__pycache__"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        home = Path(chosen)
    elif not os.access(home if home.is_dir() else folder, os.W_OK):
        home = cache_folder()
    options = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]  # not in numba's key
    own = home / f"compiled-{folder.name}-{digest_of(*folders)}-{options}"
    _remove_unused(own, f"compiled-{folder.name}-*")
    return own


def _remove_unused(own: Path, states: str) -> None:
    """Remove caches of the package's other states that no process has opened for a day."""
    with contextlib.suppress(OSError):
        os.utime(own)
    for other in own.parent.glob(states):
        with contextlib.suppress(OSError):
            if other != own and time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)


def read_only(array: Any) -> Any:
    """A read-only view of an array.

    Arrays of a mapped file are read-only. numba compiles a function once per array type, so all
    arrays of an index are read-only, wherever they come from.
    """
    view = np.asarray(array).view()
    view.setflags(write=False)
    return view


def flat(kind: Any, *arrays: Any) -> bool:
    """Whether all arrays have one dimension and elements of type ``kind``."""
    return all(array.ndim == 1 and array.dtype == kind for array in arrays)


def within(values: Any, end: int) -> bool:
    """Whether all values are at least 0 and below ``end``."""
    return bool(((values >= 0) & (values < end)).all())


class IndexPart:
    """Base of the frozen dataclasses that make up an index. Makes their arrays read-only."""

    def __post_init__(self) -> None:
        for array in self.arrays.values():
            array.setflags(write=False)

    @property
    def arrays(self) -> dict[str, Any]:
        """The fields that are arrays, by name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        found = {field.name: getattr(self, field.name) for field in fields}
        return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


_own = Compiler(Path(__file__).parent)
compiled, borrowing = _own.compiled, _own.borrowing
