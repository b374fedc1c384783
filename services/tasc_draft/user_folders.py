"""Folders for files of a user, by the XDG Base Directory Specification."""

import os
from pathlib import Path

_OURS = "tasc-serve"


def cache_folder() -> Path:
    """Folder for files that can be recreated: in XDG_CACHE_HOME, by default ``~/.cache``."""
    return _home("XDG_CACHE_HOME", ".cache") / _OURS


def data_folder() -> Path:
    """Folder for permanent files: in XDG_DATA_HOME, by default ``~/.local/share``."""
    return _home("XDG_DATA_HOME", ".local/share") / _OURS


def _home(variable: str, usual: str) -> Path:
    # The specification: an empty variable is unset, and a relative path is ignored.
    chosen = Path(os.environ.get(variable, ""))
    return chosen if chosen.is_absolute() else Path.home() / usual
