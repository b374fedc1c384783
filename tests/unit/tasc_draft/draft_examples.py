"""How many examples a property is checked with: many with --all, few else."""

import pytest
from hypothesis import settings

_found = {"all": False}


def pytest_configure(config: pytest.Config) -> None:
    """Read the option before a module of tests is imported."""
    _found["all"] = bool(config.getoption("--all"))


def examples(few: int, many: int) -> settings:
    return settings(max_examples=many if _found["all"] else few)
