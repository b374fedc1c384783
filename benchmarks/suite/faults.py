"""Plants single-line faults in the product, one at a time, and counts those that tests catch.

The faults are chosen by a seed: a comparison, an operator, a condition or a constant of one line
changes. Each is planted in a copy of the repository, and the tests of its package run there until
the first failure. A fault that no test notices shows what the tests do not prove.

    python benchmarks/suite/faults.py --list faults.json          # choose faults, once
    python benchmarks/suite/faults.py --list faults.json --run    # plant them and run the tests

To compare the tests of two commits, choose the faults with ``--both OLD``, a checkout of the other
commit, then run the list with ``--tree OLD`` and without. A fault is found by the text of its line,
also in another file of the package.
"""

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import ROOT, at_least, finish, parser_of, to_stderr

# Where a package's source is, and the tests that speak for it, the quickest first.
PACKAGES = {
    "draft": ("services/tasc_draft", ("tests/unit/tasc_draft",)),
    "engine": ("services/tasc_engine", ("tests/unit/tasc_engine", "tests/lossless")),
    "store": ("services/tasc_store", ("tests/unit/tasc_store", "tests/integration/store")),
    "serve": (
        "services/tasc_serve",
        ("tests/unit/tasc_serve", "tests/integration/serve", "tests/integration/service"),
    ),
    "jobs": (
        "pipelines/tasc_jobs",
        ("tests/unit/tasc_jobs", "tests/integration/**/test_cli*.py", "tests/integration/jobs"),
    ),
    "train": (
        "pipelines/tasc_train",
        ("tests/unit/tasc_train", "tests/integration/test_cli_finetune.py"),
    ),
}
_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}
_WALL = 3  # most wall time, in multiples of the processor time: ends tests that wait for ever
_CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE)
_GPU = ("/gpu/",)  # not run on the machines that run the tests


@dataclass(frozen=True)
class Fault:
    """One line of a file, and what stands there instead."""

    package: str
    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    Attributes:
        outcome: ``caught``; ``missed``: the tests ended green; ``timeout``: they were green so far;
            ``gone``: its line is not there; ``error``: pytest itself failed.
        by: The test that failed.
    """

    fault: Fault
    outcome: str
    seconds: float
    by: str


@dataclass(frozen=True)
class Limits:
    """Of one fault's tests: processor seconds of pytest, and arguments for it."""

    seconds: float
    arguments: tuple[str, ...]


