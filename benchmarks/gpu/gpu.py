"""Check and time the GPU path; `gpu.sh` runs this script.

    benchmarks/gpu/gpu.sh
    benchmarks/gpu/gpu.sh --dry-run

Each stage is a process of its own with a time limit, so that a stage that fails or hangs does not
affect the others; its figures until then are kept. The results have every figure and whether each
bar is met. They go to --out; the last line of stdout is the same as one JSON object. Progress goes
to stderr. A dry run executes all stages on a CPU with tiny sizes in float32; its figures have no
meaning.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import ROOT, parser_of, read_json, versions, write_json

OUT = Path(__file__).with_name("gpu_results.json")
# Turns of stages that run at the same time, with their time limits in seconds; the sum of all turns
# is less than ten minutes.
TURNS = (
    {"prepare": 140, "tests": 140},
    {"equality": 120},
    {"steps": 120},
    {"speed": 130},
    {"finetuning": 60},
)
_MODULES = {
    "prepare": "work",
    "equality": "equality",
    "steps": "steps",
    "speed": "work",
    "finetuning": "finetuning",
}
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")

# Bars by name: the path to the figure, which begins with its stage, and the least value.
LEAST: dict[str, tuple[tuple[str, ...], float]] = {
    "plain_over_ceiling_b1": (("steps", "plain_over_ceiling", "1"), 0.6),
    "plain_over_ceiling_b8": (("steps", "plain_over_ceiling", "8"), 0.6),
    "drafted_over_plain_b1": (("speed", "drafted_over_plain", "1"), 3.0),
    "drafted_over_plain_b8": (("speed", "drafted_over_plain", "8"), 2.5),
    "demo_sampled_identical": (("equality", "demo sampled", "identical"), 0.95),
    "tests_passed": (("tests", "passed"), 1),
}
# The same with the greatest value.
MOST: dict[str, tuple[tuple[str, ...], float]] = {
    "tests_failed": (("tests", "failed"), 0),
    "demo_float32_differences": (("equality", "demo float32", "above"), 0),
    "demo_half_precision_differences": (("equality", "demo drafted against plain", "above"), 0),
    "demo_adapter_differences": (("equality", "demo adapter", "above"), 0),
    "demo_base_beside_adapter_differences": (("equality", "demo base beside it", "above"), 0),
    **{
        f"tiny_{name}_differences": (("equality", f"tiny {name}", "above"), 0)
        for name in ("qwen2", "llama", "mistral", "gemma2")
    },
}


@dataclass(frozen=True)
class Here:
    """A run: the folder that its stages share, and whether it is a dry run."""

    folder: Path
    dry: bool

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
    """The figures of one stage; each is written to a file as soon as it is known."""

    def __init__(self, here: Here, stage: str) -> None:
        self._file = _file(here, stage)
        self._found: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self._found[key] = value
        write_json(self._file, self._found)

    @staticmethod
    def read(here: Here, stage: str) -> dict[str, Any]:
        """The figures of a stage until now."""
        return read_json(_file(here, stage))


def _file(here: Here, stage: str) -> Path:
    return here.folder / f"{stage}.json"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="use tiny sizes on a CPU")
    parser.add_argument("--out", type=Path, help=f"results ({OUT.name}; none for a dry run)")
    parser.add_argument("--stage", help="run one stage only, in --folder")
    parser.add_argument("--folder", type=Path, help="the folder that stages share")
    options = parser.parse_args()
    if options.stage is not None:
        return one_stage(options.stage, Here(options.folder, options.dry_run))
    with TemporaryDirectory() as folder:
        found = all_stages(Here(Path(folder), options.dry_run))
    out = options.out or (None if options.dry_run else OUT)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0


def all_stages(here: Here) -> dict[str, Any]:
    began = time.monotonic()
    found: dict[str, Any] = {"dry_run": here.dry, "stages": {}}
    for turn in TURNS:
        started = {name: start(name, here) for name in turn}
        begun = time.monotonic()
        for name, process in started.items():
            left = turn[name] - (time.monotonic() - begun)
            found["stages"][name] = ended(name, process, left, began, here)
    found["seconds"] = round(time.monotonic() - began, 1)
    found["bars"] = bars(found["stages"])
    return {**environment(here), **found}


def start(name: str, here: Here) -> subprocess.Popen[bytes]:
    print(f"gpu: {name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--stage", name, "--folder", str(here.folder)]
    # The process group is new, so that the processes of a stage end with it.
    return subprocess.Popen(
        command + ["--dry-run"] * here.dry, stdout=sys.stderr, start_new_session=True
    )


def ended(
    name: str, process: subprocess.Popen[bytes], limit: float, began: float, here: Here
) -> dict[str, Any]:
    """Wait for a stage; its figures, and ``error`` if it did not finish."""
    error = None
    try:
        if process.wait(limit) != 0:
            error = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        error = f"took longer than {limit} s"
    found = Found.read(here, name)
    if error is not None:
        found.setdefault("error", error)
    state = found.get("error", "done")
    print(f"gpu: {name}: {state}, {time.monotonic() - began:.0f} s in all", file=sys.stderr)
    return found


def one_stage(name: str, here: Here) -> int:
    found = Found(here, name)
    began = time.monotonic()
    try:
        stage(name)(found, here)
    except BaseException as error:
        traceback.print_exc()
        found.put("error", f"{type(error).__name__}: {error}"[:500])
        return 1
    finally:
        found.put("seconds", round(time.monotonic() - began, 1))
    return 0


def stage(name: str) -> Callable[[Found, Here], None]:
    """The function of a stage. Only that stage fails if its module cannot be imported."""
    if name == "tests":
        return tests
    if name not in _MODULES:
        raise ValueError(f"no stage is called {name}")
    run: Callable[[Found, Here], None]
    run = getattr(import_module(f"benchmarks.gpu.{_MODULES[name]}"), name)
    return run


def environment(here: Here) -> dict[str, Any]:
    """The machine, and the versions of packages."""
    found = versions("torch", "triton", "transformers", "numba", "numpy")
    found = {"python": found.pop("python"), "cores": os.cpu_count(), **found}
    if here.dry:
        return {"device": "cpu", "versions": found}
    options = "--query-gpu=name,driver_version,memory.total"
    command = ["nvidia-smi", options, "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    import torch

    name = torch.cuda.get_device_name()
    return {"device": name, "driver": said.strip(), "cuda": torch.version.cuda, "versions": found}


def bars(stages: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figure of each bar, the required value, and whether the bar is met.

    A figure that was not found meets no bar.
    """
    judged = {}
    for name, (path, least) in LEAST.items():
        value = _at(stages, path)
        judged[name] = {"found": value, "least": least, "met": value is not None and value >= least}
    for name, (path, most) in MOST.items():
        value = _at(stages, path)
        judged[name] = {"found": value, "most": most, "met": value is not None and value <= most}
    return judged


