"""Settings of the tests of drafting."""

from draft_examples import pytest_configure

__all__ = ["pytest_configure"]
