"""Plants single-line faults in the product, one at a time, and counts those that tests catch.

A comparison, an operator, a condition or a constant of one line changes. The faults of each package
are drawn by a seed from all of the tree's code, so that one tree can be compared with another. The
tests run once under coverage; then each fault is planted in a copy of the tree, and the test files
that run its line run there until the first failure.

    python benchmarks/suite/faults.py --results .bench/new.jsonl
    python benchmarks/suite/faults.py --results .bench/old.jsonl --tree ../old

A run that was interrupted continues with what its file of results lacks. Several runs may share a
file if their packages differ and the file of covered lines beside it exists.
"""

import argparse
import ast
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import ROOT, at_least, finish, folder, listed, parser_of, to_stderr

TESTS = ("tests/unit", "tests/lossless", "tests/integration/store")
# Folders of tests that speak for a package, besides those with its name.
_ALSO = {
    "tasc_draft": ("lossless",), "tasc_engine": ("lossless",), "tasc_jobs": ("jobs",),
    "tasc_serve": ("serve", "service"), "tasc_store": ("store",),
}  # fmt: skip
_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}
_WALL = 3  # wall time over processor time that ends a run of tests that wait for ever
_TEST_S = 180  # a test that takes longer has caught the fault that makes it wait
_CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE)
_GPU = "/gpu/"  # does not run on the machines that run the tests
# Names the running test file in the coverage data. Session fixtures belong to no file.
_PLUGIN = """
import coverage, pytest
test = ""
def switch(name):
    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(name)
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global test
    test = item.nodeid.partition("::")[0]
    switch(test)
    return (yield)
@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    if fixturedef.scope == "session":
        switch("")
    try:
        return (yield)
    finally:
        switch(test)
"""
_COVERAGE = """
[run]
source = services,pipelines
parallel = true
relative_files = true
patch = subprocess
"""


@dataclass(frozen=True)
class Fault:
    """One line of a file, and the line that replaces it."""

    package: str
    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Covered:
    """The test files that run each line of each source.

    Attributes:
        tests: The folders of these files.
        failed: Tests that fail without a fault.
    """

    tests: list[str]
    lines: dict[str, dict[str, list[str]]]
    failed: list[str]

    def tests_of(self, fault: Fault, tree: Path) -> list[str]:
        """Test files of a fault.

        A line that is compiled, or runs in another process or in a session fixture, adds the
        folders of its package.
        """
        found = {*self.lines.get(fault.file, {}).get(str(fault.line), [""])}
        if "" in found:
            also = _ALSO.get(fault.package, ())
            own = [f"{tests}/{fault.package}" for tests in self.tests]
            own += [tests for tests in self.tests if Path(tests).name in also]
            found.update([each for each in own if (tree / each).exists()] or self.tests)
        return sorted(found - {""})


def packages_of(tree: Path) -> dict[str, Path]:
    """The folders of a tree's packages by name."""
    found = [*tree.glob("services/tasc_*"), *tree.glob("pipelines/tasc_*")]
    return {path.name: path for path in sorted(found) if (path / "__init__.py").exists()}


def choose(tree: Path, package: str, count: int, seed: int, under: str = "") -> list[Fault]:
    """Draw faults of a package from all places where one can be planted.

    Args:
        under: Start of the paths of the sources that are considered.
    """
    places = {  # a nested function is found twice
        fault: None
        for path in sorted(packages_of(tree)[package].rglob("*.py"))
        if _GPU not in path.as_posix() and path.relative_to(tree).as_posix().startswith(under)
        for fault in _faults_of(package, path, tree)
    }
    return random.Random(f"{seed} {package}").sample([*places], min(count, len(places)))


def _faults_of(package: str, path: Path, root: Path) -> Iterator[Fault]:
    text = path.read_text("utf-8")
    lines = text.splitlines()
    for node in _bodies(ast.parse(text)):
        for first, last, new in _changes(node, lines):
            line, start = first
            if last[0] != line:
                continue  # the change would span lines
            before = lines[line - 1]
            after = before[:start] + new + before[last[1] :]
            if before.isascii() and after != before and _parses(lines, line, after):
                name = path.relative_to(root).as_posix()
                yield Fault(package, name, line, before, after)


