"""LoRA adapters of the tests' tiny models, and the answers of models with merged adapters."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny
from tasc_engine.model.loading import ModelSource, load_model

WEIGHTS = "adapter_model.safetensors"


def make_adapter(
    base: Path, folder: Path, seed: int = 0, more_tokens: int = 0, **config: Any
) -> Path:
    """Makes a random adapter that changes answers; by default it covers all linear layers.

    With ``init_lora_weights=True`` it is untrained and changes nothing. ``more_tokens`` are first
    added to the model's embeddings.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if more_tokens:
        rows = model.get_input_embeddings().num_embeddings
        model.resize_token_embeddings(rows + more_tokens, mean_resizing=False)
    config = {"target_modules": "all-linear", "init_lora_weights": False, **config}
    lora = LoraConfig(task_type="CAUSAL_LM", **config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about embeddings
        get_peft_model(model, lora).save_pretrained(folder)
    return folder


def cut(folder: Path) -> None:
    """Make an adapter unfit for the model: its inputs become too narrow."""
    tensors = load_file(folder / WEIGHTS)
    narrow = {k: v[:, :-1].contiguous() if "lora_A" in k else v for k, v in tensors.items()}
    save_file(narrow, folder / WEIGHTS)


@cache
def merged_says(
    base: Path, adapter: Path | None, prompt: tuple[int, ...], max_tokens: int
) -> tuple[int, ...]:
    """Returns the greedy answer of transformers in float64, with the adapter merged."""
    return tuple(tiny.plain(_merged(base, adapter), prompt, max_tokens))


@cache
def _merged(base: Path, adapter: Path | None) -> torch.nn.Module:
    return load_model(ModelSource(base, adapter, dtype="float64"))
