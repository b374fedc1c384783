"""What a task's folders say without loading a model: base model, LoRA adapter and drafter.

Registering a task reads settings, tokenizers and the headers of weight files, so that a folder
that cannot work is refused before a service loads it.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from safetensors import SafetensorError, safe_open

from tasc_engine.drafting.neural.card import fitting_card, target_fingerprint
from tasc_engine.errors import EngineError, UnsupportedModel
from tasc_engine.model.folder import in_words, recurrent_state, require_model_alone
from tasc_jobs.errors import UsageError
from tasc_store import NeuralDrafting, TaskRecord
from tasc_text import TaskTokenizer, TextError, resolve_folder

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_WEIGHTS, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
_LORA = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
Shape: TypeAlias = tuple[int, ...]
_FLOATS = ("F64", "F32", "F16", "BF16")  # others are packed: their shapes say nothing
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class BaseModel:
    """The settings of a model folder, without its weights.

    Attributes:
        vocab_size: Ids the model has logits for, the tokenizer's where it does not say.
        positions: Most tokens of prompt and answer; None where the settings do not say.
        quantized: Whether its weights lie there quantised.
    """

    folder: Path
    tokenizer: TaskTokenizer
    vocab_size: int
    positions: int | None
    quantized: bool

    @classmethod
    def open(cls, model: str, revision: str | None) -> Self:
        """Find a model; of one on the hub only settings and tokenizer are fetched.

        Raises:
            UsageError: There is no such model, it lacks a tokenizer or ``config.json``, an adapter
                lies beside its weights, or it keeps a recurrent state.
        """
        try:
            folder = resolve_folder(model, revision, weights=False)
            require_model_alone(folder)
            tokenizer = TaskTokenizer.from_folder(folder)
            config = model_settings(folder / _CONFIG)
            if state := recurrent_state(config):
                raise UnsupportedModel(in_words(state))
        except (ValueError, OSError, UnsupportedModel) as error:
            raise UsageError(f"--model: {error}") from error
        vocab_size = config.get("vocab_size") or tokenizer.vocab_size
        positions = next((config[name] for name in _POSITIONS if config.get(name)), None)
        return cls(
            folder, tokenizer, vocab_size, positions, bool(config.get("quantization_config"))
        )


def model_settings(path: Path) -> dict[str, Any]:
    """The settings of a model, those of its text part over the others; numbers checked.

    Raises:
        ValueError: ``path`` is no such file; the message says why.
    """
    config = json_object(path, saved_by="transformers")
    text = config.get("text_config")
    found = {**config, **(text if isinstance(text, dict) else {})}
    for name in ("vocab_size", *_POSITIONS):
        if not isinstance(found.get(name), int | None):
            raise ValueError(f"{path} says {name} is {found[name]!r}; it must be an integer")
    return found


def check_drafter(record: TaskRecord, model: BaseModel) -> None:
    """Check a record's drafter, if it has one.

    Raises:
        UsageError: There is no drafter, or it is another tokenizer's or another target's, or more
            ranked tokens are asked for than the tokenizer has.
    """
    neural = record.neural
    if neural is None:
        return
    size = model.tokenizer.vocab_size
    if neural.is_ranked and neural.ranked_tokens > size:
        raise UsageError(
            f"--ranked-tokens is {neural.ranked_tokens}, the tokenizer has {size}; give 1 to {size}"
        )
    _check_card(record, neural, model)


def _check_card(record: TaskRecord, neural: NeuralDrafting, model: BaseModel) -> None:
    folder = _folder(neural.drafter)
    try:
        adapter = resolve_folder(record.adapter) if record.adapter else None
        # Of a model of the hub the weights may not be here; the service looks when it loads them.
        weighed = any(model.folder.glob("*.safetensors"))
        target = target_fingerprint(model.folder, adapter) if weighed else None
        fitting_card(folder, model.tokenizer.fingerprint, target)
    except (ValueError, OSError, EngineError) as error:
        raise UsageError(f"--drafter {neural.drafter}: {error}") from error


def _folder(drafter: str) -> Path:
    try:
        return resolve_folder(drafter, weights=False)
    except TextError as error:
        raise UsageError(f"--drafter: {error}; `tasc train-drafter` writes such folders") from error


def check_adapter(folder: Path, base: Path) -> None:
    """Whether a PEFT folder is LoRA in safetensors, of a rank, with shapes of the base model's.

    Shapes are compared where the base folder has weights of the same name.

    Raises:
        ValueError: It is not; the message names what differs.
        OSError: A file cannot be read.
    """
    path = folder / _ADAPTER_CONFIG
    config = json_object(path, saved_by="peft")
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{path} says peft_type {kind!r}; only LORA is served")
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{path} says rank r {rank!r}; it must be above 0")
    pairs = _pairs(folder, None if config.get("rank_pattern") else rank)
    if config.get("fan_in_fan_out"):
        return  # the base model's weights lie the other way round
    _check_shapes(pairs, float_shapes(base), str(config.get("base_model_name_or_path")))


def json_object(path: Path, saved_by: str) -> dict[str, Any]:
    """What a file says.

    Args:
        saved_by: What writes such files, for the message where there is none.

    Raises:
        ValueError: There is no such file, or it holds no JSON object.
        OSError: It cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path.parent} has no {path.name}; name a folder saved by {saved_by}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); fetch or save it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; fetch or save it again")
    return content


