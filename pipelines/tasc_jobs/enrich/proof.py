"""Proves what an enriched tokenizer promises, by texts. It chooses no tokens and writes nothing."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tasc_jobs.enrich.errors import FamilyError

_BATCH = 1000
_SAMPLE = 256  # texts that transformers encodes, too
_SHOWN = 80  # characters of a text in an error


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


def require_same_ids(enriched: Tokenizer, folder: Path, texts: Sequence[str]) -> None:
    """Hold the ids that transformers gives by a folder against the tokenizer's, for some texts.

    Raises:
        FamilyError: They differ, or transformers cannot load the folder.
    """
    from transformers import AutoTokenizer  # slow to import

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever the settings lead it to
        raise FamilyError(
            f"transformers cannot load the enriched tokenizer ({error}); mend the settings beside "
            "the base's tokenizer.json"
        ) from error
    different = list(dict.fromkeys(texts))
    for text in different[:: len(different) // _SAMPLE + 1]:
        ours = enriched.encode(text, add_special_tokens=False).ids
        theirs = loaded.encode(text, add_special_tokens=False)
        if ours != theirs:
            raise FamilyError(
                f"transformers encodes {text[:_SHOWN]!r} as {len(theirs)} tokens and not as the "
                f"{len(ours)} of the enriched tokenizer; see what the settings beside the base's "
                "tokenizer.json change"
            )


def _read_back(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return list(tokenizer.decode_batch([encoding.ids for encoding in encodings]))
