"""What a folder's drafter is, and whether it fits a target: its card, and who the target is.

It loads no weights and needs neither torch nor transformers.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tasc_engine.errors import UnsupportedModel

Kind = Literal["eagle", "independent"]
CARD = "drafter.json"
_SAMPLE = 1 << 20  # bytes of each end of a file of weights that tell it from others


@dataclass(frozen=True)
class DrafterCard:
    """What a drafter is.

    Attributes:
        tokenizer: Fingerprint of the tokenizer whose ids it drafts.
        target: `target_fingerprint` of the model whose hidden states an EAGLE head reads; None for
            an independent drafter, which any model of the tokenizer may have.
    """

    kind: Kind
    tokenizer: str
    target: str | None = None


def target_fingerprint(folder: Path, adapter: Path | None = None) -> str:
    """Who a target is, by its weights and its adapter's: names, sizes, first and last bytes."""
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
    """Raise UnsupportedModel where the folder has no drafter."""
    try:
        card = DrafterCard(**json.loads((folder / CARD).read_text(encoding="utf-8")))
        if card.kind not in get_args(Kind):
            raise ValueError(f"kind is {card.kind!r}")
        return card
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedModel(
            f"{folder} has no drafter ({error}); `tasc train-drafter` makes one"
        ) from error


def fitting_card(folder: Path, tokenizer: str, target: str | None) -> DrafterCard:
    """The card of a drafter that fits a target.

    Args:
        tokenizer: Fingerprint of the target's.
        target: `target_fingerprint`; None: its weights are not here to be compared.

    Raises:
        UnsupportedModel: It is no drafter, or one of another tokenizer or target.
    """
    card = read_card(folder)
    if card.tokenizer != tokenizer:
        raise UnsupportedModel(
            f"the drafter in {folder} is for the tokenizer {card.tokenizer}, the target has "
            f"{tokenizer}; train one for it"
        )
    if card.kind == "eagle" and target not in (None, card.target):
        raise UnsupportedModel(
            f"the EAGLE head in {folder} is for the target {card.target}, this is {target}; train "
            "one for it"
        )
    return card
