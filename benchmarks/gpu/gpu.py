"""Check and time the engine on a GPU, part by part; `gpu.sh` runs this script.

    benchmarks/gpu/gpu.sh --model FOLDER --chat --data FOLDER
    benchmarks/gpu/gpu.sh --parts answers,flips --batches 8,32
    benchmarks/gpu/gpu.sh --parts old --old ../older-checkout
    benchmarks/gpu/gpu.sh --dry-run

The parts, in the order in which they run:

answers     answers to unseen rows, plain and drafted: tokens/s, and the share of time that the GPU
            works (kernel times of one more run, which the profiler slows, over its wall time)
flips       how many answers drafts change in bfloat16 and in float32, with the margins of logits
steps       steps of random weights of 0.5 B to 8 B parameters, with 0, 8 and 32 drafts a row
peer        the same model in vLLM or, where it is not installed, in transformers with a static
            cache and torch.compile
old         answers of this checkout and of an older one (--old), in turn, in new processes
contexts    steps and prompts of the 0.5 B shape at 8k and 32k tokens
rules       top_p and a JSON schema with a vocabulary of 152k tokens, plain and drafted
adapters    steps with 0, 1, 8 and 32 LoRA adapters loaded, for rows that use them or do not
quantised   answers with nf4 and int8 weights (bitsandbytes)
equality    float32 answers against `generate` of transformers; tiny models, adapters, draws
tests       the tests of kernels and graphs (pytest)

Each part is a process of its own and ends within three minutes. Its figures are in OUT/PART.json as
soon as they are known, so a part that fails loses no other. `prepare` runs first where its results
are not in WORK: without --model, it trains a model of SmolLM2-135M's shape for a minute on the rows
of --data. Figures go to stderr; the last line of stdout is one JSON object with all results. A dry
run has tiny sizes in float32 on a CPU, and its figures have no meaning. Relative paths begin at the
root of the repository.
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    ROOT,
    add_parts,
    digits,
    finish,
    folder,
    git_revision,
    listed,
    parser_of,
    read_json,
    to_stderr,
    versions,
    write_json,
)

PARTS = (
    "answers", "flips", "steps", "peer", "old", "contexts", "rules", "adapters", "quantised",
    "equality", "tests",
)  # fmt: skip
# The parts of each module.
_MODULES = {
    "work": ("prepare",),
    "answers": ("answers", "flips", "old", "side", "rules", "quantised"),
    "steps": ("steps", "contexts", "adapters"),
    "peers": ("peer",),
    "equality": ("equality", "tests"),
}
_PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "bitsandbytes", "vllm")
_LIMIT_S, _DRY_LIMIT_S = 180.0, 900.0


@dataclass(frozen=True)
class Here:
    """A run: its options and folders.

    Attributes:
        out: Folder of the results.
        work: Folder of the model, the index and the prompts of this model and data.
        dry: Whether sizes are tiny and the device is the CPU.
        model, data: Folders that the user gave; None for a trained model and for the shipped rows.
        chat: Whether the model's chat template makes the prompts.
        old: Checkout of an older commit.
        batches: Numbers of rows decoded together.
    """

    out: Path
    work: Path
    dry: bool = False
    model: Path | None = None
    data: Path | None = None
    chat: bool = False
    old: Path | None = None
    batches: tuple[int, ...] = (8, 32, 1, 64)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def dtype(self) -> str:
        """The dtype of timed runs."""
        return "float32" if self.dry else "bfloat16"

    def __call__(self, usual: int, dry: int) -> int:
        """A size, by the kind of run."""
        return dry if self.dry else usual


class Found:
    """The results of one part; each is written to the part's file as soon as it is known."""

    def __init__(self, here: Here, part: str) -> None:
        self._file, self._part = here.out / f"{part}.json", part
        self._found: dict[str, Any] = {"figures": {}}

    def put(self, key: str, value: Any) -> None:
        self._found[key] = value
        write_json(self._file, self._found)

    def figure(
        self,
        name: str,
        runs: float | Sequence[float],
        unit: str,
        ceiling: float | None = None,
        **more: Any,
    ) -> None:
        """Print and keep a figure, or the median of repeated runs with their extremes.

        Args:
            ceiling: The best possible value: the least of times, the greatest of other units.
        """
        values = sorted(runs) if isinstance(runs, Sequence) else [runs]
        kept: dict[str, Any] = {"value": median(values), "unit": unit}
        said = f"{self._part}: {name}: {digits(kept['value'])} {unit}"
        if len(values) > 1:
            kept |= {"runs": len(values), "least": values[0], "greatest": values[-1]}
            kept["p95"] = values[int(0.95 * len(values))]
            said += f" ({digits(values[0])} to {digits(values[-1])})"
        if ceiling is not None:
            share = ceiling / kept["value"] if unit == "ms" else kept["value"] / ceiling
            kept |= {"ceiling": ceiling, "of_ceiling": share}
            said += f", ceiling {digits(ceiling)}, {share:.2f} of it"
        to_stderr(said + "".join(f", {key} {_said(value)}" for key, value in more.items()))
        self.put("figures", self._found["figures"] | {name: kept | more})


