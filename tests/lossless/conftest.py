"""The models that the lossless tests share, and the smallest margins of their answers."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from lossless_cases import CLOSEST, Case, answered_alone, make_case, reference

from tasc_engine import Request
from tiny import ARCHITECTURES

CaseOf = Callable[..., Case]
Asked = tuple[list[Request], list[list[int]]]


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    """Returns the case of an architecture and a dtype, made once."""

    @cache
    def of(architecture: str, dtype: str = "float64") -> Case:
        return make_case(tmp_path_factory.mktemp(architecture), architecture, dtype)

    return of


@pytest.fixture(params=list(ARCHITECTURES))
def any_case(request: pytest.FixtureRequest, case_of: CaseOf) -> Case:
    return case_of(request.param)


@pytest.fixture(scope="session")
def case(case_of: CaseOf) -> Case:
    return case_of("qwen2")


@pytest.fixture(scope="session")
def alike(case: Case) -> Asked:
    """Prompts that share prefixes of 5 to 60 tokens; one prefix is a whole prompt."""
    long, other = case.prompts[7], case.prompts[5]
    shared = [long[:n] + other[: 12 - n % 7] for n in (60, 60, 33, 60, 9, 5, 33, 60)]
    answers = {p: answered_alone(reference(case.folder), p, 12) for p in (*shared, long[:60])}
    prompts = [*shared, long[:60], *shared]
    requests = [Request(str(i), p, 12) for i, p in enumerate(prompts)]
    return requests, [answers[p] for p in prompts]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends the margins from a worker of pytest-xdist."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["closest"] = dict(CLOSEST)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for dtype, (margin, name) in getattr(node, "workeroutput", {}).get("closest", {}).items():
        CLOSEST[dtype] = min(CLOSEST.get(dtype, (margin, name)), (margin, name))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the smallest margins; an equality proves less if all margins are large."""
    if CLOSEST:
        found = (f"{dtype} {margin:.2g} ({name})" for dtype, (margin, name) in CLOSEST.items())
        terminalreporter.write_line(f"smallest top-1 margin met: {', '.join(found)}")
