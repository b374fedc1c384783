"""Writes an enriched tokenizer as a folder that transformers loads, and whole or not at all.

It chooses no tokens.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tasc_jobs.enrich.algorithm import Enriched, EnrichSettings
from tasc_jobs.enrich.proof import require_same_ids
from tasc_jobs.enrich.settings_files import write_settings
from tasc_jobs.errors import FileError
from tasc_text import TaskTokenizer

RECORD = "enrichment.json"
_FILE = "tokenizer.json"


def save(
    enriched: Enriched,
    settings: EnrichSettings,
    base: TaskTokenizer,
    folder: Path,
    texts: Sequence[str],
) -> TaskTokenizer:
    """Write the folder, and load the tokenizer from it.

    Beside the tokenizer stands ``enrichment.json``: the settings, and each new token's id, content
    and parts, in the order in which they were added.

    Args:
        texts: Some of these are encoded by transformers first, which must say the same.

    Raises:
        FamilyError: It does not; nothing is saved.
        FileError: The folder is there already, or cannot be written.
    """
    require_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as begun:
            whole = Path(begun) / folder.name
            whole.mkdir()
            _write(enriched, settings, base, whole)
            require_same_ids(enriched.tokenizer, whole, texts)
            whole.rename(folder)
    except OSError as error:
        raise FileError(f"the tokenizer cannot be saved in {folder}: {error}") from error
    return TaskTokenizer(folder / _FILE, base.eos_ids)


def require_new(folder: Path) -> None:
    """Raise FileError where something of that name is."""
    if folder.exists():
        raise FileError(f"{folder} is there already; name another, or remove it")


def _write(enriched: Enriched, settings: EnrichSettings, base: TaskTokenizer, folder: Path) -> None:
    enriched.tokenizer.save(str(folder / _FILE))
    write_settings(base, folder)
    record = {
        "base_fingerprint": base.fingerprint,
        "base_vocab_size": base.vocab_size,
        "settings": asdict(settings),
        "tokens": [asdict(token) for token in enriched.tokens],
    }
    (folder / RECORD).write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n")
