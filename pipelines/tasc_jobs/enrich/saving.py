"""Writes an enriched tokenizer as a folder that transformers loads, and proves what it promises.

It chooses no tokens.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer

from tasc_jobs.enrich.algorithm import Enriched, EnrichSettings
from tasc_jobs.enrich.errors import FamilyError
from tasc_jobs.errors import FileError
from tasc_text import TaskTokenizer

RECORD = "enrichment.json"
_FILE = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_BATCH = 1000
_SHOWN = 80  # characters of a text in an error


def save(
    enriched: Enriched, settings: EnrichSettings, base: TaskTokenizer, folder: Path
) -> TaskTokenizer:
    """Write the folder, whole or not at all, and load the tokenizer from it.

    Beside the tokenizer stands ``enrichment.json``: the settings, and each new token's id, content
    and parts, in the order in which they were added.

    Raises:
        FileError: The folder is there already, or cannot be written.
    """
    require_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as begun:
            whole = Path(begun) / folder.name
            whole.mkdir()
            _write(enriched, settings, base, whole)
            whole.rename(folder)
    except OSError as error:
        raise FileError(f"the tokenizer cannot be saved in {folder}: {error}") from error
    return TaskTokenizer(folder / _FILE, base.eos_ids)


def require_new(folder: Path) -> None:
    """Raise FileError where something of that name is."""
    if folder.exists():
        raise FileError(f"{folder} is there already; name another, or remove it")


def require_same_texts(base: Tokenizer, enriched: Tokenizer, texts: Sequence[str]) -> None:
    """Hold what both tokenizers read back of texts against one another.

    Raises:
        FamilyError: A text comes back from one as it does not from the other.
    """
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        both = zip(_read_back(base, batch), _read_back(enriched, batch), strict=True)
        for text, (one, other) in zip(batch, both, strict=True):
            if one != other:
                raise FamilyError(
                    f"{text[:_SHOWN]!r} is read back as {other[:_SHOWN]!r} with the new tokens and "
                    f"as {one[:_SHOWN]!r} without; this tokenizer cannot be enriched, take a model "
                    "with another"
                )


def _write(enriched: Enriched, settings: EnrichSettings, base: TaskTokenizer, folder: Path) -> None:
    enriched.tokenizer.save(str(folder / _FILE))
    for name in _BESIDE:
        if (base.path.parent / name).is_file():
            shutil.copyfile(base.path.parent / name, folder / name)
    if not (folder / "tokenizer_config.json").is_file():
        ends = base.backend.id_to_token(base.eos_id)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    record = {
        "base_fingerprint": base.fingerprint,
        "base_vocab_size": base.vocab_size,
        "settings": asdict(settings),
        "tokens": [asdict(token) for token in enriched.tokens],
    }
    (folder / RECORD).write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n")


def _read_back(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return list(tokenizer.decode_batch([encoding.ids for encoding in encodings]))
