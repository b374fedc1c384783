"""Adds n-grams of a task's outputs to a tokenizer, saves it, and reports the saved tokens."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tasc_jobs.errors import EmptyCorpusError
from tasc_runtime.errors import FileError
from tasc_runtime.progress import StageProgress, silent
from tasc_text import TaskTokenizer
from tasc_train.enrich.ngram_selection import Enriched, EnrichSettings, refined
from tasc_train.errors import FamilyError

_BATCH = 1000
_SAMPLE = 256  # number of texts that transformers encodes for comparison
_SHOWN = 80  # characters of a text in an error
CONFIG, SPECIAL, ENDS = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
_TEMPLATE = "chat_template.jinja"
RECORD = "enrichment.json"
_FILE = "tokenizer.json"
STAGES = {"merge": "tokens", "check": "texts"}


@dataclass(frozen=True)
class EnrichReport:
    """How much shorter some outputs become with the new tokens.

    Attributes:
        judged_on: ``test`` for outputs that were not used to choose tokens, else ``train``.
        new_tokens: Number of tokens added; below the budget if no more n-grams qualify.
        tokens_before: Number of tokens of the judged outputs with the base tokenizer.
        collided: Number of n-grams left out because of their prefix collision score.
        unwritable: Number of n-grams left out because their text cannot be a token.
        length_reduction: ``tokens_before`` divided by ``tokens_after``.
    """

    judged_on: str
    budget: int
    new_tokens: int
    collided: int
    unwritable: int
    tokens_before: int
    tokens_after: int
    bytes_per_token_before: float
    bytes_per_token_after: float
    length_reduction: float
    output: str

    @property
    def in_words(self) -> str:
        fewer = "" if self.new_tokens == self.budget else f" (of {self.budget}; no more qualify)"
        return (
            f"{self.new_tokens} new tokens{fewer}; {self.judged_on} outputs have "
            f"{self.length_reduction:.2f} x fewer tokens ({self.tokens_before:,} -> "
            f"{self.tokens_after:,}); left out: {self.collided} for collisions, {self.unwritable} "
            f"whose text cannot be a token\n{self.output}"
        )


def enrich_and_save(
    tokenizer: TaskTokenizer,
    train: Sequence[str],
    settings: EnrichSettings,
    output: Path,
    *,
    test: Sequence[str] = (),
    others: Sequence[str] = (),
    progress: StageProgress = silent,
) -> EnrichReport:
    """Chooses tokens by the ``train`` outputs, and saves the tokenizer in the folder ``output``.

    Args:
        test: Outputs on which the result is judged; without any, ``train`` is used.
        others: Further texts, such as inputs, that must decode as before.

    Raises:
        EmptyCorpusError: There are no outputs.
        FamilyError: Texts would not decode as before, or transformers would not use the new
            tokens; nothing is saved.
        FileError: The folder already exists, or cannot be written.
    """
    require_new(output)
    if not any(train):
        raise EmptyCorpusError(
            "there are no outputs to take n-grams from; add some with `tasc ingest`"
        )
    found = refined(tokenizer, train, settings, partial(progress, "merge"))
    texts = [*train, *test, *others]
    progress("check", 0, len(texts))
    require_same_texts(tokenizer.backend, found.tokenizer, texts)
    progress("check", len(texts), len(texts))
    saved, judged = save(found, settings, tokenizer, output, train), test or train
    size = sum(len(text.encode()) for text in judged)
    before, after = (sum(map(len, t.encode_outputs(judged))) for t in (tokenizer, saved))
    return EnrichReport(
        judged_on="test" if test else "train",
        budget=settings.budget,
        new_tokens=len(found.tokens),
        collided=found.collided,
        unwritable=found.unwritable,
        tokens_before=before,
        tokens_after=after,
        bytes_per_token_before=size / max(before, 1),
        bytes_per_token_after=size / max(after, 1),
        length_reduction=before / max(after, 1),
        output=str(output),
    )


def require_same_texts(base: Tokenizer, enriched: Tokenizer, texts: Sequence[str]) -> None:
    """Checks that texts decode to the same text with both tokenizers.

    Raises:
        FamilyError: A text decodes differently.
    """
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        both = zip(_read_back(base, batch), _read_back(enriched, batch), strict=True)
        for text, (one, other) in zip(batch, both, strict=True):
            if one != other:
                raise FamilyError(
                    f"{text[:_SHOWN]!r} decodes to {other[:_SHOWN]!r} with the new tokens and to "
                    f"{one[:_SHOWN]!r} without; this tokenizer cannot be enriched; use another "
                    "model"
                )


def require_same_ids(enriched: Tokenizer, folder: Path, texts: Sequence[str]) -> None:
    """Checks that transformers loads the folder and encodes texts to the same ids.

    Raises:
        FamilyError: The ids differ, or transformers cannot load the folder.
    """
    from transformers import AutoTokenizer  # slow to import

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # its type depends on the settings
        raise FamilyError(
            f"transformers cannot load the enriched tokenizer ({error}); fix "
            "tokenizer_config.json next to the base's tokenizer.json"
        ) from error
    different = list(dict.fromkeys(texts))
    for text in different[:: len(different) // _SAMPLE + 1]:
        ours = enriched.encode(text, add_special_tokens=False).ids
        theirs = loaded.encode(text, add_special_tokens=False)
        if ours != theirs:
            raise FamilyError(
                f"transformers encodes {text[:_SHOWN]!r} to other tokens ({len(theirs)}) than the "
                f"enriched tokenizer ({len(ours)}); check the settings next to the base's "
                "tokenizer.json"
            )


def _read_back(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return list(tokenizer.decode_batch([encoding.ids for encoding in encodings]))


def write_settings(base: TaskTokenizer, folder: Path) -> None:
    """Writes the tokenizer's settings files, based on the files next to the base's tokenizer.json.

    End-of-sequence tokens are those of ``base``, even if the files of ``base`` name others.

    Raises:
        FileError: A file next to the base's tokenizer.json cannot be read as JSON.
        OSError: A file cannot be written.
    """
    beside = base.path.parent
    config = {**_settings_of_class(base), **_read(beside / CONFIG)}
    # Classes of model families rebuild a tokenizer from the vocabulary. This class uses the file
    # unchanged, with its normalizer.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("auto_map", None)
    special = _read(beside / SPECIAL)
    end = _end(base, {**config, **special})
    for named in (config, special):
        if end is None:  # otherwise the named EOS token would end answers, too
            named.pop("eos_token", None)
        elif named is config or "eos_token" in special:
            named["eos_token"] = end
    _write_settings(folder / CONFIG, config)
    if special:
        _write_settings(folder / SPECIAL, special)
    _write_settings(folder / ENDS, {"eos_token_id": list(base.eos_ids)})
    if (beside / _TEMPLATE).is_file():
        shutil.copyfile(beside / _TEMPLATE, folder / _TEMPLATE)


def _named(settings: dict[str, Any]) -> str | None:
    named = settings.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    return text if isinstance(text, str) else None


def _settings_of_class(base: TaskTokenizer) -> dict[str, Any]:
    """Returns settings that only the base's class defines: special tokens and padding side."""
    from transformers import AutoTokenizer  # slow to import

    try:
        loaded = AutoTokenizer.from_pretrained(base.path.parent, trust_remote_code=False)
    except Exception:  # no settings, or a class with code of its own
        return {}
    known = {
        name: str(token)
        for name, token in loaded.special_tokens_map.items()
        if isinstance(token, str) and base.backend.token_to_id(token) in base.special_ids
    }
    return {"padding_side": loaded.padding_side, **known}


