"""The models the lossless tests share."""

import pytest
from lossless_cases import Case, make_case

from tiny import ARCHITECTURES


@pytest.fixture(scope="session", params=list(ARCHITECTURES))
def any_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("one"), "qwen2")
