"""Whether a drafter can draft for a task's model, by what its folder says; it loads no weights."""

from pathlib import Path

from tasc_engine.drafting.neural.card import fitting_card, target_fingerprint
from tasc_engine.errors import EngineError
from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.base_model import BaseModel
from tasc_store import NeuralDrafting, TaskRecord
from tasc_text import TextError, resolve_folder


def check_drafter(record: TaskRecord, model: BaseModel) -> None:
    """Check a record's drafter, if it has one.

    Raises:
        UsageError: There is no drafter, or it is another tokenizer's or another target's, or more
            ranked tokens are asked for than the tokenizer has.
    """
    neural = record.neural
    if neural is None:
        return
    size = model.tokenizer.vocab_size
    if neural.is_ranked and neural.ranked_tokens > size:
        raise UsageError(
            f"--ranked-tokens is {neural.ranked_tokens}, the tokenizer has {size}; give 1 to {size}"
        )
    _check_card(record, neural, model)


def _check_card(record: TaskRecord, neural: NeuralDrafting, model: BaseModel) -> None:
    folder = _folder(neural.drafter)
    try:
        adapter = resolve_folder(record.adapter) if record.adapter else None
        # Of a model of the hub the weights may not be here; the service looks when it loads them.
        weighed = any(model.folder.glob("*.safetensors"))
        target = target_fingerprint(model.folder, adapter) if weighed else None
        fitting_card(folder, model.tokenizer.fingerprint, target)
    except (ValueError, OSError, EngineError) as error:
        raise UsageError(f"--drafter {neural.drafter}: {error}") from error


def _folder(drafter: str) -> Path:
    try:
        return resolve_folder(drafter, weights=False)
    except TextError as error:
        raise UsageError(f"--drafter: {error}; `tasc train-drafter` writes such folders") from error
