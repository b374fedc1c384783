"""Prepares a base model for training: embedding rows for new tokens and a LoRA adapter."""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from tasc_engine.errors import UnsupportedModel
from tasc_engine.model.loading import checked_config, require_whole
from tasc_text import TaskTokenizer, TokenizerError
from tasc_text.ends import GENERATION, named_ends
from tasc_text.tokenizer import open_tokenizer
from tasc_train.enrich.enrichment import RECORD
from tasc_train.errors import FinetuneError
from tasc_train.finetune.hyperparameters import FinetuneSettings

Parts = Mapping[int, Sequence[int]]
"""For each new token id, in the order of addition, the ids of the tokens that it replaces."""


@dataclass(frozen=True)
class AddedVocabulary:
    """The tokenizer of a fine-tune and its new tokens.

    Attributes:
        tokenizer: Tokenizer of the fine-tuned model. Each of its EOS tokens ends an answer;
            training rows end with the first one.
        parts: See `Parts`; empty if there are no new tokens.
    """

    tokenizer: TaskTokenizer
    parts: Parts

    @property
    def ends(self) -> int | list[int]:
        """The EOS ids in the format of the model's settings files."""
        ids = self.tokenizer.eos_ids
        return ids[0] if len(ids) == 1 else list(ids)

    @property
    def end(self) -> str:
        """The text of the EOS token that training rows end with."""
        return str(self.tokenizer.backend.id_to_token(self.tokenizer.eos_id))


def vocabulary_of(base: Path, folder: Path, eos: str | None = None) -> AddedVocabulary:
    """Loads the tokenizer of ``folder`` and checks it against the one of ``base``.

    Args:
        base: Folder of the model.
        folder: The same folder, or the output of `tasc enrich` for its tokenizer.
        eos: Text of the token that ends answers; overrides the settings of both folders.

    Raises:
        FinetuneError: The tokenizer belongs to another model, its record is damaged, or the two
            folders name different EOS tokens.
        TokenizerError: A tokenizer cannot be read or does not have the token ``eos``.
    """
    given = open_tokenizer(folder, eos) if eos else _with_own_eos(folder)
    if folder.resolve() == base.resolve():
        return AddedVocabulary(given, {})
    base_eos_ids = _eos_ids_of(base)
    eos_ids = given.eos_ids if eos else _merged_eos_ids(given, base_eos_ids, base)
    tokenizer = TaskTokenizer(given.path, eos_ids)
    base_tokenizer = TaskTokenizer(base / given.path.name, given.eos_ids)
    if given.fingerprint == base_tokenizer.fingerprint:
        return AddedVocabulary(tokenizer, {})
    return AddedVocabulary(tokenizer, _new_token_parts(tokenizer, base_tokenizer, base_eos_ids))


def _with_own_eos(folder: Path) -> TaskTokenizer:
    """Loads a tokenizer with the EOS tokens that its folder names."""
    try:
        return TaskTokenizer.from_folder(folder)
    except TokenizerError as error:
        if error.__cause__ or not (folder / "tokenizer.json").is_file():
            raise
        raise FinetuneError(f"{folder} does not name an EOS token; give --eos") from error


def _eos_ids_of(folder: Path) -> tuple[int, ...]:
    """Returns the EOS ids that a folder names, or an empty tuple if it names none."""
    try:
        return TaskTokenizer.from_folder(folder).eos_ids
    except TokenizerError as error:
        if error.__cause__:
            raise
        return ()


def _merged_eos_ids(
    given: TaskTokenizer, base_eos_ids: Sequence[int], base: Path
) -> tuple[int, ...]:
    """Returns the first EOS id of ``given``, followed by the other EOS ids of the model."""
    first = given.eos_id
    if not base_eos_ids:
        return given.eos_ids
    if first not in base_eos_ids:
        token = given.backend.id_to_token(first)
        base_tokens = map(given.backend.id_to_token, base_eos_ids)
        raise FinetuneError(
            f"{given.path.parent} ends answers with {token!r}, but {base} with "
            f"{' or '.join(map(repr, base_tokens))}; choose one with --eos"
        )
    return (first, *(id_ for id_ in base_eos_ids if id_ != first))


def _new_token_parts(
    tokenizer: TaskTokenizer, base: TaskTokenizer, base_eos_ids: Sequence[int]
) -> Parts:
    """Reads from the record the parts of each token that the base tokenizer does not have.

    Args:
        base_eos_ids: EOS ids that the base model's folder names.

    Raises:
        FinetuneError: The record is damaged or missing, or belongs to another base.
    """
    folder = tokenizer.path.parent
    base_vocab, vocab = (t.backend.get_vocab(with_added_tokens=True) for t in (base, tokenizer))
    if not base_vocab.items() <= vocab.items():
        raise FinetuneError(_of_another(folder, base))
    parts: dict[int, list[int]] = {}
    known, file = set(base_vocab.values()), folder / RECORD
    if file.is_file():
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            fingerprint, vocab_size = record["base_fingerprint"], record["base_vocab_size"]
            parts = _parts(record["tokens"], known)
        except (ValueError, KeyError, TypeError) as error:
            raise FinetuneError(
                f"{file} is damaged ({error!r}); run `tasc enrich` again"
            ) from error
        # The fingerprint covers the EOS ids, and `tasc enrich --eos` may have replaced them.
        written = named_ends(folder).get(GENERATION, ())
        candidates = {base.eos_ids, tuple(base_eos_ids), _eos_ids_of(folder), written} - {()}
        fingerprints = [TaskTokenizer(base.path, each).fingerprint for each in candidates]
        if fingerprint not in fingerprints or vocab_size != base.vocab_size:
            raise FinetuneError(_of_another(folder, base))
    if unexplained := sorted(set(vocab.values()) - known - parts.keys()):
        raise FinetuneError(
            f"{folder} has {len(unexplained)} tokens that neither {base.path.parent} nor {RECORD} "
            f"has; the first is {tokenizer.backend.id_to_token(unexplained[0])!r}. Use the folder "
            "as `tasc enrich` wrote it"
        )
    return parts