def _at(found: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def tests(found: Found, here: Here) -> None:
    """Test the kernel and captured graphs against their references."""
    names = ["test_gpu_graphs.py"]
    if not here.dry:
        names += ["test_gpu_attention.py", "test_gpu_sampling.py"]
    files = [path for name in names for path in (ROOT / "tests").rglob(name)]
    command = [
        sys.executable, "-m", "pytest", "-q", "-W", "default", "-o", "addopts=", "-rsfE",
        "--noconftest", "-p", "no:cacheprovider", *map(str, files),
    ]  # fmt: skip
    # Most of the time is spent in compiling kernels, each on one core.
    if not here.dry and find_spec("xdist") is not None:
        command += ["-n", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-20000:], done.stderr[-2000:])
    lines = done.stdout.strip().splitlines() or [""]
    counts = {kind.rstrip("s"): int(n) for n, kind in _COUNT.findall(lines[-1])}
    found.put("passed", counts.get("passed", 0))
    found.put("failed", counts.get("failed", 0) + counts.get("error", 0) + (done.returncode > 1))
    found.put("skipped", counts.get("skipped", 0))
    found.put("said", [s[:200] for s in lines if s.startswith(("FAILED", "ERROR", "SKIPPED"))])


if __name__ == "__main__":
    sys.exit(main())
