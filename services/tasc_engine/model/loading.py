"""From folders to models: a transformers causal LM, quantised or not, with an adapter in it or not.

Weights come from safetensors alone: nothing pickled is ever read. It knows no rows and no steps.
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
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from tasc_engine.errors import UnsupportedModel, is_out_of_memory
from tasc_engine.lora.adapter_folder import MERGE, safe_weights
from tasc_engine.model.adapter_fit import require_fit
from tasc_engine.model.folder import in_words, recurrent_state, require_model, require_weights

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
Quantization = Literal["nf4", "int8"]
log = logging.getLogger(__name__)
_IMPORTING = threading.Lock()
_LORA = re.compile(r"\.lora_[AB]\.")
# What libraries raise for a folder that is damaged, or that needs packages that are not there.
_FAULTS = (ImportError, OSError, RuntimeError, SafetensorError, StrictDataclassError, ValueError)


@dataclass(frozen=True)
class ModelSource:
    """Where a target comes from: local folders, a dtype of ``DTYPES`` and a torch device.

    Attributes:
        adapter: Folder of a LoRA adapter that all rows use, as part of the model.
        quantization: Of linear layers, by bitsandbytes: ``nf4`` (Dettmers et al. 2023, arXiv
            2305.14314) or ``int8`` (Dettmers et al. 2022, arXiv 2208.07339, without outliers).
        adapters: Names and folders of LoRA adapters of which each row uses one or none.

    Raises:
        ValueError: Both ``adapter`` and ``adapters``, a name twice, an unknown quantization, or one
            in float64.
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
                f"adapter is {self.adapter} and adapters has {len(self.adapters)}; name it among "
                "adapters, or leave them out"
            )
        names = [name for name, _ in self.adapters]
        if len(set(names)) < len(names):
            raise ValueError(f"adapters has {', '.join(names)}; each name may be there once")
        if self.quantization not in (None, "nf4", "int8"):
            raise ValueError(f"quantization is {self.quantization!r}; use nf4, int8 or None")
        if self.quantization and self.dtype == "float64":
            raise ValueError(
                f"quantization is {self.quantization} and dtype float64, in which it has no "
                "products; use float32, bfloat16 or float16"
            )


def max_positions(folder: Path) -> int:
    """Most positions a model was made for; a model without a limit has ``sys.maxsize``.

    Raises:
        UnsupportedModel: transformers cannot read the folder's settings.
    """
    return positions_of(_config(folder))


def positions_of(config: Any) -> int:
    """`max_positions` by a transformers config."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if found is None else int(found)


def load_model(source: ModelSource) -> Any:
    """A transformers model in evaluation mode, ``source.adapter`` in it.

    Raises:
        UnsupportedModel: It is no causal LM, its weights are not in safetensors, are damaged, are
            not all there or have other shapes than its settings say, an adapter lies beside them,
            it keeps a recurrent state, it needs a package that is missing, or it is quantised in a
            way in which rows change each other.
    """
    transformers_logging.disable_progress_bar()
    # It logs which kernels of other packages it lacks, and at each int8 product that it rounds.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.getLogger("transformers.modeling_utils").addFilter(_no_report)
    config = checked_config(source.folder)
    if source.adapter is not None:
        quantized = source.quantization is not None
        require_fit(source.adapter, source.folder, quantized=quantized)  # before the model is read
    quantised = _quantisation(source, config)
    # What a model says by itself is what its eager attention says: others leave soft caps out.
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=DTYPES[source.dtype],
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
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
        UnsupportedModel: It has none, other files would change its weights, or the model keeps a
            recurrent state.
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
    """Leaves out the table of weights that do not fit: `require_whole` says it in a line each."""
    return "LOAD REPORT" not in str(record.msg)


def _unloadable(folder: Path, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"transformers {transformers.__version__} does not load {folder} ({_short(error)}); save "
        "it again with save_pretrained(folder), or name another model"
    )


def _short(error: Exception) -> str:
    """The begin of a library's message, in whole words."""
    kind = f"{type(error).__name__}: " if isinstance(error, LookupError) else ""
    return kind + textwrap.shorten(str(error), 200, placeholder=" ...")


def require_whole(folder: Path, found: Mapping[str, Any]) -> None:
    """Check that a model's files have all of its weights; those that they lack would be random.

    Weights without a place may be those of images or sound: they are logged.

    Args:
        found: The loading info of transformers.

    Raises:
        UnsupportedModel: Weights are missing or have other shapes.
    """
    if unused := sorted(found["unexpected_keys"]):
        log.warning(
            "%s has %d weights that config.json has no place for, such as %s; they are left out: "
            "if the model needs them, mend config.json",
            folder, len(unused), unused[0],
        )  # fmt: skip
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModel(
            f"{folder} lacks {len(missing)} weights, such as {missing[0]}; fetch or save the model "
            "again"
        )
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise UnsupportedModel(
            f"{folder} has weights {name} of {list(stored)}, its config.json says {list(wanted)}; "
            "fetch or save weights and config.json together"
        )


def _quantisation(source: ModelSource, config: Any) -> dict[str, Any]:
    """Arguments of transformers; a quantised model is made on its device and stays there."""
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
            "outliers depends on all rows of a step, so neighbours would change answers; save it "
            "with threshold 0, or load the unquantised model with quantization int8"
        )
    if not own and not source.quantization:
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
    """The model with an adapter merged; beside the weights of a quantised one.

    Merged weights would have to be quantised again, which rounds most of a small update away; to
    quantise them the first time would take the whole model in full. So a quantised layer keeps its
    weights and what the adapter adds is added to its output: how such adapters are trained.
    """
    with _without_compiler():
        import peft

    with safe_open(safe_weights(folder), "pt") as file:
        own = set(file.keys())
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by an older name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # refused below
        # Heads with weights of their own are meant.
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
    """The model with the adapter in its weights.

    Args:
        embeddings, head: The base model's own modules. If they share weights and LoRA changes
            one of them, the head gets weights of its own, so that the other is not changed.
    """
    layers = {id(getattr(module, "base_layer", None)) for module in adapted.modules()}
    if head.weight is embeddings.weight and layers & {id(embeddings), id(head)}:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return adapted.merge_and_unload()


def _require_used(adapted: Any, folder: Path, own: Set[str]) -> None:
    """peft drops weights of layers that the model has not, and fills in those that are missing."""
    known = {name.replace(".default", "") for name in adapted.state_dict()}
    places = {name.replace(".modules_to_save", "") for name in known} | known
    places |= {name.removesuffix(".weight") for name in places}
    if unused := sorted(own - places):
        raise UnsupportedModel(
            f"the adapter in {folder} is another model's: the model has no {unused[0]}; name the "
            "model that it was trained for, or another adapter"
        )
    if missing := sorted(name for name in known - own if _LORA.search(name)):
        raise UnsupportedModel(
            f"the adapter in {folder} lacks {missing[0]}; save the adapter again, or name the "
            "model that it was trained for"
        )


@contextmanager
def _without_compiler() -> Iterator[None]:
    """In the block, importing bitsandbytes as peft does leaves out torch's Inductor: 0.9 s.

    bitsandbytes compiles functions for devices without kernels of its own: neither CPUs nor CUDA.
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
