"""The folder that `LLM.save` writes, and that `LLM.load` and `tasc task create --from` read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from tasc_draft import DraftIndex, read_index, write_index
from tasc_draft.files import whole_file
from tasc_draft.index.draft_index import INDEX_FILE
from tasc_runtime.data.rows import file_sha256
from tasc_runtime.engine_settings import EngineSettings, fault_of
from tasc_runtime.errors import ServiceError
from tasc_store import TaskRecord

_SAVED, _FORMAT = "llm.json", 1
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class SavedTask:
    """A task, the settings of its engine, and its draft index, without a copy of the model."""

    record: TaskRecord
    engine: EngineSettings
    index: DraftIndex

    def write(self, folder: str | Path) -> None:
        """Creates the folder if needed, and writes both files.

        Raises:
            OSError: The folder cannot be written.
        """
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        write_index(self.index, path / INDEX_FILE)
        saved = {
            "format": _FORMAT,
            "record": json.loads(self.record.to_json()),
            "engine": self.engine.model_dump(exclude_defaults=True),
            "index_sha256": file_sha256(path / INDEX_FILE),
        }
        with whole_file(path / _SAVED) as file:
            file.write(json.dumps(saved, indent=2).encode())

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether `write` wrote to a folder."""
        return (folder / _SAVED).is_file()

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Reads a folder that `write` wrote.

        Raises:
            ServiceError: The folder was not written by `write` of this version of the program, or
                is damaged.
        """
        path = Path(folder).expanduser() / _SAVED
        if not path.parent.is_dir():
            raise ServiceError(f"there is no folder {path.parent}; name one saved by LLM.save")
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved.get("format") != _FORMAT:
                raise ValueError(f"format is {saved.get('format')!r}, this program reads {_FORMAT}")
            record, engine = _settings(path, saved["record"], saved["engine"])
            if file_sha256(path.with_name(INDEX_FILE)) != saved["index_sha256"]:
                raise ValueError(f"{INDEX_FILE} belongs to another save, or is damaged")
            index = read_index(path.with_name(INDEX_FILE))
            index.check_integrity()
            if index.fingerprint != record.fingerprint:
                raise ValueError(f"its index is for the tokenizer {index.fingerprint}")
        except _UNREADABLE as error:
            raise ServiceError(
                f"{path} is not what LLM.save writes ({error}); name a folder that LLM.save "
                "wrote, or save the model again"
            ) from error
        return cls(record, engine, index)


def _settings(path: Path, record: Any, engine: Any) -> tuple[TaskRecord, EngineSettings]:
    try:
        return TaskRecord.from_json(json.dumps(record)), EngineSettings(**engine)
    except ValueError as error:
        why = fault_of(error) if isinstance(error, ValidationError) else error
        raise ServiceError(
            f"{path} was saved by another version of this program, or changed since ({why}); "
            "save the model again"
        ) from error