def choose(root: Path, count: int, seed: int, other: Path | None = None) -> list[Fault]:
    """As many faults of each package, drawn from all places where one can be planted.

    Args:
        other: Another checkout. A fault's line is then the only one with its text in both.
    """
    rng = random.Random(seed)
    found = []
    for package in PACKAGES:
        places = [
            fault
            for path in _sources(root, package)
            if not any(part in path.as_posix() for part in _GPU)
            for fault in _faults_of(package, path, root)
        ]
        if other is not None:
            once = _only_lines(root, package) & _only_lines(other, package)
            places = [fault for fault in places if fault.before in once]
        found += rng.sample(places, count // len(PACKAGES))
    return found


def _sources(root: Path, package: str) -> list[Path]:
    return sorted((root / PACKAGES[package][0]).rglob("*.py"))


def _only_lines(root: Path, package: str) -> set[str]:
    """The lines that a package's sources have once."""
    texts = (path.read_text("utf-8") for path in _sources(root, package))
    counts = Counter(line for text in texts for line in text.splitlines())
    return {line for line, count in counts.items() if count == 1}


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


def judge(fault: Fault | None, package: str, tree: Path, limits: Limits) -> Verdict:
    """Plant a fault in a tree, run its package's tests there, and take it out again.

    Args:
        fault: None runs the tests as they are: what fails then proves nothing about faults.
    """
    begun = time.monotonic()
    if fault is None:
        outcome, by = _tested(tree, package, limits)
        return Verdict(_control(package), outcome, round(time.monotonic() - begun, 1), by)
    for path in (tree / fault.file, *_sources(tree, package)):
        text = path.read_text("utf-8") if path.exists() else ""
        lines = text.splitlines()
        if at := [i for i, line in enumerate(lines) if line == fault.before]:
            break
    else:
        return Verdict(fault, "gone", 0.0, "")
    lines[min(at, key=lambda i: abs(i + 1 - fault.line))] = fault.after
    path.write_text("\n".join(lines) + "\n", "utf-8")
    try:
        outcome, by = _tested(tree, package, limits)
    finally:
        path.write_text(text, "utf-8")
    return Verdict(fault, outcome, round(time.monotonic() - begun, 1), by)


def _tested(tree: Path, package: str, limits: Limits) -> tuple[str, str]:
    """The outcome of a package's tests, the quickest first, and the test that failed."""
    left = limits.seconds
    for tests in PACKAGES[package][1]:
        found = [str(path) for path in sorted(tree.glob(tests))]
        if not found:
            continue
        code, said, used = _run(tree, found, left, limits.arguments)
        by = next((s for s in said.splitlines()[::-1] if s.startswith(("FAILED", "ERROR"))), "")
        if code in (1, 2):  # a test failed, or could not be collected
            return "caught", by[:160]
        if code in _CRASHES:  # faults in compiled code end the process
            return "caught", f"pytest ended with {code}"
        if code == -signal.SIGXCPU:
            return "timeout", ""
        if code not in (0, 5):  # 5: no test was chosen
            return "error", f"pytest ended with {code}"
        left -= used
        if left < 1:
            return "timeout", ""
    return "missed", ""


def _run(
    tree: Path, tests: list[str], seconds: float, arguments: tuple[str, ...]
) -> tuple[int, str, float]:
    """Exit code, output, and processor seconds of pytest."""
    paths = os.pathsep.join(str(tree / part) for part in ("services", "pipelines"))
    env = os.environ | {"PYTHONPATH": paths, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as output:  # no pipe, which a child may hold open
        process = subprocess.Popen(
            [*command, *arguments, *tests], cwd=tree, env=env, start_new_session=True,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        most = max(round(seconds), 1)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (most, most + 5))
        deadline, used = time.monotonic() + _WALL * seconds, 0.0
        try:
            while process.poll() is None and time.monotonic() < deadline:
                used = _processor_seconds(process.pid) or used
                time.sleep(0.2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        output.seek(0)
        late = code == -signal.SIGKILL and time.monotonic() >= deadline
        return (-signal.SIGXCPU if late else code), output.read(), used


def _processor_seconds(pid: int) -> float:
    """What a process has used so far; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _control(package: str) -> Fault:
    return Fault(package, "", 0, "", "")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--list", type=Path, required=True, help="the faults, chosen or to be run")
    parser.add_argument("--run", action="store_true", help="plant those of --list")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the commit's checkout to test")
    parser.add_argument("--both", type=Path, metavar="OLD", help="choose faults OLD has, too")
    parser.add_argument("--count", type=at_least(len(PACKAGES)), default=60)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument(
        "--timeout", type=float, default=180.0, help="processor seconds of pytest for each fault"
    )
    parser.add_argument("--lanes", type=at_least(1), default=2, help="faults judged side by side")
    parser.add_argument(
        "--verdicts", type=Path, help="verdicts so far, a line each; those are not asked for again"
    )
    parser.add_argument("--pytest", nargs="*", default=[], help="further arguments, without dashes")
    options = parser.parse_args()
    if not options.run:
        faults = choose(options.tree, options.count, options.seed, options.both)
        options.list.write_text(json.dumps([asdict(f) for f in faults], indent=1) + "\n", "utf-8")
        to_stderr(f"{len(faults)} faults are in {options.list}")
        return
    _run_all(options)


def _run_all(options: argparse.Namespace) -> None:
    faults = [Fault(**each) for each in json.loads(options.list.read_text("utf-8"))]
    known = _known(options.verdicts)
    verdicts = list(known.values())
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for lane in range(options.lanes):
            tree = Path(folder) / str(lane)
            shutil.copytree(
                options.tree, tree, ignore=shutil.ignore_patterns(".venv", ".git", ".bench")
            )
            trees.put(tree)

        limits = Limits(options.timeout, tuple(f"--{a}" for a in options.pytest))

        def one(fault: Fault) -> Verdict:
            tree = trees.get()
            try:
                planted = fault if fault.file else None
                return judge(planted, fault.package, tree, limits)
            finally:
                trees.put(tree)

        controls = [_control(package) for package in PACKAGES]
        with ThreadPoolExecutor(options.lanes) as pool:
            for verdict in pool.map(one, [f for f in (*controls, *faults) if f not in known]):
                verdicts.append(verdict)
                _tell(verdict, len(verdicts), len(faults) + len(controls))
                if options.verdicts:
                    with options.verdicts.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(verdict)) + "\n")
    finish({"faults": len(faults), **_counts(verdicts)})


def _known(file: Path | None) -> dict[Fault, Verdict]:
    if file is None or not file.exists():
        return {}
    read = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    found = [Verdict(Fault(**each.pop("fault")), **each) for each in read]
    return {verdict.fault: verdict for verdict in found}


def _tell(verdict: Verdict, number: int, total: int) -> None:
    fault = verdict.fault
    what = f"{fault.file}:{fault.line}" if fault.file else f"no fault in {fault.package}"
    print(f"{number}/{total} {verdict.outcome} after {verdict.seconds} s: {what}", flush=True)
    if fault.file:
        to_stderr(f"    {fault.before.strip()}\n    {fault.after.strip()}")


def _counts(verdicts: list[Verdict]) -> dict[str, object]:
    planted = [v for v in verdicts if v.fault.file]
    outcomes = ("caught", "missed", "timeout", "gone", "error")
    caught = [v.fault.package for v in planted if v.outcome == "caught"]
    return {
        **{o: sum(v.outcome == o for v in planted) for o in outcomes},
        "caught_by_package": {package: caught.count(package) for package in PACKAGES},
        "without_fault": {v.fault.package: v.outcome for v in verdicts if not v.fault.file},
    }


if __name__ == "__main__":
    main()