def _said(value: Any) -> str:
    return digits(value) if isinstance(value, float) else str(value)


def main() -> int:
    options = arguments()
    task = (options.dry_run, options.model, options.data, options.chat)
    here = Here(
        options.out, options.work / f"{zlib.crc32(repr(task).encode()):x}", *task,
        options.old or (ROOT if options.dry_run else None), options.batches,
    )  # fmt: skip
    for made in (here.out, here.work):
        made.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        return one_part(options.one, here, options.commit)
    parts = [part for part in PARTS if part in options.parts and (part != "old" or here.old)]
    if not (here.work / "prompts.json").exists():
        parts.insert(0, "prepare")
    found = {part: whole_part(part, here) for part in parts}
    write_json(here.out / "gpu.json", found)
    finish({"dry_run": here.dry, "parts": found})
    return int(any("error" in own for own in found.values()))


def arguments() -> argparse.Namespace:
    parser, kept = parser_of(__doc__), ROOT / ".bench" / "gpu"
    add = parser.add_argument
    add_parts(parser, PARTS)
    add("--dry-run", action="store_true", help="run at toy size on the CPU")
    add("--model", type=_absolute, help="a fine-tuned model's folder (a model is trained)")
    add("--data", type=_absolute, help="folder of train.jsonl.gz, test.jsonl.gz (shipped rows)")
    add("--chat", action="store_true", help="make prompts by the model's chat template")
    add("--old", type=_absolute, help="checkout of an older commit, e308ceb4 or later")
    add("--batches", type=_numbers, default=(8, 32, 1, 64), help="rows at a time (8,32,1,64)")
    add("--out", type=Path, default=kept / "results", help="folder of the results (.bench/gpu)")
    add("--work", type=Path, default=kept / "work", help="folder of model and index (.bench/gpu)")
    add("--commit", help="the commit, for a copy of the files without git")
    add("--one", help=argparse.SUPPRESS)  # the part that this process runs
    return parser.parse_args()


def _absolute(text: str) -> Path:
    return folder(text).resolve()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, listed(text)))


def whole_part(part: str, here: Here) -> dict[str, Any]:
    """Run a part in a process; its results, and ``error`` if it did not finish."""
    to_stderr(f"{part} ...")
    (here.out / f"{part}.json").unlink(missing_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--one", part]
    # The process group is new, so that the processes of a part end with it.
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    limit, error = _DRY_LIMIT_S if here.dry else _LIMIT_S, None
    try:
        if process.wait(limit) != 0:
            error = f"ended with {process.returncode}"
    except BaseException as failure:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(failure, subprocess.TimeoutExpired):
            raise
        error = f"took longer than {limit:g} s"
    found = read_json(here.out / f"{part}.json")
    if error is not None:
        found.setdefault("error", error)
        write_json(here.out / f"{part}.json", found)
    to_stderr(f"{part}: {found.get('error', 'done')}")
    return found


def one_part(part: str, here: Here, commit: str | None = None) -> int:
    """Run a part in this process; its status is 1 if it fails."""
    found, began = Found(here, part), time.monotonic()
    try:
        found.put("about", about(here, commit))
        run_of(part)(found, here)
    except BaseException as error:
        traceback.print_exc()
        found.put("error", f"{type(error).__name__}: {error}"[:500])
        return 1
    finally:
        found.put("seconds", time.monotonic() - began)
        found.put("peak_bytes", peak_bytes(here))
    return 0


def run_of(part: str) -> Callable[[Found, Here], None]:
    """The function of a part. Only that part fails if its module cannot be imported."""
    name = next((name for name, parts in _MODULES.items() if part in parts), None)
    if name is None:
        raise ValueError(f"no part is called {part}; there are {', '.join(PARTS)}")
    run: Callable[[Found, Here], None]
    run = getattr(import_module(f"benchmarks.gpu.{name}"), part)
    return run


def about(here: Here, commit: str | None) -> dict[str, Any]:
    """The date, the commit, the device, and the versions of packages."""
    found: dict[str, Any] = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    found |= {"git": {"revision": commit} if commit else git_revision(), "cores": os.cpu_count()}
    found["versions"] = versions(*_PACKAGES)
    if here.dry:
        return found | {"device": "cpu"}
    import torch

    card = torch.cuda.get_device_properties(0)
    return found | {
        "device": card.name, "device_bytes": card.total_memory, "cuda": torch.version.cuda,
    }  # fmt: skip


def peak_bytes(here: Here) -> int:
    """Most memory that tensors had on the device, or the process on the CPU."""
    if here.dry:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import torch

    return int(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    sys.exit(main())
