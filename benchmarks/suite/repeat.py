"""Runs the tests several times on fresh clones of HEAD, some of them beside busy loops.

    python benchmarks/suite/repeat.py                  # five daily runs, the last two busy
    python benchmarks/suite/repeat.py --runs 1 -- --all

A clone has no caches: compiling is a part of each run. Its tests use this environment's packages.
"""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import ROOT, add_json, at_least, finish, git_revision, parser_of, processor

_CLOSING = re.compile(r"^(=+ )?(?P<said>\d+ (passed|failed).*) in [0-9.]+s", re.MULTILINE)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=at_least(1), default=5)
    parser.add_argument("--busy", type=at_least(0), default=2, help="busy runs, the last ones")
    parser.add_argument("--loops", type=at_least(0), default=2, help="busy loops beside each")
    add_json(parser)
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, behind --")
    options = parser.parse_args()
    runs = []
    for number in range(1, options.runs + 1):
        loops = options.loops if number > options.runs - options.busy else 0
        with _loops(loops):
            code, seconds, said = _run(options.pytest, number)
        runs.append({"seconds": round(seconds), "busy_loops": loops, "exit": code, "said": said})
        print(f"run {number}: {seconds:.0f} s beside {loops} busy loops, exit {code}: {said}")
        sys.stdout.flush()
    machine = {"processor": processor(), "cores": os.cpu_count()}
    finish({**machine, "git": git_revision(), "runs": runs}, options.json)
    sys.exit(any(run["exit"] for run in runs))


def _run(arguments: list[str], seed: int) -> tuple[int, float, str]:
    """Exit code, seconds and closing line of one run. The output of a failed run is printed."""
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        paths = os.pathsep.join(str(clone / part) for part in ("services", "pipelines"))
        env = os.environ | {"PYTHONPATH": paths, "OMP_WAIT_POLICY": "PASSIVE"}
        if "--all" not in arguments:
            env.setdefault("TASC_TEST_SEED", str(seed))
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-n", "2", "-q", *arguments], cwd=clone, env=env,
            text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        seconds = time.monotonic() - begun
    if process.returncode:
        print(output)
    found = _CLOSING.search(output)
    return process.returncode, seconds, found["said"] if found else "no closing line"


@contextmanager
def _loops(count: int) -> Iterator[None]:
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


if __name__ == "__main__":
    main()
