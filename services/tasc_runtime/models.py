"""Name, tokenizer and prompts of a model, without loading it and without torch."""

import re
from pathlib import Path

from pydantic import TypeAdapter

from tasc_runtime.errors import ServiceError
from tasc_store import TaskRecord
from tasc_text import (
    ChatTemplate,
    MessageError,
    PromptTemplate,
    TaskTokenizer,
    Template,
    resolve_folder,
)
from tasc_text.template import TemplateError, UnquotedTemplate

AUTO = "auto"  # a model's own chat template, or the fastest dtype
PROCESSOR = Path("/proc/cpuinfo")
_BFLOAT16, _INT8 = r"bf16\b", r"\bavx512_vnni\b"  # in the flags of a processor
_PROMPT = "tasc_prompt.json"
_TEMPLATES = TypeAdapter[Template](PromptTemplate | ChatTemplate)


def load_tokenizer(record: TaskRecord) -> TaskTokenizer:
    """Loads the tokenizer of a task's model.

    Raises:
        ServiceError: The tokenizer differs from the one that the task was registered with.
        TextError: The tokenizer cannot be loaded.
    """
    folder = resolve_folder(record.model, record.revision, weights=False)
    tokenizer = TaskTokenizer.from_folder(folder)
    if tokenizer.fingerprint != record.fingerprint:
        raise ServiceError(
            f"task {record.name} was registered with tokenizer {record.fingerprint}, {folder} has "
            f"{tokenizer.fingerprint}; register the task again"
        )
    return tokenizer


def dtype_here(dtype: str, quantization: str | None = None, device: str = AUTO) -> str:
    """Returns a dtype; ``auto`` is the one that a device of this machine computes fastest.

    That is bfloat16 on a processor or GPU with instructions for it, otherwise float16 on a GPU, and
    float32 on a CPU and with int8-dynamic. Answers depend on the dtype, so a task keeps it.
    """
    if dtype != AUTO:
        return dtype
    if quantization is not None and quantization.startswith("int8-dynamic"):
        return "float32"
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            has = torch.cuda.is_bf16_supported(including_emulation=False)
            return "bfloat16" if has else "float16"
    return "bfloat16" if _has(_BFLOAT16) else "float32"


def fastest_on_cpu() -> dict[str, str]:
    """The ``dtype``, and the ``quantization`` if there is one, that small models are fastest in.

    That is int8-dynamic on a processor with VNNI of AVX-512, otherwise the dtype of ``auto``.
    """
    if _has(_INT8):
        return {"dtype": "float32", "quantization": "int8-dynamic"}
    return {"dtype": dtype_here(AUTO, device="cpu")}


def _has(instructions: str) -> bool:
    """Whether the flags of this processor match a pattern."""
    flags = PROCESSOR.read_text() if PROCESSOR.is_file() else ""
    return re.search(instructions, flags) is not None


def template_of(record: TaskRecord) -> Template:
    """The template of a task's prompts."""
    made = record.chat or PromptTemplate(record.template)
    return UnquotedTemplate(made) if record.allow_special_tokens_in_input else made


def chat_template(folder: Path, template: str = AUTO) -> ChatTemplate:
    """Reads a chat template with the special tokens of a model, as transformers does.

    Args:
        folder: Folder of the model or of its tokenizer, or a file in it.
        template: ``auto`` for the model's own template, a file, or the text of a template.

    Raises:
        TemplateError: There is no template, or it is not valid Jinja or refuses a user message.
        ServiceError: transformers cannot read the tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        folder = folder if folder.is_dir() else folder.parent
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServiceError(
            f"transformers cannot read the tokenizer of {folder}: {error}"
        ) from error
    try:
        source = template
        if template == AUTO:
            source = str(tokenizer.get_chat_template())
        elif "{" not in template:
            source = Path(template).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # no template, no default among several, or not UTF-8
        raise TemplateError(
            f"chat_template is {template}, which cannot be read ({error}); name a file with a "
            "Jinja template"
        ) from error
    made = ChatTemplate(source, tuple(tokenizer.special_tokens_map.items()))
    try:
        made.render("a")
    except MessageError as error:
        raise TemplateError(f"chat_template cannot be used: {error}") from error
    return made


def keep_prompt(folder: Path, template: Template) -> None:
    """Writes the prompt of a fine-tune to the folder of its model or adapter.

    Whether inputs may spell special tokens remains a setting of each task.
    """
    made = template.made if isinstance(template, UnquotedTemplate) else template
    text = _TEMPLATES.dump_json(made, indent=1)
    (folder / _PROMPT).write_bytes(text)


def trained_prompt(*places: str | Path | None) -> Template | None:
    """Returns the prompt in the first of these folders to which `keep_prompt` wrote one.

    Args:
        places: Folders of adapters and models; hub names and None are skipped.

    Raises:
        ServiceError: The file is damaged.
    """
    for path in (Path(place).expanduser() / _PROMPT for place in places if place):
        if path.is_file():
            try:
                return _TEMPLATES.validate_json(path.read_bytes())
            except (OSError, ValueError) as error:
                raise ServiceError(
                    f"{path} is not what `tasc finetune` wrote; remove it, and name the prompt"
                ) from error
    return None


def model_name(record: TaskRecord) -> str:
    """A target's display name: a hub name unchanged, or the last part of a folder."""
    return Path(record.model).name if Path(record.model).is_absolute() else record.model
