"""Which tests run, in which order, in which process; and settings every test needs.

- `make test` runs what daily work can break. `make test-all` (`pytest --all`) runs everything.
- A test marked `slow("reason")` runs with `--all` only: it needs clusters, kills or namespaces, or
  it is a long schedule, a fuzz test or a benchmark.
- Random schedules are long with `--all`, from seed 0. Otherwise they are short, from a seed that
  changes each day. The seed is printed; set TASC_TEST_SEED to choose it.
- Two processes share the work, a file at a time. Each has one Redis and one Ray for all of its
  tests. Files in `integration/service` share one running service, so one process runs them.
- With `-n`, numba's code is compiled before the first test and cached for both processes.
- Markers `ray`, `redis` and `prometheus` say what a test needs; `-m 'not ray'` leaves those out.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datetime
import tempfile
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from compiled_code import compile_all

# Services and workers of tests keep uploaded files there, unlike those of a user.
os.environ["XDG_DATA_HOME"] = os.path.join(tempfile.gettempdir(), f"tasc-tests-{os.getuid()}")

# A machine may be busy, and the first example may compile.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Folders whose files take long come first, and in each the files with slow tests.
_ORDER = ("integration/service", "integration", "dashboards", "deploy", "benchmarks", "lossless")
_SEED = "TASC_TEST_SEED"

collect_ignore = ["in_vllm"]  # `make test-vllm` runs them, in vLLM's environment


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests, too")


def pytest_configure(config: pytest.Config) -> None:
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    os.environ.setdefault(_SEED, "0" if config.option.all else str(today))
    # A single process compiles what it needs when it needs it.
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        compile_all()


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
    long = {item.path for item in slow}
    items.sort(key=lambda item: (_place(item.nodeid), item.path not in long, item.path))


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
    """Print the seed, and the seconds of each folder; pytest itself prints the slowest tests."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0].rpartition("/")[0]] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f}s {folder}")
    terminalreporter.write_line(f"random schedules: {_SEED}={os.environ[_SEED]}")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests share two cores with Ray and Redis."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    """Kernels are interpreted where `.ci/run` has installed Triton."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        from triton_interpreter import patch_once_in_a_launch

        patch_once_in_a_launch()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The backend that runs tests which are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests also run. If so, random schedules are long."""
    return bool(request.config.getoption("--all"))


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of a random schedule."""
    return int(os.environ[_SEED])
