import draft_cases
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Read the option before a module of tests is imported."""
    draft_cases.many_examples = bool(config.getoption("--all"))
