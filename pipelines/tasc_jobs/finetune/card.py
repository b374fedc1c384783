"""What a fine-tuned model's folder says of itself to people. It writes no files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Made:
    """What there is to say of a fine-tune.

    Attributes:
        base: Where others find the model that was trained upon.
        revision: Of it, on the Hugging Face hub.
        data: Where the rows came from, and how many there were.
        settings: What it is reproducible by.
        metrics: What was measured, by name.
    """

    base: str
    revision: str | None
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]


def card(made: Made, adapter: str, model: str) -> str:
    """A model card, in Markdown.

    Args:
        adapter, model: Names of the folders beside it.
    """
    head = ["---", f"base_model: {made.base}", "library_name: peft", "---", ""]
    text = [
        f"# {Path(made.base).name}, fine-tuned by tasc-serve",
        "",
        "TASC-ft: new tokens for frequent n-grams of the task's outputs, their embeddings trained "
        "with a LoRA adapter.",
        f"`{adapter}` is the adapter, with the tokenizer; `{model}` has it in its weights.",
    ]
    if made.revision:
        text.append(f"It was trained on revision `{made.revision}` of its base.")
    for title, rows in (
        ("Data", made.data),
        ("Settings", made.settings),
        ("Metrics", made.metrics),
    ):
        text += ["", f"## {title}", "", "| | |", "|---|---|"]
        text += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([*head, *text, ""])
