"""Files of named arrays: ``.npz`` without pickle."""

import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tasc_draft.drafts import DraftError
from tasc_draft.files import whole_file

_DAMAGES = (KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def write_arrays(
    path: Path, arrays: Mapping[str, Any], save: Callable[..., None] = np.savez
) -> None:
    """Writes a file with ``save``. The file appears at ``path`` once it is complete."""
    with whole_file(path, sync=False) as file:
        save(file, **arrays)


def read_arrays(path: Path, names: Iterable[str], kind: str, make: str) -> dict[str, Any]:
    """Read a file's arrays with these names.

    Args:
        kind: Kind of the file, for messages.
        make: How to make such a file, for messages.

    Raises:
        DraftError: The file is missing or damaged, or lacks an array.
    """
    try:
        with path.open("rb") as file:  # numpy does not close a damaged file
            if not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("it is not an .npz archive")
            file.seek(0)
            with np.load(file, allow_pickle=False) as content:
                return {name: content[name] for name in names}
    except OSError as error:
        raise DraftError(f"{path} cannot be read: {error.strerror or error}; {make}") from error
    except _DAMAGES as error:
        raise DraftError(f"{path} is damaged or not {kind} ({error}); {make}") from error
