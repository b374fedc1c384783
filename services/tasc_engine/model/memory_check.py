"""Whether a model fits the memory of this machine, and of its GPU, beside what is there already.

A process that takes more of the machine's than there is is killed, with all answers in it; one
that takes all of a GPU's leaves the steps of rows none. So it is asked before. It loads nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig

from tasc_engine.model.loading import DTYPES, ModelSource

_COPIES = 2  # as it is read, and joined or laid out for its kernels
# Bytes of a weight and of what it is scaled by.
_QUANTISED = {"nf4": 0.55, "int8": 1.05}
_AT_ONCE = 4  # weights that transformers reads ahead of those it has put in their places
_WHOLE_NUMBERS = ("I8", "U8")  # of files that were quantised before
_SPARE = 0.05  # of all memory; where less is free, Ray ends processes, and steps find no room
_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Need:
    """Most bytes taken at one time, of the machine's memory and of the GPU's."""

    machine: int
    gpu: int


def require_room(source: ModelSource) -> None:
    """Raises MemoryError: a model would not fit, so its weights are not read."""
    need = _need(source)
    for free, whole in _memory():
        _require(source, need.machine, free, whole, "bytes")
    if need.gpu:
        _require(source, need.gpu, *_memory_of_gpu(source.device), f"bytes of {source.device}")


def _require(source: ModelSource, needed: int, free: int, whole: int, unit: str) -> None:
    if free - needed < _SPARE * whole:
        raise MemoryError(
            f"{source.folder} takes up to {needed:,} {unit} beside the model that is served; "
            f"{free:,} of {whole:,} {unit} are free and {_SPARE:.0%} stay so; restart the "
            "service to use it, or give it more memory"
        )


def _need(source: ModelSource) -> _Need:
    sizes = list(_sizes(source))
    held = sum(own for _, own in sizes)
    if source.quantization:  # weight by weight, on the device where it stays
        ahead = _AT_ONCE * max((whole for whole, _ in sizes), default=0)
        gpu, machine = held + ahead, ahead
    else:
        gpu, machine = _COPIES * held, held
    on_gpu = torch.device(source.device).type == "cuda"
    return _Need(machine, gpu) if on_gpu else _Need(gpu, 0)


def _sizes(source: ModelSource) -> Iterator[tuple[int, int]]:
    """Bytes of each weight as it is read, and as it is held."""
    words = int(AutoConfig.from_pretrained(source.folder).get_text_config().vocab_size)
    width = DTYPES[source.dtype].itemsize
    quantised = _QUANTISED[source.quantization] / width if source.quantization else 1
    for file in sorted(source.folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                weight = tensors.get_slice(name)
                shape = weight.get_shape()
                whole = math.prod(shape) * (1 if weight.get_dtype() in _WHOLE_NUMBERS else width)
                # What embeds tokens, and chooses them, is not quantised.
                shrinks = len(shape) == 2 and shape[0] != words
                yield whole, math.ceil(whole * quantised) if shrinks else whole


def _memory_of_gpu(device: str) -> tuple[int, int]:
    """Free and all bytes; what torch keeps of what was freed is free to it."""
    free, whole = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept, whole


def _memory() -> list[tuple[int, int]]:
    """Free and all bytes, of the machine and of the container; what nobody says is left out."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        kib = [int(lines[name].split()[0]) for name in ("MemAvailable", "MemTotal")]
        found.append((kib[0] << 10, kib[1] << 10))
    except (OSError, KeyError, ValueError):
        pass
    try:
        most = int((_CONTAINER / "memory.max").read_text())
        held = int((_CONTAINER / "memory.current").read_text())
        stat = dict(s.split() for s in (_CONTAINER / "memory.stat").read_text().splitlines())
        found.append((most - held + int(stat["inactive_file"]), most))
    except (OSError, KeyError, ValueError):  # "max" where there is no limit
        pass
    return found