def _pairs(folder: Path, rank: int | None) -> dict[str, dict[str, Shape]]:
    """The shapes of both matrices of each module, by module and side; ``rank`` None allows any."""
    path = folder / _WEIGHTS
    if not path.is_file():
        found = f", only {_PICKLE}, which can run code" if (folder / _PICKLE).is_file() else ""
        raise ValueError(f"{folder} has no {_WEIGHTS}{found}; save it with safe_serialization=True")
    pairs: dict[str, dict[str, Shape]] = {}
    for name, shape in _shapes(path).items():
        if found_ := _LORA.fullmatch(name):
            pairs.setdefault(found_["module"], {})[found_["side"]] = shape
    if not pairs:
        raise ValueError(f"{path} holds no LoRA weights (lora_A, lora_B); save the adapter again")
    for module, pair in pairs.items():
        _check_pair(path, module, pair, rank)
    return pairs


def _check_pair(path: Path, module: str, pair: Mapping[str, Shape], rank: int | None) -> None:
    """A is ``[rank, in]``, B ``[out, rank]``."""
    shapes = {side: list(shape) for side, shape in sorted(pair.items())}
    a, b = shapes.get("A", []), shapes.get("B", [])
    if not (len(a) == len(b) == 2 and a[0] == b[1] > 0 and rank in (None, a[0])):
        wanted = f"r {rank}" if rank else "one r"
        raise ValueError(
            f"{path} has {module} in shapes {shapes}; need A [r, in] and B [out, r] of {wanted}: "
            "save the adapter again"
        )


def _shapes(path: Path, dtypes: Collection[str] = ()) -> dict[str, Shape]:
    """The shapes of a file's tensors by name; of certain types alone where some are given.

    Raises:
        ValueError: It is no safetensors file.
        OSError: It cannot be read.
    """
    try:
        with safe_open(path, "numpy") as file:
            found = {name: file.get_slice(name) for name in file.offset_keys()}
            return {
                name: tuple(tensor.get_shape())
                for name, tensor in found.items()
                if not dtypes or tensor.get_dtype() in dtypes
            }
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file; fetch it again (git lfs pull?)"
        ) from error


def weight_files(base: Path) -> list[Path]:
    """Files of a model's weights, without other copies of them, such as a consolidated one."""
    return sorted(base.glob("model*.safetensors")) or sorted(base.glob("*.safetensors"))


def float_shapes(base: Path) -> dict[str, Shape]:
    """The shapes of a model's weights that are not packed, by their headers alone.

    Raises:
        ValueError: A file is no safetensors file, or is cut off.
        OSError: One cannot be read.
    """
    files = weight_files(base)
    return {name: shape for path in files for name, shape in _shapes(path, _FLOATS).items()}


def _check_shapes(
    pairs: Mapping[str, Mapping[str, Shape]], base: Mapping[str, Shape], trained_for: str
) -> None:
    for module, pair in pairs.items():
        theirs = base.get(f"{module}.weight")
        ours = (pair["B"][0], pair["A"][1])
        if theirs is not None and len(theirs) == 2 and ours != theirs:
            raise ValueError(
                f"it adapts {module} of {list(ours)}, the model's has {list(theirs)}; it was "
                f"trained for {trained_for}: name that model, or another adapter"
            )
