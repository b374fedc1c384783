"""Compiles most numba code before the first test, so that no two processes compile the same."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_PARTS = (["-m", "tasc_draft", "compile"], [__file__])  # they compile nothing in common


def compile_all() -> None:
    """Fill numba's caches, one process per part. With full caches this takes seconds."""
    commands = [[sys.executable, *part] for part in _PARTS]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in running:
            _, errors = process.communicate()
            if process.returncode != 0:
                raise pytest.UsageError(f"compiling failed:\n{errors}")
    finally:
        for process in running:
            process.kill()


def _engine() -> None:
    """Tiny models are float64, the shipped one float32."""
    import torch

    from tasc_jobs.demo.tasks import MODEL
    from tiny import make_folder

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _generate(make_folder(Path(folder)), "float64")
    _generate(MODEL, "float32")


def _generate(folder: Path, dtype: str) -> None:
    """Generate one greedy and one sampled answer without drafts."""
    from support import Silent, make_engine
    from tasc_engine import Request

    engine = make_engine(folder, dtype=dtype, proposer=Silent())
    warm = {"temperature": 1.0}
    prompt = tuple(range(1, 20))
    list(engine.generate([Request("0", prompt, 4)]))
    list(engine.generate([Request("1", prompt, 4, parameters=warm)]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _engine()
