"""A base model as far as registering a task needs it: its folder, tokenizer and settings."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tasc_jobs.errors import UsageError
from tasc_text import TaskTokenizer, resolve_folder

_CONFIG = "config.json"
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class BaseModel:
    """What a model folder says without its weights.

    Attributes:
        vocab_size: Ids the model has logits for, the tokenizer's where it does not say.
        positions: Most tokens of prompt and answer; None where the settings do not say.
        quantized: Whether its weights lie there quantised.
    """

    folder: Path
    tokenizer: TaskTokenizer
    vocab_size: int
    positions: int | None
    quantized: bool

    @classmethod
    def open(cls, model: str, revision: str | None) -> Self:
        """Find a model; of one on the hub only settings and tokenizer are fetched.

        Raises:
            UsageError: There is no such model, or it lacks a tokenizer or ``config.json``.
        """
        try:
            folder = resolve_folder(model, revision, weights=False)
            tokenizer = TaskTokenizer.from_folder(folder)
            config = _config(folder / _CONFIG)
        except (ValueError, OSError) as error:
            raise UsageError(f"--model: {error}") from error
        vocab_size = config.get("vocab_size") or tokenizer.vocab_size
        positions = next((config[name] for name in _POSITIONS if config.get(name)), None)
        return cls(
            folder, tokenizer, vocab_size, positions, bool(config.get("quantization_config"))
        )


def _config(path: Path) -> dict[str, Any]:
    """The settings of a model, those of its text part over the others; numbers checked."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {_CONFIG}; name a folder saved by transformers")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); fetch the model again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no object; fetch the model again")
    text = config.get("text_config")
    found = {**config, **(text if isinstance(text, dict) else {})}
    for name in ("vocab_size", *_POSITIONS):
        if not isinstance(found.get(name), int | None):
            raise ValueError(f"{path} says {name} is {found[name]!r}; it must be an integer")
    return found
