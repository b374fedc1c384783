"""The tests of the kernel and of captured graphs against their references, as a stage."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu_found import Found, Here

TESTS = Path(__file__).resolve().parents[1] / "unit" / "tasc_engine"
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def tests(found: Found, here: Here) -> None:
    names = ["test_gpu_graphs.py"]
    if not here.dry:
        names += ["test_gpu_attention.py", "test_gpu_operations.py"]
    command = [
        sys.executable, "-m", "pytest", "-q", "-W", "default", "-o", "addopts=", "-rs",
        "--noconftest", "-p", "no:cacheprovider", *(str(TESTS / name) for name in names),
    ]  # fmt: skip
    # Most of the time goes into compiling kernels, one core each.
    if not here.dry and find_spec("xdist") is not None:
        command += ["-n", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-6000:], done.stderr[-2000:])
    lines = done.stdout.strip().splitlines() or [""]
    counts = {kind.rstrip("s"): int(n) for n, kind in _COUNT.findall(lines[-1])}
    found.put("passed", counts.get("passed", 0))
    found.put("failed", counts.get("failed", 0) + counts.get("error", 0) + (done.returncode > 1))
    found.put("skipped", counts.get("skipped", 0))
    found.put(
        "said", [s for s in lines if s.startswith(("FAILED", "ERROR", "SKIPPED", "E  "))][:30]
    )
