"""Which sides there are, and where their environments lie.

`make bench-env` makes an environment for each peer under ``.bench``; a peer without one is left
out. OpenVINO's exporter needs an older transformers than ours, so none of them shares our own.
llama-cpp-python did not install within five minutes where this was written: it is left out.
"""

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from engine_loop import Job
from engine_sides import Side, SideFailed
from engine_work import Work

from tasc_jobs.progress import note

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".bench"
OURS = ("plain 8", "drafted 8", "plain 1", "drafted 1", "random 8")
SETTINGS = {
    "transformers": ("plain 8", "lookup 1"),
    "openvino": ("plain 8", "lookup 8", "lookup 1"),
    "ctranslate2": ("plain 8",),
}
_VERSION = "import importlib.metadata as m; print(m.version('{}'))"
_PACKAGES = {
    "openvino": "openvino-genai",
    "ctranslate2": "ctranslate2",
}


def python_of(peer: str) -> str | None:
    """The interpreter of a peer; transformers runs in ours."""
    python = ENVIRONMENTS / peer / "bin" / "python"
    return str(python) if peer in _PACKAGES and python.is_file() else None


def version_of(peer: str) -> str | None:
    """Of a peer's package; None where it is not installed."""
    python = python_of(peer)
    if python is None:
        return None
    done = subprocess.run(
        [python, "-c", _VERSION.format(_PACKAGES[peer])], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def start(work: Work, peers: Sequence[str], folder: Path, stack: ExitStack) -> list[Side]:
    """Ours and the peers that start, closed with ``stack``; a line tells of each that does not."""
    sides = [stack.enter_context(closing(Side("ours", work.job, OURS, folder)))]
    for peer in peers:
        if peer != "transformers" and version_of(peer) is None:
            note(f"{peer} left out: not installed under {ENVIRONMENTS / peer}; `make bench-env`")
            continue
        try:
            side = Side(peer, work.job, SETTINGS[peer], folder, python_of(peer))
            sides.append(stack.enter_context(closing(side)))
        except SideFailed as error:
            note(f"{peer} left out: {error}")
    return sides


def exact(job: Job) -> Job:
    """The same rows in float32."""
    return replace(job, dtype="float32")