def _parts(tokens: Any, known: set[int]) -> dict[int, list[int]]:
    """Parses the parts of new tokens.

    Raises:
        ValueError: A token has no parts, or a part that is not an earlier token.
    """
    result: dict[int, list[int]] = {}
    for token in tokens:
        id_, parts = token["id"], token["parts"]
        if id_ in known or not parts or not all(p in known or p in result for p in parts):
            raise ValueError(f"token {id_} has invalid parts {parts}")
        result[id_] = parts
    return result


def _of_another(folder: Path, base: TaskTokenizer) -> str:
    return (
        f"{folder} was not enriched from the tokenizer of {base.path.parent}; run `tasc enrich` "
        f"with --tokenizer {base.path.parent}, or choose the model whose tokenizer was enriched"
    )


if TYPE_CHECKING:
    from peft import PeftModel


def dtype_on(device: str) -> torch.dtype:
    """The dtype of frozen weights that are not quantised."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def load_base(folder: Path, *, nf4: bool, device: str) -> Any:
    """Loads the base model. Its weights stay frozen in training.

    Args:
        nf4: Whether to quantise the weights to NF4.

    Raises:
        FinetuneError: The folder has no model that can be served, or lacks weights.
    """
    _silence()
    options: dict[str, Any] = {}
    if nf4:
        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        options = {"quantization_config": quantised, "device_map": {"": device}}
    try:
        checked_config(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype_on(device),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `require_whole` names them in an error
            **options,
        )
        model, found = loaded
        require_whole(folder, found)
    except UnsupportedModel as error:
        raise FinetuneError(str(error)) from error
    return model if nf4 else model.to(device)


def add_rows(model: Any, vocab_size: int, parts: Parts) -> None:
    """Initialises the row of each new token as the mean of its parts' rows (TASC, section 4.2).

    New tokens first use the padding rows of the embedding matrices; the matrices grow only if these
    are not enough. Tokens of the base tokenizer without a row (for example image tokens) get the
    mean of all rows.

    Raises:
        FinetuneError: The LM head has a bias.
    """
    rows = model.get_input_embeddings().num_embeddings
    if parts and getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise FinetuneError(
            f"the LM head of {model.config.model_type} has a bias, which PEFT drops when new "
            "tokens are trained; choose another model, or train without --tokenizer"
        )
    if vocab_size > rows:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        for matrix in _embedding_matrices(model):
            matrix[rows:] = matrix[:rows].float().mean(0).to(matrix.dtype)
            for id_, its_parts in parts.items():
                matrix[id_] = matrix[list(its_parts)].float().mean(0).to(matrix.dtype)


def adapted(model: Any, parts: Parts, settings: FinetuneSettings) -> "PeftModel":
    """Wraps a model with a LoRA adapter on all linear layers.

    The rows of new tokens are the only embeddings that are trained.
    """
    # peft imports bitsandbytes, whose log messages `load_base` has silenced.
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(settings.seed)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        trainable_token_indices=_trained_rows(model, sorted(parts)),
    )
    wrapped = get_peft_model(model, config)
    assert isinstance(wrapped, PeftModel)
    return wrapped


@contextmanager
def head_at(model: Any, positions: torch.Tensor) -> Iterator[None]:
    """Restricts the LM head to some positions; logits are then ``[1, positions, vocab]``.

    Args:
        positions: ``bool[R, L]`` mask over the hidden states of all rows.
    """
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: (given[0][positions][None], *given[1:])
    )
    try:
        yield
    finally:
        hook.remove()


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    """Returns the trainable parameters by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _silence() -> None:
    """Silences progress bars, missing-kernel messages and deprecation warnings of libraries."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)


def _embedding_matrices(model: Any) -> list[torch.Tensor]:
    """Returns the input and output embedding matrices, or the single one if they are tied."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [embedding] if head is embedding else [embedding, head]


def _trained_rows(model: Any, ids: Sequence[int]) -> dict[str, list[int]] | None:
    if not ids:
        return None
    tied = len(_embedding_matrices(model)) == 1
    layers = [model.get_input_embeddings()]
    if not tied:
        layers.append(model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(layer)].rpartition(".")[2]: list(ids) for layer in layers}
