"""A base model with rows for new tokens and a LoRA adapter to be trained."""

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

from tasc_jobs.enrich.enrichment import RECORD, named_end
from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.hyperparameters import FinetuneSettings
from tasc_text import TaskTokenizer, TokenizerError
from tasc_text.tokenizer import open_tokenizer

Parts = Mapping[int, Sequence[int]]
"""Of each new token's id, the ids of the tokens it stands for, in the order they were added."""


@dataclass(frozen=True)
class AddedVocabulary:
    """The tokens of a fine-tune.

    Attributes:
        tokenizer: Its first end is the one that rows are learnt with; any ends an answer.
        parts: Empty where nothing is new.
    """

    tokenizer: TaskTokenizer
    parts: Parts

    @property
    def ends(self) -> int | list[int]:
        """As settings files have them."""
        ids = self.tokenizer.eos_ids
        return ids[0] if len(ids) == 1 else list(ids)

    @property
    def end(self) -> str:
        """The text of the one that is learnt."""
        return str(self.tokenizer.backend.id_to_token(self.tokenizer.eos_id))


def vocabulary_of(base: Path, folder: Path, eos: str | None = None) -> AddedVocabulary:
    """The tokenizer of ``folder``, held against that of ``base``.

    Args:
        base: Folder of the model.
        folder: The same, or what `tasc enrich` made of its tokenizer.
        eos: Text of the token that is to end answers, whatever the two say.

    Raises:
        FinetuneError: It is of another model, its record is damaged, or the two end otherwise.
        TokenizerError: One of them cannot be read, or has no such token.
    """
    given = open_tokenizer(folder, eos) if eos else _by_its_end(folder)
    if folder.resolve() == base.resolve():
        return AddedVocabulary(given, {})
    models = _ends_of(base)
    tokenizer = TaskTokenizer(given.path, given.eos_ids if eos else _agreed(given, models, base))
    own = TaskTokenizer(base / given.path.name, given.eos_ids)
    if given.fingerprint == own.fingerprint:
        return AddedVocabulary(tokenizer, {})
    return AddedVocabulary(tokenizer, _new(tokenizer, own, models))


def _by_its_end(folder: Path) -> TaskTokenizer:
    """Of several ends the one that the tokenizer's settings name is learnt: chats end by it."""
    try:
        found = TaskTokenizer.from_folder(folder)
    except TokenizerError as error:
        if error.__cause__ or not (folder / "tokenizer.json").is_file():
            raise
        raise FinetuneError(f"nothing in {folder} says what ends an answer; give --eos") from error
    named = named_end(found)
    if named is None:
        return found
    return TaskTokenizer(found.path, (named, *(id_ for id_ in found.eos_ids if id_ != named)))


def _ends_of(folder: Path) -> tuple[int, ...]:
    """What a folder says that ends answers; none where it says nothing."""
    try:
        return TaskTokenizer.from_folder(folder).eos_ids
    except TokenizerError as error:
        if error.__cause__:
            raise
        return ()


def _agreed(given: TaskTokenizer, models: Sequence[int], base: Path) -> tuple[int, ...]:
    """The end of rows, then the model's others."""
    learnt = given.eos_id
    if not models:
        return given.eos_ids
    if learnt not in models:
        own, others = given.backend.id_to_token(learnt), map(given.backend.id_to_token, models)
        raise FinetuneError(
            f"rows would be learnt to end with {own!r}, as {given.path.parent} says, and {base} "
            f"ends answers by {' or '.join(map(repr, others))}; name the one that is right with "
            "--eos"
        )
    return (learnt, *(id_ for id_ in models if id_ != learnt))


def _new(tokenizer: TaskTokenizer, base: TaskTokenizer, models: Sequence[int]) -> Parts:
    """What the record says of each token that the base has not.

    Args:
        models: What ends the base's answers.
    """
    folder = tokenizer.path.parent
    own, grown = (t.backend.get_vocab(with_added_tokens=True) for t in (base, tokenizer))
    if not own.items() <= grown.items():
        raise FinetuneError(_of_another(folder, base))
    parts: dict[int, list[int]] = {}
    known, file = set(own.values()), folder / RECORD
    if file.is_file():
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            of = record["base_fingerprint"], record["base_vocab_size"]
            parts = _parts(record["tokens"], known)
        except (ValueError, KeyError, TypeError) as error:
            raise FinetuneError(
                f"{file} is damaged ({error!r}); run `tasc enrich` again"
            ) from error
        # A fingerprint is of the ends too, and `tasc enrich` may have been told others than these.
        ends = {base.eos_ids, tuple(models), _ends_of(folder)} - {()}
        known_as = [TaskTokenizer(base.path, each).fingerprint for each in ends]
        if of[0] not in known_as or of[1] != base.vocab_size:
            raise FinetuneError(_of_another(folder, base))
    if strange := sorted(set(grown.values()) - known - parts.keys()):
        raise FinetuneError(
            f"{folder} has {len(strange)} tokens that {base.path.parent} has not, the first is "
            f"{tokenizer.backend.id_to_token(strange[0])!r}, and no {RECORD} that says what they "
            "stand for; take the folder as `tasc enrich` wrote it"
        )
    return parts


def _parts(tokens: Any, known: set[int]) -> dict[int, list[int]]:
    """Raises ValueError where a token stands for none, or for one that was not there before it."""
    found: dict[int, list[int]] = {}
    for token in tokens:
        id_, parts = token["id"], token["parts"]
        if id_ in known or not parts or not all(p in known or p in found for p in parts):
            raise ValueError(f"token {id_} stands for {parts}")
        found[id_] = parts
    return found


def _of_another(folder: Path, base: TaskTokenizer) -> str:
    return (
        f"{folder} was not enriched from the tokenizer of {base.path.parent}; run `tasc enrich "
        f"--tokenizer {base.path.parent}`, or name the model that it was made for"
    )


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
        folder,
        dtype=dtype,
        use_safetensors=True,
        quantization_config=quantised,
        device_map={"": device},
    )


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
