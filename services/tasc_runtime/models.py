"""What is known of a task's model without loading it: its name and its tokenizer. No torch."""

from pathlib import Path

from tasc_runtime.errors import ServiceError
from tasc_store import TaskRecord
from tasc_text import TaskTokenizer, resolve_folder


def load_tokenizer(record: TaskRecord) -> TaskTokenizer:
    """The tokenizer of a task's model.

    Raises:
        ServiceError: It is not the one the task was registered with.
        TextError: It cannot be loaded.
    """
    folder = resolve_folder(record.model, record.revision, weights=False)
    tokenizer = TaskTokenizer.from_folder(folder)
    if tokenizer.fingerprint != record.fingerprint:
        raise ServiceError(
            f"task {record.name} was registered with tokenizer {record.fingerprint}, {folder} has "
            f"{tokenizer.fingerprint}; register the task again"
        )
    return tokenizer


def model_name(record: TaskRecord) -> str:
    """A target's name for people: a hub name as it is, a folder's last part."""
    return Path(record.model).name if Path(record.model).is_absolute() else record.model
