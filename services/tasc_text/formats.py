"""Recognises model files of other programs, and explains how to get a supported folder."""

from pathlib import Path

_SAFE = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".xz")
# Model formats of other programs by file name suffix. None can be converted to transformers.
_OTHERS = {
    ".onnx": "an ONNX model",
    ".xml": "an OpenVINO model",
    ".engine": "a TensorRT model",
    ".tflite": "a TensorFlow Lite model",
    ".mlpackage": "a Core ML model",
    ".h5": "a TensorFlow model",
    ".msgpack": "a Flax model",
    ".nemo": "a NeMo model",
}


def file_in_words(path: Path) -> str:
    """Describes a file that was named instead of a folder, and a remedy."""
    ends = path.suffix.lower()
    if ends == ".gguf":
        return _gguf(path)
    if ends == _SAFE:
        return f"{path} is a file of weights; name its folder, {path.parent}"
    if ends in _PICKLED:
        return f"{path} is {_pickled(path.parent)}"
    if ends in _ARCHIVES:
        return f"{path} is an archive; unpack it and name the folder"
    if ends in _OTHERS:
        return f"{path} is {_other(_OTHERS[ends])}"
    return f"{path} is a file; name a folder, such as {path.parent}"


def other_format(folder: Path) -> str | None:
    """Describes the weights in a folder if none are in safetensors, and a remedy.

    Returns:
        None if some weights are in safetensors, or the format is unknown.
    """
    files = sorted(p for pattern in ("*", "onnx/*", "original/*") for p in folder.glob(pattern))
    ends = {path.suffix.lower(): path for path in reversed(files)}
    if _SAFE in ends:
        return None
    if ".gguf" in ends:
        return _gguf(ends[".gguf"])
    if found := next(filter(None, map(_OTHERS.get, ends)), None):
        return f"{folder} holds {_other(found)}"
    if pickled := next((ends[end] for end in _PICKLED if end in ends), None):
        return f"{folder} has {pickled.name}, {_pickled(folder)}"
    return None


def _gguf(path: Path) -> str:
    """The lines of Python are joined, so that the message is one line."""
    place = f"{str(path.parent)!r}, gguf_file={path.name!r}"
    saved = f".save_pretrained({path.stem!r})"
    lines = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig",
        # Without this config, transformers treats the model as quantised and refuses to save it.
        f"AutoModelForCausalLM.from_pretrained({place}, "
        f"quantization_config=GgufConfig(dequantize=True)){saved}",
        f"AutoTokenizer.from_pretrained({place}){saved}",
    )
    return (
        f"{path} is a GGUF file of llama.cpp; name the model that it was made from, or convert it "
        f"with pip install gguf and three lines of Python: {'; '.join(lines)}"
    )


def _pickled(folder: Path) -> str:
    return (
        "weights in pickle, which may run code; if you trust them, load them and save them as "
        f"safetensors: AutoModelForCausalLM.from_pretrained({str(folder)!r})"
        ".save_pretrained(another folder), and the tokenizer likewise"
    )


def _other(what: str) -> str:
    return f"{what}, which is not supported; name the transformers model that it was made from"
