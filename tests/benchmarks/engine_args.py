"""What the engine benchmark is asked, and the threads of all its processes. It imports no torch."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

TASKS = ("massive_en", "pos_ewt")
PEERS = ("transformers", "openvino", "ctranslate2")
DTYPES = ("bfloat16", "float32", "float16")
SHAPES = ("135m", "0.5b")


@dataclass(frozen=True)
class Asked:
    """The command line.

    Attributes:
        rows: Test rows of a task, from its first on.
        repeats: Timed runs of each setting.
        max_tokens: Of an answer, end-of-sequence included, with another model; the shipped one
            ends its answers itself.
    """

    rows: int
    repeats: int
    threads: int
    dtype: str
    tasks: tuple[str, ...]
    peers: tuple[str, ...]
    max_tokens: int
    model: Path | None
    demo: bool
    shape: str | None
    json: Path | None


def arguments(description: str | None) -> Asked:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=positive, default=256, help="test rows of a task (256)")
    add("--repeats", type=positive, default=3, help="timed runs of each setting (3)")
    add("--threads", type=positive, default=1, help="of each engine (1)")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of weights and products (bfloat16)")
    add("--tasks", type=listed, default=TASKS, help=",".join(TASKS))
    add("--peers", type=listed, default=PEERS, help=f"{','.join(PEERS)}; what is missing is left")
    add("--max-tokens", type=positive, default=64, help="of an answer, with --model (64)")
    add("--model", type=Path, help="another model's local folder")
    add("--demo", action="store_true", help="the shipped model, though the bench model is there")
    add("--shape", choices=SHAPES, help="random weights of this shape: cost of steps only")
    add("--json", type=Path, help="file for the JSON object as well")
    asked = Asked(**vars(parser.parse_args()))
    if unknown := (set(asked.tasks) - set(TASKS)) | (set(asked.peers) - set(PEERS)):
        parser.error(f"{', '.join(sorted(unknown))}: tasks are {TASKS}, peers are {PEERS}")
    return asked


def set_threads(threads: int) -> None:
    """For this process and those it starts; threads that wait leave the cores to others."""
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    os.environ.update(THP_MEM_ALLOC_ENABLE="1")  # as replicas have it
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; at least 1 is needed")
    return value
