"""Writes and loads drafters in folders: their weights in safetensors, and their cards.

A folder has `drafter.json`, a transformers `config.json` and `model.safetensors`. The weights of an
EAGLE head do not include the embedding and the LM head, since the head uses those of the target.
Pickled files are not read.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tasc_engine.drafting.neural.card import CARD, DrafterCard, fitting_card, target_fingerprint
from tasc_engine.drafting.neural.drafters import Eagle, Independent
from tasc_engine.errors import UnsupportedModel
from tasc_engine.model.decoder import FAMILIES, LeanDecoder, lean
from tasc_engine.model.loading import ModelSource
from tasc_engine.model.target import Target

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
WEIGHTS, JOINT = "model.safetensors", "joint.weight"
_ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def save_drafter(folder: Path, model: Any, card: DrafterCard, joint: Tensor | None = None) -> None:
    """Writes a drafter to a folder.

    Args:
        model: A causal LM of one of `FAMILIES`; for an EAGLE head, embedding and LM head are left
            out.
        joint: ``[D, 2 D]`` for an EAGLE head, the weight that joins an embedding and a hidden state
            into one input.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    given = _ENDS if card.kind == "eagle" else _ENDS[1:] if ends[0] is ends[1] else ()
    for name in given:
        weights.pop(name, None)
    if joint is not None:
        weights[JOINT] = joint.detach().contiguous()
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    model.config.save_pretrained(folder)
    as_readable_as(folder / "config.json")
    (folder / CARD).write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")


def as_readable_as(config: Path) -> None:
    """Gives weight files, which only the owner can read, the permissions of the config."""
    for weights in config.parent.glob("*.safetensors"):
        shutil.copymode(config, weights)


def load_drafter(
    folder: Path, target: Target, source: ModelSource, tokenizer: str, rows: int, capacity: int
) -> tuple[Eagle | Independent, Tensor]:
    """Loads a drafter and the weight of its LM head, in the target's dtype and on its device.

    Args:
        source: The source of the target.
        tokenizer: Fingerprint of the target's tokenizer.

    Raises:
        UnsupportedModel: The folder has no drafter, or its tokenizer or target differs.
    """
    card = fitting_card(folder, tokenizer, target_fingerprint(source.folder, source.adapter))
    try:
        config, weights = AutoConfig.from_pretrained(folder), load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UnsupportedModel(
            f"the drafter in {folder} is damaged ({error}); fetch or train it again"
        ) from error
    if config.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"the drafter in {folder} has {config.vocab_size} tokens, but the target has "
            f"{target.vocab_size}; train a drafter for this target"
        )
    if card.kind == "independent":
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
        decoder = _decoder(config, weights, target, capacity, tied)
        return Independent(decoder, rows, capacity), decoder.head.weight
    joint, ends = weights.pop(JOINT, None), target.decoder
    if ends is None or joint is None:
        raise UnsupportedModel(
            f"an EAGLE head needs a target of {', '.join(FAMILIES)} and its own {JOINT}; use an "
            "independent drafter"
        )
    config.update({"vocab_size": 1, **dict.fromkeys(SPECIAL)})  # the target's values apply
    decoder = _decoder(config, weights, target, capacity, set(_ENDS))
    decoder.embedding, decoder.head = ends.embedding, ends.head
    size = ends.embedding.shape[1]
    if (config.hidden_size, *joint.shape) != (size, size, 2 * size):
        raise UnsupportedModel(
            f"the head in {folder} has hidden size {config.hidden_size} and a {JOINT} of "
            f"{tuple(joint.shape)}, but the target needs {size} and {(size, 2 * size)}; train a "
            "drafter for this target"
        )
    joint = joint.to(target.device, target.dtype)
    return Eagle(decoder, joint, rows, capacity), ends.head.weight


def _decoder(
    config: Any, weights: dict[str, Tensor], target: Target, capacity: int, elsewhere: set[str]
) -> LeanDecoder:
    """Builds the model of ``config``; weights named in ``elsewhere`` may be missing."""
    model: Any = AutoModelForCausalLM.from_config(config)
    try:
        found = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"the drafter's weights do not fit its config ({error}); train it again"
        ) from error
    if left := set(found.missing_keys) - elsewhere:
        raise UnsupportedModel(
            f"the drafter's weights lack {', '.join(sorted(left))}; train it again"
        )
    if found.unexpected_keys:
        names = ", ".join(sorted(found.unexpected_keys))
        raise UnsupportedModel(
            f"the drafter's config does not define weights {names}; train it again"
        )
    decoder = lean(model.to(target.device, target.dtype).eval(), capacity)
    if decoder is None:
        raise UnsupportedModel(
            f"a drafter of {config.model_type} cannot run here; use one of {', '.join(FAMILIES)}"
        )
    return decoder
