"""Plants single-line faults in the product, one at a time, and counts those that tests catch.

The faults are chosen by a seed: a comparison, an operator, a condition or a constant of one line
changes. Each is planted in a copy of the repository, and the tests of its package run there until
the first failure. A fault that no test notices shows what the tests do not prove.

    python benchmarks/suite/faults.py --list faults.json          # choose faults, once
    python benchmarks/suite/faults.py --list faults.json --run    # plant them and run the tests

The list names faults by the text of their line, so another commit's tests can be given the same.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    "serve": ("services/tasc_serve", ("tests/unit/tasc_serve", "tests/integration/serve")),
    "jobs": (
        "pipelines/tasc_jobs",
        ("tests/unit/tasc_jobs", "tests/integration/**/test_cli*.py", "tests/integration/jobs"),
    ),
}
_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}
_GPU = ("/gpu/", "/demo/train.py")  # not run on the machines that run the tests


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
    """``caught``, ``missed`` (the tests ended green), ``timeout`` (green so far) or ``gone``."""

    fault: Fault
    outcome: str
    seconds: float
    by: str


def choose(root: Path, count: int, seed: int) -> list[Fault]:
    """As many faults of each package, drawn from all places where one can be planted."""
    rng = random.Random(seed)
    found = []
    for package, (folder, _) in PACKAGES.items():
        files = sorted((root / folder).rglob("*.py"))
        places = [
            fault
            for path in files
            if not any(part in path.as_posix() for part in _GPU)
            for fault in _faults_of(package, path, root)
        ]
        found += rng.sample(places, count // len(PACKAGES))
    return found


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


def judge(fault: Fault, tree: Path, timeout_s: float, arguments: list[str]) -> Verdict:
    """Plant a fault in a tree, run its package's tests there, and take it out again."""
    path = tree / fault.file
    text = path.read_text("utf-8") if path.exists() else ""
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if line == fault.before]
    if not at:
        return Verdict(fault, "gone", 0.0, "")
    lines[min(at, key=lambda i: abs(i + 1 - fault.line))] = fault.after
    path.write_text("\n".join(lines) + "\n", "utf-8")
    begun = time.monotonic()
    try:
        code, said = _run(tree, PACKAGES[fault.package][1], timeout_s, arguments)
    finally:
        path.write_text(text, "utf-8")
    outcome = {None: "timeout", 0: "missed"}.get(code, "caught")
    by = next((s for s in said.splitlines()[::-1] if s.startswith(("FAILED", "ERROR"))), "")
    return Verdict(fault, outcome, round(time.monotonic() - begun, 1), by[:160])


def _run(
    tree: Path, tests: tuple[str, ...], timeout_s: float, arguments: list[str]
) -> tuple[int | None, str]:
    paths = os.pathsep.join(str(tree / part) for part in ("services", "pipelines"))
    env = os.environ | {"PYTHONPATH": paths, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=0",
    ]
    found = [str(path) for each in tests for path in sorted(tree.glob(each))]
    process = subprocess.Popen(
        [*command, *arguments, *found], cwd=tree, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout_s)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--list", type=Path, required=True, help="the faults, chosen or to be run")
    parser.add_argument("--run", action="store_true", help="plant those of --list")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the commit's checkout to test")
    parser.add_argument("--count", type=at_least(len(PACKAGES)), default=60)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds a fault's tests get")
    parser.add_argument("--lanes", type=at_least(1), default=2, help="faults judged side by side")
    parser.add_argument(
        "--verdicts", type=Path, help="verdicts so far, a line each; those are not asked for again"
    )
    parser.add_argument("--pytest", nargs="*", default=[], help="further arguments, without dashes")
    asked = parser.parse_args()
    if not asked.run:
        faults = choose(asked.tree, asked.count, asked.seed)
        asked.list.write_text(json.dumps([asdict(f) for f in faults], indent=1) + "\n", "utf-8")
        to_stderr(f"{len(faults)} faults are in {asked.list}")
        return
    _run_all(asked)


def _run_all(asked: argparse.Namespace) -> None:
    faults = [Fault(**each) for each in json.loads(asked.list.read_text("utf-8"))]
    known = _known(asked.verdicts)
    verdicts = [known[f] for f in faults if f in known]
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for lane in range(asked.lanes):
            tree = Path(folder) / str(lane)
            shutil.copytree(
                asked.tree, tree, ignore=shutil.ignore_patterns(".venv", ".git", ".bench")
            )
            trees.put(tree)

        def one(fault: Fault) -> Verdict:
            tree = trees.get()
            try:
                return judge(fault, tree, asked.timeout, [f"--{a}" for a in asked.pytest])
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(asked.lanes) as pool:
            for verdict in pool.map(one, [f for f in faults if f not in known]):
                verdicts.append(verdict)
                _tell(verdict, len(verdicts), len(faults))
                if asked.verdicts:
                    with asked.verdicts.open("a", encoding="utf-8") as file:
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
    print(
        f"{number}/{total} {verdict.outcome} after {verdict.seconds} s: {fault.file}:{fault.line}"
    )
    to_stderr(f"    {fault.before.strip()}\n    {fault.after.strip()}")


def _counts(verdicts: list[Verdict]) -> dict[str, object]:
    outcomes = ("caught", "missed", "timeout", "gone")
    by_package = {
        package: sum(v.outcome == "caught" for v in verdicts if v.fault.package == package)
        for package in PACKAGES
    }
    counts = {o: sum(v.outcome == o for v in verdicts) for o in outcomes}
    return {**counts, "caught_by_package": by_package}


if __name__ == "__main__":
    main()
