"""Loads transformers causal LMs from folders, optionally quantised or with an adapter.

Weights are read from safetensors only: pickled files are never read.
"""

import logging
import os
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from tasc_engine.errors import UnsupportedModel, is_out_of_memory
from tasc_engine.lora.adapter_folder import MERGE, safe_weights
from tasc_engine.model.adapter_fit import require_fit
from tasc_engine.model.folder import (
    in_words,
    int8_fault,
    recurrent_state,
    require_model,
    require_weights,
)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
Quantization = Literal["nf4", "int8", "int8-dynamic", "int8-dynamic-float-head"]
log = logging.getLogger(__name__)
_IMPORTING = threading.Lock()
_LORA = re.compile(r"\.lora_[AB]\.")
# Errors of libraries for a damaged folder, or for one that needs missing packages.
_FAULTS = (ImportError, OSError, RuntimeError, SafetensorError, StrictDataclassError, ValueError)


@dataclass(frozen=True)
class ModelSource:
    """Where a target comes from: local folders, a dtype of ``DTYPES`` and a torch device.

    Attributes:
        adapter: Folder of a LoRA adapter that all rows use, as part of the model.
        quantization: Quantisation of linear layers by bitsandbytes: ``nf4`` (Dettmers et al. 2023,
            arXiv 2305.14314) or ``int8`` (Dettmers et al. 2022, arXiv 2208.07339, without
            outliers); or ``int8-dynamic``, int8 products on a CPU (see `CompiledLinear`), or
            ``int8-dynamic-float-head``, the same but for the LM head.
        adapters: Names and folders of LoRA adapters; each row uses one or none of them.

    Raises:
        ValueError: Both ``adapter`` and ``adapters`` are given, a name occurs twice, the
            quantization is unknown, or it is combined with another setting that it excludes.
    """

    folder: Path
    adapter: Path | None = None
    dtype: str = "float32"
    device: str = "cpu"
    quantization: Quantization | None = None
    adapters: tuple[tuple[str, Path], ...] = ()

    def __post_init__(self) -> None:
        if self.adapter is not None and self.adapters:
            raise ValueError(
                f"adapter is {self.adapter}, and adapters has {len(self.adapters)} more; move the "
                "adapter to adapters, or leave adapters out"
            )
        names = [name for name, _ in self.adapters]
        if len(set(names)) < len(names):
            raise ValueError(f"adapters has {', '.join(names)}; each name may occur only once")
        if self.quantization not in (None, *get_args(Quantization)):
            known = ", ".join(get_args(Quantization))
            raise ValueError(f"quantization is {self.quantization!r}; use {known} or None")
        if self.is_int8:
            self._require_int8()
        if self.quantization and self.dtype == "float64":
            raise ValueError(
                f"quantization is {self.quantization} and dtype is float64, which quantised layers "
                "do not support; use float32, bfloat16 or float16"
            )

    @property
    def is_int8(self) -> bool:
        """Whether this project's int8 products are used."""
        return self.quantization in ("int8-dynamic", "int8-dynamic-float-head")

    @property
    def int8_head(self) -> bool:
        """Whether the LM head's product is of int8, too."""
        return self.quantization == "int8-dynamic"

    def _require_int8(self) -> None:
        if self.dtype != "float32":
            raise ValueError(
                f"quantization is {self.quantization} and dtype is {self.dtype}; everything but "
                "products is float32: leave dtype out"
            )
        if torch.device(self.device).type != "cpu":
            raise ValueError(
                f"quantization is {self.quantization} and device is {self.device}; it runs on CPUs "
                "alone: use int8 or nf4, or set device to cpu"
            )


def max_positions(folder: Path) -> int:
    """Maximum number of positions of a model; ``sys.maxsize`` for a model without a limit.

    Raises:
        UnsupportedModel: transformers cannot read the folder's settings.
    """
    return positions_of(_config(folder))


