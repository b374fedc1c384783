"""Drafter cards: the metadata file of a drafter, and the check that a drafter fits a target.

This module loads no weights and imports neither torch nor transformers.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tasc_engine.errors import UnsupportedModel

Kind = Literal["eagle", "independent"]
CARD = "drafter.json"
_SAMPLE = 1 << 20  # bytes hashed at the start and at the end of each weight file


@dataclass(frozen=True)
class DrafterCard:
    """The metadata of a drafter.

    Attributes:
        kind: Architecture of the drafter.
        tokenizer: Fingerprint of the tokenizer whose token ids the drafter drafts.
        target: `target_fingerprint` of the model whose hidden states an EAGLE head reads. None for
            an independent drafter, which works with every model that has the tokenizer.
    """

    kind: Kind
    tokenizer: str
    target: str | None = None


def target_fingerprint(folder: Path, adapter: Path | None = None) -> str:
    """Identifies a target by the weight files of its model and its adapter.

    The fingerprint covers the name, size, first and last bytes of each file.
    """
    digest = hashlib.sha256()
    for place in (folder, adapter):
        for file in sorted(place.glob("*.safetensors")) if place else ():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLE))
                stream.seek(max(size - _SAMPLE, 0))
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()


def read_card(folder: Path) -> DrafterCard:
    """Reads the card of the drafter in a folder.

    Raises:
        UnsupportedModel: The folder has no drafter.
    """
    try:
        card = DrafterCard(**json.loads((folder / CARD).read_text(encoding="utf-8")))
        if card.kind not in get_args(Kind):
            raise ValueError(f"kind is {card.kind!r}")
        return card
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedModel(
            f"{folder} has no drafter ({error}); create one with `tasc train-drafter`"
        ) from error


def fitting_card(folder: Path, tokenizer: str, target: str | None) -> DrafterCard:
    """Returns the card of a drafter, after checking that the drafter fits a target.

    Args:
        tokenizer: Fingerprint of the target's tokenizer.
        target: `target_fingerprint` of the target. None skips the comparison of weights, for
            callers that do not have the weights.

    Raises:
        UnsupportedModel: The folder has no drafter, or its tokenizer or target differs.
    """
    card = read_card(folder)
    if card.tokenizer != tokenizer:
        raise UnsupportedModel(
            f"the drafter in {folder} is for the tokenizer {card.tokenizer}, but the target "
            f"has {tokenizer}; train a drafter for this target"
        )
    if card.kind == "eagle" and target not in (None, card.target):
        raise UnsupportedModel(
            f"the EAGLE head in {folder} is for the target {card.target}, but this target is "
            f"{target}; train a drafter for this target"
        )
    return card
