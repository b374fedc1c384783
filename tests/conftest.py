"""Which tests run, in which order, in which process; and settings every test needs.

- `make test` runs what daily work can break. `make test-all` (`pytest --all`) runs everything.
- A test marked `slow("reason")` runs with `--all` only: it takes clusters, kills or namespaces, a
  long schedule, a fuzz or a benchmark. A shorter test of the same subject runs daily.
- Random schedules are long with `--all`. Otherwise they are short and drawn from a seed that
  changes each day; it is printed, and TASC_TEST_SEED repeats it.
- Two processes share the work a file at a time. Each has one Redis, one Ray and one service for all
  of its tests; files in `integration/service` share a service, so they stay in one process.
- With `-n`, numba's code is compiled before the first test and cached for both processes.
- Markers `ray`, `redis` and `prometheus` say what a test needs; `-m 'not ray'` leaves those out.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datetime
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from compiled_code import compile_all

# A machine may be busy, and the first example may compile.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Files that take long begin first; the small ones fill what is left at the end.
_ORDER = ("integration/service", "integration", "dashboards", "deploy", "benchmarks", "lossless")
_SEED = "TASC_TEST_SEED"
os.environ.setdefault(_SEED, str(datetime.datetime.now(datetime.UTC).date().toordinal()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests, too")


def pytest_configure(config: pytest.Config) -> None:
    # One process alone compiles what it comes to.
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        compile_all()


def pytest_report_header() -> str:
    return f"random schedules: {_SEED}={os.environ[_SEED]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = []
    for item in items:
        if (mark := item.get_closest_marker("slow")) is None:
            continue
        if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0]):
            raise pytest.UsageError(f"{item.nodeid}: slow needs its reason: slow('kills a node')")
        slow.append(item)
    if not config.option.all and slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    items.sort(key=lambda item: (_place(item.nodeid), item.get_closest_marker("slow") is not None))


def _place(nodeid: str) -> int:
    found = (i for i, part in enumerate(_ORDER) if nodeid.startswith(f"tests/{part}/"))
    return next(found, len(_ORDER))


class _FilesOfAService(LoadScopeScheduling):
    """A file is run by one process, and files that share a service are one file."""

    def _split_scope(self, nodeid: str) -> str:
        shared = "tests/integration/service/"
        return shared if nodeid.startswith(shared) else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return _FilesOfAService(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells the seconds of each folder; pytest itself tells the slowest tests."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0].rpartition("/")[0]] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f}s {folder}")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests share two cores with Ray and Redis."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests run, too: schedules are long then."""
    return bool(request.config.getoption("--all"))


@pytest.fixture
def seed(everything: bool) -> int:
    """The seed of a random schedule: the same each day for long ones, new each day for short."""
    return 0 if everything else int(os.environ[_SEED])
