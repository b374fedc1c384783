"""Memory of a GPU: how much one engine may use, and what its KV cache may take of it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tasc_engine.config import EngineConfig

log = logging.getLogger(__name__)
_MB = 1e6


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device.

    Attributes:
        total: All of its memory.
        free: Memory that no process uses.
        used: Memory that this process uses.
    """

    total: int
    free: int
    used: int


# Returns the memory of a device now; None if an engine's memory on it is not limited, as on a CPU.
MemoryOf = Callable[[torch.device], DeviceMemory | None]


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Asks CUDA; see `MemoryOf`. Unused memory that torch keeps is returned to the device first."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device))


@dataclass(frozen=True)
class Room:
    """Bytes that a KV cache may take, and how they were computed, for messages."""

    nbytes: int
    reason: str


def room_for_cache(memory: DeviceMemory, config: EngineConfig) -> Room:
    """Returns the bytes that the KV cache may take after the weights are loaded.

    Weights, prefix cache and KV cache together take at most ``gpu_memory_share`` of the process's
    part of the device, and the two caches at most this share of what is free. The rest is for
    graphs and working memory.
    """
    share, part = config.gpu_memory_share, config.gpu_part
    most = min(share * part * memory.total - memory.used, share * memory.free)
    reason = (
        f"gpu_memory_share is {share:g}, num_gpus gives {part:g} of {memory.total / _MB:,.0f} MB, "
        f"{memory.used / _MB:,.0f} MB are used after the weights are loaded, "
        f"{memory.free / _MB:,.0f} MB are free, and prefix_cache_bytes is "
        f"{config.prefix_cache_bytes}"
    )
    return Room(max(int(most) - config.prefix_cache_bytes, 0), reason)


def limit_process(
    device: torch.device,
    config: EngineConfig,
    limit: Callable[[float, int | None], None] = torch.cuda.set_per_process_memory_fraction,
) -> None:
    """Limits torch's memory on a GPU that several processes share; otherwise does nothing.

    Args:
        limit: Takes the part of the memory, and the number of the GPU or None for the current one.
    """
    if device.type == "cuda" and config.gpu_part < 1:
        log.info("this process may use %g of the memory of %s", config.gpu_part, device)
        limit(config.gpu_part, device.index)