def _end(base: TaskTokenizer, settings: dict[str, Any]) -> Any:
    """Returns the settings' ``eos_token`` if it is one of the base's, else the base's first one.

    Returns None if the base's first one is not special, because transformers would make it special
    and split texts at it.
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
        raise FileError(f"{path} cannot be read as JSON: {error}; repair or remove it") from error
    return content if isinstance(content, dict) else {}


def _write_settings(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(
    enriched: Enriched,
    settings: EnrichSettings,
    base: TaskTokenizer,
    folder: Path,
    texts: Sequence[str],
) -> TaskTokenizer:
    """Writes the folder, and loads the tokenizer from it.

    ``enrichment.json`` has the base's fingerprint, the settings, and each `NewToken` in order.

    Args:
        texts: transformers encodes a sample of these texts, and must give the same ids.

    Raises:
        FamilyError: transformers gives other ids, or cannot load the folder; nothing is saved.
        FileError: The folder already exists, or cannot be written.
    """
    require_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}-"
        ) as unfinished:
            written = Path(unfinished) / folder.name
            written.mkdir()
            _write(enriched, settings, base, written)
            require_same_ids(enriched.tokenizer, written, texts)
            written.rename(folder)
    except OSError as error:
        raise FileError(f"the tokenizer cannot be saved in {folder}: {error}") from error
    return TaskTokenizer.from_folder(folder)


def require_new(folder: Path) -> None:
    """Raises FileError if the folder exists."""
    if folder.exists():
        raise FileError(f"{folder} already exists; choose another, or remove it")


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
