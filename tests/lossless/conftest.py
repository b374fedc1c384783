"""The models the lossless tests share, and how close a call their answers were."""

from typing import Any

import pytest
from lossless_cases import CLOSEST, Case, make_case

from tiny import ARCHITECTURES


@pytest.fixture(scope="session", params=list(ARCHITECTURES))
def any_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("one"), "qwen2")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells what it met."""
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["closest"] = dict(CLOSEST)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for dtype, (margin, whose) in getattr(node, "workeroutput", {}).get("closest", {}).items():
        CLOSEST[dtype] = min(CLOSEST.get(dtype, (margin, whose)), (margin, whose))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """An equality says the less the further the best token always stood from the second."""
    if CLOSEST:
        found = (f"{dtype} {margin:.2g} ({whose})" for dtype, (margin, whose) in CLOSEST.items())
        terminalreporter.write_line(f"smallest top-1 margin met: {', '.join(found)}")
