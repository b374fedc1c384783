"""Where a task's target comes from: its folders here, and the device of this process."""

import torch

from tasc_engine import ModelSource
from tasc_store import TaskRecord
from tasc_text import resolve_folder


def device_of(device: str, gpus: float) -> str:
    """Resolve ``auto``: a GPU only if this process was given one, whatever else is visible."""
    if device != "auto":
        return device
    return "cuda" if gpus > 0 and torch.cuda.is_available() else "cpu"


def model_source(record: TaskRecord, device: str) -> ModelSource:
    """Local folders of a task's model and adapters."""
    return ModelSource(
        folder=resolve_folder(record.model, record.revision),
        adapter=resolve_folder(record.adapter) if record.adapter else None,
        dtype=record.dtype,
        device=device,
        quantization=record.quantization,
        adapters=tuple((name, resolve_folder(place)) for name, place in record.adapters),
    )