def _bodies(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node inside a function, but annotations, decorators and defaults."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                for each in ast.walk(statement):
                    if not isinstance(each, ast.arg):
                        yield each


Position = tuple[int, int]


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[Position, Position, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        if new := _COMPARED.get(type(node.ops[0])):
            yield _end(node.left), _start(node.comparators[0]), f" {new} "
    elif isinstance(node, ast.BinOp) and (new := _COMPUTED.get(type(node.op))):
        left, right = _end(node.left), _start(node.right)
        between = lines[left[0] - 1][left[1] : right[1]] if left[0] == right[0] else "()"
        texts = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if not texts and "(" not in between and ")" not in between:
            yield left, right, f" {new} "
    elif isinstance(node, ast.BoolOp):
        new = "or" if isinstance(node.op, ast.And) else "and"
        yield _end(node.values[0]), _start(node.values[1]), f" {new} "
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        yield _start(test), _start(test), "not " if _is_plain(test) else ""
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = node.value
        yield _start(node), _end(node), repr(not value if isinstance(value, bool) else value + 1)


def _is_plain(test: ast.expr) -> bool:
    """Whether ``not`` before it negates all of it."""
    return isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)


def _start(node: ast.expr) -> Position:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> Position:
    return node.end_lineno or 0, node.end_col_offset or 0


def _parses(lines: list[str], line: int, after: str) -> bool:
    try:
        ast.parse("\n".join([*lines[: line - 1], after, *lines[line:]]))
    except SyntaxError:
        return False
    return True


def cover(tree: Path, tests: list[str], processes: int) -> Covered:
    """Run tests once without a fault."""
    with tempfile.TemporaryDirectory(prefix="coverage-") as temporary:
        home = Path(temporary)
        (home / "contexts_of_files.py").write_text(_PLUGIN, "utf-8")
        (home / "rc").write_text(f"{_COVERAGE}data_file = {home / 'data'}\n", "utf-8")
        coverage = [sys.executable, "-m", "coverage"]
        env = _environment(tree, home) | {"COVERAGE_RCFILE": str(home / "rc")}
        plugins = ("-p", "contexts_of_files", "-p", "no:cacheprovider", "-n", str(processes))
        command = [*coverage, "run", "-m", "pytest", "-q", *plugins, *tests]
        done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"the tests do not run in {tree}:\n{done.stdout[-3000:]}")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+::\S+)", done.stdout, re.MULTILINE)
        subprocess.run([*coverage, "combine", "--quiet"], cwd=tree, env=env, check=True)
        return Covered(tests, _contexts(home / "data"), failed)


def _contexts(file: Path) -> dict[str, dict[str, list[str]]]:
    from coverage import CoverageData

    data = CoverageData(file)
    data.read()
    return {
        name: {str(line): found for line, found in data.contexts_by_lineno(name).items()}
        for name in data.measured_files()
    }


def _environment(tree: Path, *more: Path) -> dict[str, str]:
    paths = (tree / "services", tree / "pipelines", *more)
    fixed = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "TASC_TEST_SEED": "1"}
    return os.environ | fixed | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def judge(fault: Fault, tree: Path, covered: Covered, seconds: float) -> dict[str, Any]:
    """Plant a fault in a tree, run its tests there, and take it out again.

    Returns:
        The fault with its outcome: ``caught``; ``missed``: the tests ended green; ``timeout``: they
        were green so far; ``error``: pytest itself failed; and the test that failed.
    """
    begun, path = time.monotonic(), tree / fault.file
    text = path.read_text("utf-8")
    lines = text.splitlines()
    if lines[fault.line - 1] != fault.before:
        raise SystemExit(f"{fault.file} has changed since its faults were drawn")
    lines[fault.line - 1] = fault.after
    path.write_text("\n".join(lines) + "\n", "utf-8")
    try:
        outcome, by = _tested(tree, covered.tests_of(fault, tree), covered.failed, seconds)
    finally:
        path.write_text(text, "utf-8")
    spent = round(time.monotonic() - begun, 1)
    return {"fault": asdict(fault), "outcome": outcome, "seconds": spent, "by": by}


