"""The folder that `LLM.save` writes, and that `LLM.load` and `tasc task create --from` read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tasc_draft import DraftIndex, read_index, write_index
from tasc_runtime.data.rows import whole_file
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_store import TaskRecord

_SAVED, _INDEX, _FORMAT = "llm.json", "index.tasc", 1


@dataclass(frozen=True)
class SavedTask:
    """A task, the settings of its engine, and its draft index. The model is named, not copied."""

    record: TaskRecord
    engine: EngineSettings
    index: DraftIndex

    def write(self, folder: str | Path) -> None:
        """Make the folder if need be, and write both files."""
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        write_index(self.index, path / _INDEX)
        saved = {
            "format": _FORMAT,
            "record": json.loads(self.record.to_json()),
            "engine": self.engine.model_dump(exclude_defaults=True),
        }
        with whole_file(path / _SAVED) as file:
            file.write(json.dumps(saved, indent=2).encode())

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read what `write` wrote.

        Raises:
            ServiceError: It is no such folder, one of another version of this program, or damaged.
        """
        path = Path(folder).expanduser() / _SAVED
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved.get("format") != _FORMAT:
                raise ValueError(f"format is {saved.get('format')!r}, this program reads {_FORMAT}")
            record = TaskRecord.from_json(json.dumps(saved["record"]))
            engine = EngineSettings(**saved["engine"])
            index = read_index(path.with_name(_INDEX))
            index.check_integrity()
            if index.fingerprint != record.fingerprint:
                raise ValueError(f"its index is for the tokenizer {index.fingerprint}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServiceError(
                f"{path} is not what LLM.save writes ({error}); name a folder that it wrote, or "
                "save the model again"
            ) from error
        return cls(record, engine, index)
