"""What a stage has found so far, in a file that outlives it; and where a run takes place."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Here:
    """A run: the folder its stages share, and whether it only goes through the motions."""

    folder: Path
    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def dtype(self) -> str:
        """What is timed."""
        return "float32" if self.dry else "bfloat16"

    def __call__(self, usual: int, dry: int) -> int:
        """A size."""
        return dry if self.dry else usual


class Found:
    """One stage's figures; each is written when it is there."""

    def __init__(self, here: Here, stage: str) -> None:
        self._file = _file(here, stage)
        self._found: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self._found[key] = value
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._found), encoding="utf-8")
        partial.replace(self._file)

    @staticmethod
    def read(here: Here, stage: str) -> dict[str, Any]:
        """What a stage had found; empty where it found nothing."""
        file = _file(here, stage)
        found: dict[str, Any] = json.loads(
            file.read_text(encoding="utf-8") if file.exists() else "{}"
        )
        return found


def _file(here: Here, stage: str) -> Path:
    return here.folder / f"{stage}.json"
