"""How hot paths are compiled: numba, cached on disk, without the interpreter lock.

numba keys its cache by the file a function is in, not by those it calls: after a change elsewhere
it would go on running old code. So each state of a package's sources has a cache of its own.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_KEPT_S = 86_400


class Compiler:
    """Compiles functions, at the first call with new types. Later processes load the result.

    Args:
        folders: The sources of all functions that it compiles and of all that those call. The
            cache lies in the first.
    """

    def __init__(self, *folders: Path) -> None:
        self._cache_dir = str(_cache_dir(folders))

    def compiled(self, function: Callable[..., Any]) -> Any:
        return self._jit(function)

    def borrowing(self, function: Callable[..., Any]) -> Any:
        """Compile a function of the hot path, which may not allocate: no references are counted.

        Counting is atomic in numba, at each array that is named, and took half of a draft's time.
        """
        return self._jit(function, _nrt=False)

    def arithmetic(self, function: Callable[..., Any]) -> Any:
        """Compile a borrowing function whose sums may be taken in any order; NaN stays NaN."""
        return self._jit(
            function, _nrt=False, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
        )

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = self._cache_dir
        try:
            return numba.njit(cache=True, nogil=True, boundscheck=False, **options)(function)
        finally:
            numba.config.CACHE_DIR = before


def digest_of(*folders: Path) -> str:
    """Of the sources in some folders."""
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
        home = Path.home() / ".cache" / "tasc-serve"
    how = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]  # options are no key of numba
    own = home / f"compiled-{folder.name}-{digest_of(*folders)}-{how}"
    _remove_unused(own, f"compiled-{folder.name}-*")
    return own


def _remove_unused(own: Path, states: str) -> None:
    """Caches of a package's other states go when no process has begun with them for a day."""
    with contextlib.suppress(OSError):
        os.utime(own)
    for other in own.parent.glob(states):
        with contextlib.suppress(OSError):
            if other != own and time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)


_own = Compiler(Path(__file__).parent)
compiled, borrowing = _own.compiled, _own.borrowing