def positions_of(config: Any) -> int:
    """`max_positions` from a transformers config."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if found is None else int(found)


def load_model(source: ModelSource) -> Any:
    """Loads a transformers model in evaluation mode, including ``source.adapter``.

    Raises:
        UnsupportedModel: The model is not a causal LM; its weights are not in safetensors, are
            damaged or incomplete, or have other shapes than its settings define; its folder also
            has an adapter; the model keeps a recurrent state; a package is missing; or the
            quantisation lets rows influence each other.
    """
    transformers_logging.disable_progress_bar()
    # bitsandbytes logs missing kernels of other packages, and each int8 product that it rounds.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.getLogger("transformers.modeling_utils").addFilter(_no_report)
    config = checked_config(source.folder)
    if source.is_int8 and (fault := int8_fault(config.to_dict())):
        raise UnsupportedModel(fault)
    if source.adapter is not None:
        quantized = source.quantization is not None and not source.is_int8
        require_fit(source.adapter, source.folder, quantized=quantized)  # before weights are read
    quantised = _quantisation(source, config)
    # Eager attention computes the reference logits; other implementations leave out soft caps.
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=DTYPES[source.dtype],
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `require_whole` refuses them
            **quantised,
        )
    except _FAULTS as error:
        if is_out_of_memory(error):
            raise
        raise _unloadable(source.folder, error) from error
    model, found = loaded
    require_whole(source.folder, found)
    if source.adapter is not None:
        model = _adapted(model, source.adapter, merge=not quantised)
    return (model if quantised else model.to(source.device)).eval()


def checked_config(folder: Path) -> Any:
    """The transformers config of a folder with a causal LM that can be served.

    Raises:
        UnsupportedModel: The folder has no such model, has other files that would change its
            weights, or the model keeps a recurrent state.
    """
    require_model(folder)
    config = _config(folder)
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder; a causal LM is needed")
    if state := recurrent_state(config.get_text_config().to_dict()):
        raise UnsupportedModel(in_words(state))
    require_weights(folder)
    return config


def _config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except _FAULTS as error:
        raise _unloadable(folder, error) from error


def _no_report(record: logging.LogRecord) -> bool:
    """Drops transformers' table of weights that do not fit; `require_whole` reports them."""
    return "LOAD REPORT" not in str(record.msg)


def _unloadable(folder: Path, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"transformers {transformers.__version__} does not load {folder} ({_short(error)}); save "
        "it again with save_pretrained(folder), or name another model"
    )


def _short(error: Exception) -> str:
    """The beginning of a library's message, in whole words."""
    kind = f"{type(error).__name__}: " if isinstance(error, LookupError) else ""
    return kind + textwrap.shorten(str(error), 200, placeholder=" ...")


def require_whole(folder: Path, found: Mapping[str, Any]) -> None:
    """Check that a model's files have all of its weights, since missing weights would be random.

    Weights that the model does not use, such as those for images or sound, are only logged.

    Args:
        found: The loading info of transformers.

    Raises:
        UnsupportedModel: Weights are missing or have other shapes.
    """
    if unused := sorted(found["unexpected_keys"]):
        log.warning(
            "%s has %d weights that config.json does not define, such as %s; they are left out: "
            "if the model needs them, correct config.json",
            folder, len(unused), unused[0],
        )  # fmt: skip
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModel(
            f"{folder} lacks {len(missing)} weights, such as {missing[0]}; fetch or save the model "
            "again"
        )
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise UnsupportedModel(
            f"{folder}: weight {name} has shape {list(stored)}, but config.json expects "
            f"{list(wanted)}; fetch or save weights and config.json together"
        )


