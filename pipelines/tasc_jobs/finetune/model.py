"""A base model with rows for new tokens and a LoRA adapter to be trained. It trains nothing."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.hyperparameters import FinetuneSettings
from tasc_jobs.finetune.vocabulary import Parts

if TYPE_CHECKING:
    from peft import PeftModel


def dtype_on(device: str) -> torch.dtype:
    """Of the frozen weights that are not quantised."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def load_base(folder: Path, *, nf4: bool, device: str) -> Any:
    """The model that nothing of is trained.

    Raises:
        FinetuneError: It has no weights in safetensors.
    """
    if not any(folder.glob("*.safetensors")):
        raise FinetuneError(
            f"{folder} has no weights in safetensors; load it once where you trust it and save it "
            "with save_pretrained(folder)"
        )
    _silence()
    dtype = dtype_on(device)
    if not nf4:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
        return model.to(device)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, quantization_config=quantised,
        device_map={"": device},
    )  # fmt: skip


def add_rows(model: Any, vocab_size: int, parts: Parts) -> None:
    """Give new tokens rows of their own, each the mean of its parts' rows (TASC, section 4.2).

    Rows that pad the model's matrices are used first; only beyond them do the matrices grow. Ids
    that the base's own tokenizer has beyond its rows (an image's token, say) get the mean of all.

    Raises:
        FinetuneError: The LM head has a bias.
    """
    rows = model.get_input_embeddings().num_embeddings
    if parts and getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise FinetuneError(
            f"the LM head of {model.config.model_type} has a bias, which PEFT leaves out where new "
            "tokens are trained; take another model, or train without --tokenizer"
        )
    if vocab_size > rows:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        for matrix in _matrices(model):
            matrix[rows:] = matrix[:rows].float().mean(0).to(matrix.dtype)
            for id_, its_parts in parts.items():
                matrix[id_] = matrix[list(its_parts)].float().mean(0).to(matrix.dtype)


def adapted(model: Any, parts: Parts, settings: FinetuneSettings) -> "PeftModel":
    """With an adapter on all linear layers; of the embeddings only new rows are trained."""
    from peft import LoraConfig, PeftModel, get_peft_model  # brings bitsandbytes, silenced by now

    torch.manual_seed(settings.seed)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        trainable_token_indices=_trained_rows(model, sorted(parts)),
    )
    found = get_peft_model(model, config)
    assert isinstance(found, PeftModel)
    return found


@contextmanager
def head_at(model: Any, places: torch.Tensor) -> Iterator[None]:
    """In the block the LM head runs at these places only: logits are ``[1, places, vocab]``.

    Args:
        places: ``bool[R, L]``, of the hidden states of all rows.
    """
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: (given[0][places][None], *given[1:])
    )
    try:
        yield
    finally:
        hook.remove()


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _silence() -> None:
    """Libraries tell of kernels they lack, of every file, and of what they will call otherwise."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)


def _matrices(model: Any) -> list[torch.Tensor]:
    """Of input and output, or the one that is both."""
    own, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [own] if head is own else [own, head]


def _trained_rows(model: Any, ids: Sequence[int]) -> dict[str, list[int]] | None:
    if not ids:
        return None
    tied = len(_matrices(model)) == 1
    layers = [model.get_input_embeddings()]
    if not tied:
        layers.append(model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(layer)].rpartition(".")[2]: list(ids) for layer in layers}
