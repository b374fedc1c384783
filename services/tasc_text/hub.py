"""Where a model's files are: a local folder as it is, a Hugging Face name through the hub's cache.

Only this module knows of the hub, and it imports the client when a name is not a folder, so that
work on local folders needs neither network nor `huggingface_hub`.
"""

from pathlib import Path

from tasc_text.errors import TextError

SETTINGS_FILES = ("*.json", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors",)


def resolve_folder(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the local folder of a model, downloading it if it is a hub name.

    Args:
        model: A folder, or a hub name such as ``Qwen/Qwen2.5-0.5B``.
        revision: A hub branch, tag or commit; ignored for a folder.
        weights: Whether the weights are needed besides tokenizer and configuration.

    Raises:
        TextError: It is no folder and the hub does not have it or cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if model.startswith((".", "/", "~")):
        raise TextError(f"there is no folder {model}; check the spelling of the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*SETTINGS_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise TextError(
            f"model {model!r} is neither a folder here nor a model the Hugging Face hub gives us "
            f"({error}); check the spelling, or name a local folder"
        ) from error