def _quantisation(source: ModelSource, config: Any) -> dict[str, Any]:
    """Arguments for transformers; a quantised model is created on its device and stays there."""
    own = _as_mapping(getattr(config, "quantization_config", None))
    if own and source.quantization:
        raise UnsupportedModel(
            f"{source.folder} is quantised already ({own.get('quant_method')}); leave "
            "quantization out"
        )
    threshold = own.get("llm_int8_threshold", 6.0)
    if own.get("load_in_8bit") and threshold > 0:
        raise UnsupportedModel(
            f"{source.folder} is 8-bit with llm_int8_threshold {threshold}: which columns count as "
            "outliers depends on all rows of a step, so an answer would depend on other requests; "
            "save the model with threshold 0, or load the unquantised one with quantization int8"
        )
    if source.is_int8 or (not own and not source.quantization):
        return {}
    asked = {"quantization_config": _asked(source)} if source.quantization else {}
    return {"device_map": {"": source.device}, **asked}


def _asked(source: ModelSource) -> BitsAndBytesConfig:
    if source.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[source.dtype],
    )


def _as_mapping(settings: Any) -> Mapping[str, Any]:
    if settings is None or isinstance(settings, Mapping):
        return settings or {}
    found: Mapping[str, Any] = settings.to_dict()
    return found


def _adapted(model: Any, folder: Path, merge: bool) -> Any:
    """Returns the model with an adapter: merged, or as separate weights in a quantised model.

    Merged weights would have to be quantised again, which rounds away most of a small update.
    Merging before quantisation would need memory for the whole unquantised model. So a quantised
    layer keeps its weights, and the adapter's result is added to the layer's output, as when such
    adapters are trained.
    """
    with _without_compiler():
        import peft

    with safe_open(safe_weights(folder), "pt") as file:
        own = set(file.keys())
    with warnings.catch_warnings():
        # peft 0.21 uses an older name that transformers 5.23 does not have.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # refused below
        # This warning is about heads to which `_merged` gives their own weights.
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings|.* no longer tied")
        outside = model.get_input_embeddings(), model.get_output_embeddings()
        try:
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
            _require_used(adapted, folder, own)
            return _merged(adapted, *outside) if merge else adapted.base_model.model
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModel(
                f"peft {peft.__version__} does not load the adapter in {folder} ({_short(error)}); "
                f"name the model that it was trained for, or {MERGE}"
            ) from error


def _merged(adapted: Any, embeddings: Any, head: Any) -> Any:
    """Returns the model with the adapter merged into its weights.

    Args:
        embeddings, head: The base model's own modules. If they share weights and LoRA changes
            one of them, the head gets weights of its own, so that the other stays unchanged.
    """
    layers = {id(getattr(module, "base_layer", None)) for module in adapted.modules()}
    if head.weight is embeddings.weight and layers & {id(embeddings), id(head)}:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return adapted.merge_and_unload()


def _require_used(adapted: Any, folder: Path, own: Set[str]) -> None:
    """Refuse an adapter if peft dropped some of its weights or initialised missing ones."""
    known = {name.replace(".default", "") for name in adapted.state_dict()}
    places = {name.replace(".modules_to_save", "") for name in known} | known
    places |= {name.removesuffix(".weight") for name in places}
    if unused := sorted(own - places):
        raise UnsupportedModel(
            f"the adapter in {folder} belongs to another model: this model has no {unused[0]}; "
            "name the model that it was trained for, or another adapter"
        )
    if missing := sorted(name for name in known - own if _LORA.search(name)):
        raise UnsupportedModel(
            f"the adapter in {folder} lacks {missing[0]}; save the adapter again, or name the "
            "model that it was trained for"
        )


@contextmanager
def _without_compiler() -> Iterator[None]:
    """While active, peft's import of bitsandbytes skips torch's Inductor, which saves 0.9 s.

    bitsandbytes needs Inductor only on devices for which it has no kernels. It has kernels for CPUs
    and CUDA.
    """
    name = "TORCHDYNAMO_DISABLE"
    with _IMPORTING:
        before = os.environ.get(name)
        if before is None and "bitsandbytes" not in sys.modules:
            os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(name, None)
