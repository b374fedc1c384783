"""How this package compiles its hot path: numba, cached on disk, without the interpreter lock.

numba keys its cache by the file a function is in, not by those it calls: after a change elsewhere
it would go on running old code. So each state of the package's sources has a cache of its own.
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


def _cache_dir() -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    home = folder / "__pycache__"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        home = Path(chosen)
    elif not os.access(home if home.is_dir() else folder, os.W_OK):
        home = Path.home() / ".cache" / "tasc-serve"
    own = home / f"compiled-{digest.hexdigest()[:16]}"
    _remove_unused(home, own)
    return str(own)


def _remove_unused(home: Path, own: Path) -> None:
    """Other states' caches go when no process has written to them for a day."""
    for other in home.glob("compiled-*"):
        with contextlib.suppress(OSError):
            if other != own and time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)


_KEPT_S = 86_400
_CACHE_DIR = _cache_dir()


def compiled(function: Callable[..., Any]) -> Any:
    """Compile at the first call with new types; later processes load the result."""
    return _jit(function)


def borrowing(function: Callable[..., Any]) -> Any:
    """Compile a function of the hot path, which may not allocate: no references are counted.

    Counting is atomic in numba, at each array that is named, and took half of a draft's time.
    """
    return _jit(function, _nrt=False)


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _CACHE_DIR
    try:
        return numba.njit(cache=True, nogil=True, boundscheck=False, **options)(function)
    finally:
        numba.config.CACHE_DIR = before
