"""Writes what a fine-tune made: an adapter for transformers and PEFT, a whole model, and a card.

The folder has ``adapter``, which `peft.AutoPeftModelForCausalLM` loads, and ``model``, the same
with the adapter in its weights, which any engine serves. It trains nothing.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasc_engine.neural.files import as_readable_as
from tasc_jobs.finetune.checkpoints import NO_ROOM
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.finished import REPORT

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER, MODEL, CARD = "adapter", "model", "README.md"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "enrichment.json",
)  # fmt: skip


@dataclass(frozen=True)
class Made:
    """What there is to say of a fine-tune.

    Attributes:
        data: Where the rows came from, and how many there were.
        settings: What it is reproducible by.
        metrics: What was measured, by name.
    """

    base: str
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]


def write(model: "PeftModel", base: Path, tokenizer: Path, made: Made, folder: Path) -> None:
    """Write all of it; a folder with ``finetune.json`` is whole.

    Args:
        base: Folder of the model that was trained upon.
        tokenizer: Folder of its tokenizer, with new tokens or not.

    Raises:
        FinetuneError: It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.peft_config["default"].base_model_name_or_path = made.base
        _write_adapter(model, tokenizer, folder / ADAPTER)
        _write_model(base, tokenizer, folder)
        (folder / CARD).write_text(_card(made))
        report = {"base": made.base, "data": dict(made.data), "settings": dict(made.settings),
                  "metrics": dict(made.metrics)}  # fmt: skip
        (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    except NO_ROOM as error:
        raise FinetuneError(
            f"the model cannot be written to {folder}: {error}; make room and run again, it "
            "goes on from its last checkpoint"
        ) from error


def _write_adapter(model: "PeftModel", tokenizer: Path, folder: Path) -> None:
    # Of the embeddings there are the new rows in it, not the whole matrix.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / CARD).unlink(missing_ok=True)  # PEFT's own, with nothing filled in
    as_readable_as(folder / "adapter_config.json")
    _copy(tokenizer, folder)


def _write_model(base: Path, tokenizer: Path, folder: Path) -> None:
    """Merge the adapter as it was saved, so that what is served is what others load."""
    from peft import AutoPeftModelForCausalLM  # brings bitsandbytes, silenced by now

    merged: Any = AutoPeftModelForCausalLM.from_pretrained(folder / ADAPTER, dtype="auto")
    whole = merged.merge_and_unload()
    whole.save_pretrained(folder / MODEL)
    as_readable_as(folder / MODEL / "config.json")
    if (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", folder / MODEL / "generation_config.json")
    _copy(tokenizer, folder / MODEL)


def _copy(tokenizer: Path, folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _card(made: Made) -> str:
    head = ["---", f"base_model: {made.base}", "library_name: peft", "---", ""]
    text = [
        f"# {Path(made.base).name}, fine-tuned by tasc-serve",
        "",
        "TASC-ft: new tokens for frequent n-grams of the task's outputs, their embeddings trained "
        "with a LoRA adapter.",
        f"`{ADAPTER}` is the adapter, with the tokenizer; `{MODEL}` has it in its weights.",
    ]
    for title, rows in (
        ("Data", made.data),
        ("Settings", made.settings),
        ("Metrics", made.metrics),
    ):
        text += ["", f"## {title}", "", "| | |", "|---|---|"]
        text += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([*head, *text, ""])
