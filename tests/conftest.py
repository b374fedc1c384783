"""Settings every test needs, before anything heavy is imported."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

# A machine may be busy, and the first example may compile.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests share two cores with Ray and Redis."""
    torch.set_num_threads(1)
