"""Check and time the GPU path: what `gpu.sh` runs.

    tests/benchmarks/gpu.sh
    tests/benchmarks/gpu.sh --dry-run

Each stage is a process of its own with a time limit, so that one that fails or hangs leaves the
others alone; what it had found by then stays. Results, with every figure and whether each bar was
met, go to --out; the last line of stdout is the same as one JSON object. Progress goes to stderr.
A dry run goes through all of it on a CPU with tiny sizes, in float32; its figures mean nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_bars import bars
from gpu_found import Found, Here

OUT = Path(__file__).with_name("gpu_results.json")
# Stages that run at the same time, and the seconds they may take; all together stay under ten
# minutes.
TURNS = (
    {"prepare": 140, "tests": 140},
    {"equality": 120},
    {"steps": 120},
    {"speed": 130},
    {"finetuning": 60},
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--out", type=Path, help=f"results ({OUT.name}; of a dry run, none)")
    parser.add_argument("--stage", help="run one stage only, in --folder")
    parser.add_argument("--folder", type=Path, help="where stages leave things for each other")
    asked = parser.parse_args()
    if asked.stage is not None:
        return one_stage(asked.stage, Here(asked.folder, asked.dry_run))
    with TemporaryDirectory() as folder:
        found = all_stages(Here(Path(folder), asked.dry_run))
    out = asked.out or (None if asked.dry_run else OUT)
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
    # A group of its own, so that what a stage starts ends with it.
    return subprocess.Popen(
        command + ["--dry-run"] * here.dry, stdout=sys.stderr, start_new_session=True
    )


def ended(
    name: str, process: subprocess.Popen[bytes], limit: float, began: float, here: Here
) -> dict[str, Any]:
    """What a stage found; ``error`` says why there is no more."""
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
    """Imported by the stage that needs it: one that cannot be imported fails alone."""
    if name == "prepare":
        from gpu_work import prepare as run
    elif name == "tests":
        from gpu_tests import tests as run
    elif name == "equality":
        from gpu_equal import equality as run
    elif name == "steps":
        from gpu_steps import steps as run
    elif name == "speed":
        from gpu_speed import speed as run
    elif name == "finetuning":
        from gpu_finetune import finetuning as run
    else:
        raise ValueError(f"no stage is called {name}")
    return run


def environment(here: Here) -> dict[str, Any]:
    """The machine and the versions that were run."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": sys.version.split()[0], "cores": os.cpu_count()}
    for name in ("torch", "triton", "transformers", "numba", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if here.dry:
        return {"device": "cpu", "versions": found}
    asked = "--query-gpu=name,driver_version,memory.total"
    command = ["nvidia-smi", asked, "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    import torch

    name = torch.cuda.get_device_name()
    return {"device": name, "driver": said.strip(), "cuda": torch.version.cuda, "versions": found}


if __name__ == "__main__":
    sys.exit(main())