def _tested(tree: Path, tests: list[str], but: list[str], seconds: float) -> tuple[str, str]:
    """The outcome of some tests, and the test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--timeout={_TEST_S}", *(f"--deselect={each}" for each in but), *tests]
    with tempfile.TemporaryFile("w+") as output:  # no pipe, which a child may hold open
        process = subprocess.Popen(
            command, cwd=tree, env=_environment(tree), start_new_session=True,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        limit = max(round(seconds), 1)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit + 5))
        is_late = False
        try:
            process.wait(_WALL * seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        output.seek(0)
        lines = output.read().splitlines()[::-1]
    if is_late or code == -signal.SIGXCPU:
        return "timeout", ""
    if code in (1, 2):  # a test failed, or could not be collected
        return "caught", next((s for s in lines if s.startswith(("FAILED", "ERROR"))), "")[:160]
    if code in _CRASHES:  # faults in compiled code end the process
        return "caught", f"pytest ended with {code}"
    return ("missed", "") if code in (0, 5) else ("error", f"pytest ended with {code}")


def interval(caught: int, planted: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate."""
    z, rate = 1.96, caught / planted
    centre = rate + z * z / (2 * planted)
    half = z * math.sqrt(rate * (1 - rate) / planted + (z / (2 * planted)) ** 2)
    whole = 1 + z * z / planted
    return (centre - half) / whole, (centre + half) / whole


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tree", type=folder, default=ROOT, help="the checkout to test")
    parser.add_argument("--packages", type=listed, help="names with commas between them; all")
    parser.add_argument("--under", default="", help="only sources whose path begins with this")
    parser.add_argument("--count", type=at_least(1), default=120, help="faults of a package (120)")
    parser.add_argument("--seed", type=int, default=38)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders of tests that may catch")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="processor seconds of a fault's tests (300)"
    )
    parser.add_argument("--lanes", type=at_least(1), default=2, help="faults judged side by side")
    parser.add_argument(
        "--results", type=Path, default=ROOT / ".bench/faults.jsonl", help="a line for each fault"
    )
    options = parser.parse_args()
    options.packages = options.packages or tuple(packages_of(options.tree))
    if unknown := sorted({*options.packages} - {*packages_of(options.tree)}):
        parser.error(f"{options.tree} has no package {', '.join(unknown)}")
    return options


def main() -> None:
    options = arguments()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    faults = [
        fault
        for package in options.packages
        for fault in choose(options.tree, package, options.count, options.seed, options.under)
    ]
    known = _known(options.results)
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        for lane in range(options.lanes):
            tree = Path(temporary) / str(lane)
            unused = shutil.ignore_patterns(".venv", ".git", ".bench")
            shutil.copytree(options.tree, tree, ignore=unused)
            trees.put(tree)
        covered = _covered(options.results.with_suffix(".covered.json"), tree, options)

        def one(fault: Fault) -> None:
            tree = trees.get()
            try:
                verdict = judge(fault, tree, covered, options.timeout)
            finally:
                trees.put(tree)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(verdict) + "\n")
            to_stderr(
                f"{verdict['outcome']}, {verdict['seconds']} s: {fault.file}:{fault.line}\n"
                f"    {fault.before.strip()}\n    {fault.after.strip()}"
            )

        with ThreadPoolExecutor(options.lanes) as pool:
            list(pool.map(one, [fault for fault in faults if fault not in known]))
    outcomes = _known(options.results)
    finish(
        {p: _score(p, [outcomes[f] for f in faults if f.package == p]) for p in options.packages}
    )


def _covered(file: Path, tree: Path, options: argparse.Namespace) -> Covered:
    """Covered lines from a file, which is made where there is none."""
    if not file.exists():
        to_stderr(f"running {' '.join(options.tests)} without a fault")
        made = cover(tree, [*options.tests], options.lanes)
        file.write_text(json.dumps(asdict(made)), "utf-8")
    found = Covered(**json.loads(file.read_text("utf-8")))
    for test in found.failed:
        to_stderr(f"not run, since it fails without a fault: {test}")
    return found


def _known(file: Path) -> dict[Fault, str]:
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return {Fault(**row["fault"]): row["outcome"] for row in map(json.loads, lines)}


def _score(package: str, outcomes: list[str]) -> dict[str, Any]:
    """Counts of a package; they are printed with the rate and its interval."""
    kinds = ("caught", "missed", "timeout", "error")
    planted, counts = len(outcomes), {kind: outcomes.count(kind) for kind in kinds}
    rate = counts["caught"] / planted
    low, high = interval(counts["caught"], planted)
    between = f"{rate:.1%} ({low:.1%} to {high:.1%})"
    print(f"{package}: {counts['caught']} of {planted} caught, {between}")
    return {"planted": planted, **counts, "rate": rate, "low": low, "high": high}


if __name__ == "__main__":
    main()
