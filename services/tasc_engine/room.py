"""Whether a model fits the memory of this machine beside what is there already.

A process that takes more than there is is killed, with all answers in it; so it is asked before.
GPUs are not looked at: there torch says by itself what does not fit.
"""

import math
from pathlib import Path

from safetensors import safe_open

from tasc_engine.loading import DTYPES, ModelSource

_COPIES = 2  # as it is read, and laid out for its kernels
_SPARE = 0.05  # of all memory; where less is free, Ray ends processes
_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def require_room(source: ModelSource) -> None:
    """Raises MemoryError: a model would not fit, so its weights are not read."""
    files = sorted(source.folder.glob("*.safetensors"))
    needed = _COPIES * sum(map(_parameters, files)) * DTYPES[source.dtype].itemsize
    for free, whole in _memory():
        if free - needed < _SPARE * whole:
            raise MemoryError(
                f"{source.folder} takes up to {needed:,} bytes beside the model that is served; "
                f"{free:,} of {whole:,} bytes are free and {_SPARE:.0%} stay so; restart the "
                "service to use it, or give it more memory"
            )


def _parameters(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


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
