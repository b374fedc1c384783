"""The settings files of an enriched tokenizer's folder: elsewhere, too, it is what its base was.

It knows no new tokens.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tasc_jobs.errors import FileError
from tasc_text import TaskTokenizer

CONFIG, SPECIAL, ENDS = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
_TEMPLATE = "chat_template.jinja"


def write_settings(base: TaskTokenizer, folder: Path) -> None:
    """Write a folder's settings after those beside the base's file.

    What ends an answer is what ``base`` was told, whatever its files say.

    Raises:
        FileError: A file beside the base's cannot be read as JSON.
        OSError: A file cannot be written.
    """
    beside = base.path.parent
    config = {**_said_by_class(base), **_read(beside / CONFIG)}
    # Classes of families build a tokenizer of their own from the vocabulary; this one takes the
    # file as it is, with its normalizer.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("auto_map", None)
    special = _read(beside / SPECIAL)
    if end := _end(base, {**config, **special}):
        config["eos_token"] = end
        if "eos_token" in special:
            special["eos_token"] = end
    _write(folder / CONFIG, config)
    if special:
        _write(folder / SPECIAL, special)
    _write(folder / ENDS, {"eos_token_id": list(base.eos_ids)})
    if (beside / _TEMPLATE).is_file():
        shutil.copyfile(beside / _TEMPLATE, folder / _TEMPLATE)


def named_end(tokenizer: TaskTokenizer) -> int | None:
    """The id of the ``eos_token`` that a tokenizer's settings name, if it ends answers."""
    beside = tokenizer.path.parent
    named = _named({**_read(beside / CONFIG), **_read(beside / SPECIAL)})
    id_ = tokenizer.backend.token_to_id(named) if named else None
    return id_ if id_ in tokenizer.eos_ids else None


def _named(settings: dict[str, Any]) -> str | None:
    named = settings.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    return text if isinstance(text, str) else None


def _said_by_class(base: TaskTokenizer) -> dict[str, Any]:
    """What the base's class is like where its settings do not say: its special tokens and side."""
    from transformers import AutoTokenizer  # slow to import

    try:
        loaded = AutoTokenizer.from_pretrained(base.path.parent, trust_remote_code=False)
    except Exception:  # no settings at all, or a class of the folder's own: nothing to go by
        return {}
    known = {
        name: str(token)
        for name, token in loaded.special_tokens_map.items()
        if isinstance(token, str) and base.backend.token_to_id(token) in base.special_ids
    }
    return {"padding_side": loaded.padding_side, **known}


def _end(base: TaskTokenizer, settings: dict[str, Any]) -> Any:
    """The settings' ``eos_token`` where it is one of the base's, else the first of those.

    None where that is no special token: transformers would make it one, and cut texts at it.
    """
    text = _named(settings)
    if text is not None and base.backend.token_to_id(text) in base.eos_ids:
        return settings["eos_token"]
    return base.backend.id_to_token(base.eos_id) if base.eos_id in base.special_ids else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"{path} cannot be read as JSON: {error}; mend or remove it") from error
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
