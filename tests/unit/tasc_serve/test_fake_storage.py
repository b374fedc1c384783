"""The fake that the HTTP tests stand on does what the real store does."""

import pytest

from storage_contract import StorageContract
from storage_fakes import FakeStorage


class TestFakeStorage(StorageContract):
    @pytest.fixture
    def storage(self) -> FakeStorage:
        return FakeStorage("greet")
