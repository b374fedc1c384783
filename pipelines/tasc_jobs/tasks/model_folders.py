"""Checks of a task's folders without loading a model: base model, LoRA adapter and drafter.

The registration of a task reads settings, tokenizers and the headers of weight files, so that an
unusable folder is refused before a service loads it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tasc_engine.drafting.neural.card import fitting_card, target_fingerprint
from tasc_engine.errors import EngineError, UnsupportedModel
from tasc_engine.lora.adapter_folder import MERGE, settings_of
from tasc_engine.model.adapter_fit import require_fit, trained_ids
from tasc_engine.model.folder import (
    in_words,
    recurrent_state,
    require_model,
    require_model_alone,
)
from tasc_jobs.errors import UsageError
from tasc_store import NeuralDrafting, TaskRecord
from tasc_text import TaskTokenizer, TextError, resolve_folder
from tasc_text.tokenizer import FILE, open_to_encode

_CONFIG = "config.json"
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class BaseModel:
    """The settings of a model folder, without its weights.

    Attributes:
        vocab_size: Number of ids for which the model has logits; the tokenizer's size if the
            settings lack it.
        positions: Maximum tokens of prompt and answer; None if the settings lack it.
        quantized: Whether the folder's weights are quantised.
    """

    folder: Path
    tokenizer: TaskTokenizer
    vocab_size: int
    positions: int | None
    quantized: bool

    @classmethod
    def open(cls, model: str, revision: str | None) -> Self:
        """Find a model; see `read`. Raises UsageError instead of the errors of `read`."""
        try:
            return cls.read(model, revision)
        except (ValueError, OSError, UnsupportedModel) as error:
            raise UsageError(f"--model: {error}") from error

    @classmethod
    def read(cls, model: str, revision: str | None = None) -> Self:
        """Find a model. Only settings and tokenizer of a model on the hub are downloaded.

        Raises:
            ValueError, OSError, UnsupportedModel: The model does not exist, has another format,
                lacks a tokenizer or ``config.json``, has an adapter beside its weights, is an
                encoder-decoder, or has a recurrent state.
        """
        folder = resolve_folder(model, revision, weights=False)
        require_model(folder)
        require_model_alone(folder)
        tokenizer = TaskTokenizer.from_folder(folder)
        config = model_settings(folder / _CONFIG)
        if config.get("is_encoder_decoder"):
            raise UnsupportedModel(
                f"{config.get('model_type')} is an encoder-decoder; name a causal LM"
            )
        if state := recurrent_state(config):
            raise UnsupportedModel(in_words(state))
        vocab_size = config.get("vocab_size") or tokenizer.vocab_size
        positions = next((config[name] for name in _POSITIONS if config.get(name)), None)
        return cls(
            folder, tokenizer, vocab_size, positions, bool(config.get("quantization_config"))
        )


def model_settings(path: Path) -> dict[str, Any]:
    """Returns the settings of a model; settings of its text part take precedence.

    Raises:
        ValueError: ``path`` is not a JSON object, or one of its sizes is not an integer; the
            message has the reason.
    """
    config = json_object(path, saved_by="transformers")
    text = config.get("text_config")
    found = {**config, **(text if isinstance(text, dict) else {})}
    for name in ("vocab_size", *_POSITIONS):
        if not isinstance(found.get(name), int | None):
            raise ValueError(f"{path} says {name} is {found[name]!r}; it must be an integer")
    return found


def check_drafter(record: TaskRecord, model: BaseModel) -> None:
    """Check a record's drafter, if it has one.

    Raises:
        UsageError: The drafter does not exist or belongs to another tokenizer or target, or the
            record has more ranked tokens than the tokenizer has tokens.
    """
    neural = record.neural
    if neural is None:
        return
    size = model.tokenizer.vocab_size
    if neural.is_ranked and neural.ranked_tokens > size:
        raise UsageError(
            f"--ranked-tokens is {neural.ranked_tokens}, but the tokenizer has {size} tokens; "
            f"give 1 to {size}"
        )
    _check_card(record, neural, model)


def _check_card(record: TaskRecord, neural: NeuralDrafting, model: BaseModel) -> None:
    folder = _folder(neural.drafter)
    try:
        adapter = resolve_folder(record.adapter) if record.adapter else None
        # The weights of a hub model may not be on this machine; the service checks them later.
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


def check_adapter(
    folder: Path, base: Path, *, by_row: bool = False, quantized: bool = False
) -> None:
    """Check that an adapter fits a base model, whose tokenizer must have all trained tokens.

    Args:
        by_row, quantized: See `require_fit`.

    Raises:
        ValueError: The adapter does not fit; the message has the difference and the solution.
        OSError: A file cannot be read.
    """
    try:
        require_fit(folder, base, by_row=by_row, quantized=quantized)
    except UnsupportedModel as error:
        raise ValueError(str(error)) from error
    ids = trained_ids(settings_of(folder))
    if ids and (base / FILE).is_file() and ids[-1] >= (size := open_to_encode(base).vocab_size):
        raise ValueError(
            f"adapter in {folder}: it trains the embedding of token {ids[-1]}, but the tokenizer "
            f"in {base} has {size} tokens; {MERGE}, with the tokenizer of the training"
        )


def json_object(path: Path, saved_by: str) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Args:
        saved_by: Name of the program that writes such files, for the message about a missing file.

    Raises:
        ValueError: The file does not exist, or has no JSON object.
        OSError: The file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path.parent} has no {path.name}; name a folder saved by {saved_by}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); fetch or save it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; fetch or save it again")
    return content
