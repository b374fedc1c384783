"""Time the counting of n-grams against plain pyarrow, and against an older checkout.

    python benchmarks/batch/bench_counting.py
    python benchmarks/batch/bench_counting.py --data DIR --before CHECKOUT
    python benchmarks/batch/bench_counting.py --parts stats --copies 1 --repeats 1

The rows are those of DIR/train.jsonl.gz, by default the shipped MASSIVE rows, 40 times over. Each
row gets its number as the last word of its input, so all rows differ. Every run is a process of
its own, and the sides take turns.

stats: `tasc stats --train` on one core, in CPU seconds of the whole process, since other processes
may share the machine. The ceiling is fifteen lines of pyarrow on one thread for the same bigram
figures alone: no lengths, no whole texts, no check of any row. job, tokenise: seconds of the
statistics job and of the tokenising stage of the index job on the same rows in Redis, with two
workers that already run. --before names a git worktree of another commit.

The figures and tokens of all sides have to be equal. Progress goes to stderr; the last line of
stdout is one JSON object. The exit code is 1 if a bar is missed or sides differ.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    ROOT,
    Figure,
    Measure,
    about,
    add_data,
    add_json,
    add_parts,
    add_repeats,
    at_least,
    finish,
    folder,
    in_turn,
    measured,
    median_of,
    parser_of,
    read_rows,
    to_stderr,
    use_one_thread,
    use_test_helpers,
    versions,
)

BAR = 2.0  # times the CPU seconds of plain pyarrow
SHIPPED = ROOT / "pipelines/tasc_jobs/demo/data/massive_en.train.jsonl.gz"
SIDES = Path(__file__).with_name("counting_sides.py")
_COMMAND = "from tasc_jobs.cli.main import main; main()"
_FEW, _TASK = "few", "all"
_APPENDED = 1000  # rows


@dataclass(frozen=True)
class Run:
    """What a process printed, its seconds, and its memory in MB."""

    found: dict[str, Any]
    cpu: float
    wall: float
    memory: float


@dataclass(frozen=True)
class Work:
    """The rows in a file, the checkouts to measure by name, and the options."""

    file: Path
    rows: int
    checkouts: dict[str, Path]
    repeats: int


def timed(checkout: Path, command: list[str], *, one_core: bool = False) -> Run:
    """Runs a program with the packages of a checkout, if wanted on one core."""
    paths = os.pathsep.join(str(checkout / part) for part in ("services", "pipelines"))
    cores = os.sched_getaffinity(0)
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out, ExitStack() as undo:
        if one_core:
            undo.callback(os.sched_setaffinity, 0, cores)
            os.sched_setaffinity(0, {min(cores)})  # the process inherits it
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=out,
            stderr=subprocess.DEVNULL if one_core else None,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        if process.returncode:
            raise RuntimeError(f"{command} ended with {process.returncode}")
        out.seek(0)
        found = json.loads(out.read().splitlines()[-1])
    return Run(found, used.ru_utime + used.ru_stime, wall, used.ru_maxrss / 1024)


def measure_stats(work: Work) -> tuple[list[Figure], dict[str, Any]]:
    command = ["-c", _COMMAND, "stats", "--train", str(work.file), "--json"]
    runs: dict[str, Callable[[], Run]] = {
        name: partial(timed, checkout, command, one_core=True)
        for name, checkout in work.checkouts.items()
    }
    plain = [str(SIDES), "pyarrow", str(work.file)]
    runs["pyarrow"] = partial(timed, ROOT, plain, one_core=True)
    found = in_turn(runs, work.repeats, tick=lambda: to_stderr("."))
    ceiling = found.pop("pyarrow")
    figures = [Figure.of_runs("plain pyarrow", [run.cpu for run in ceiling], "CPU s")]
    for name, own in found.items():
        figures.append(Figure.of_runs(f"tasc stats, {name}", [run.cpu for run in own], "CPU s"))
        ratios = [run.cpu / plain.cpu for run, plain in zip(own, ceiling, strict=True)]
        bar = BAR if name == "now" else None
        figures.append(Figure.of_runs(f"  / plain pyarrow, {name}", ratios, "x", bar, False))
        memory = [run.memory for run in own]
        figures.append(Figure.of_runs(f"  memory, {name}", memory, "MB"))
    first = found["now"][0].found
    same = all(run.found == first for own in found.values() for run in own)
    same = same and all(equal_bigrams(first, run.found) for run in ceiling)
    return figures, {"equal": same, "seconds": {k: [r.cpu for r in v] for k, v in found.items()}}


def equal_bigrams(stats: dict[str, Any], plain: dict[str, Any]) -> bool:
    """Whether the figures are equal; entropies differ in the order of a sum."""
    return all(
        math.isclose(value, stats[side][name], rel_tol=1e-9)
        for side, figures in plain.items()
        for name, value in figures.items()
    )


def measure_job(part: str, work: Work) -> tuple[list[Figure], dict[str, Any]]:
    from tasc_store import CorpusRow, CorpusStore, EmbeddedRedis, connect

    with closing(EmbeddedRedis.start()) as redis:
        with closing(connect(redis.url)) as client, work.file.open("rb") as lines:
            rows = (CorpusRow(**{"key": r.pop("id"), **r}) for r in map(json.loads, lines))
            few = list(islice(rows, _APPENDED))
            CorpusStore(client, _FEW).append(few)
            CorpusStore(client, _TASK).append(few)
            while more := list(islice(rows, _APPENDED)):
                CorpusStore(client, _TASK).append(more)
        runs = {
            name: partial(timed, checkout, [str(SIDES), part, redis.url, _FEW, _TASK])
            for name, checkout in work.checkouts.items()
        }
        found = in_turn(runs, work.repeats, tick=lambda: to_stderr("."))
    seconds = {name: [run.found["seconds"] for run in own] for name, own in found.items()}
    figures = [Figure.of_runs(f"{part}, {name}", own, "s") for name, own in seconds.items()]
    if "before" in seconds:
        pairs = zip(seconds["before"], seconds["now"], strict=True)
        faster = [before / now for before, now in pairs]
        figures.append(Figure.of_runs(f"{part}, before / now", faster, "x"))
    digests = {run.found["digest"] for own in found.values() for run in own}
    rate = work.rows / median_of(seconds["now"])
    return figures, {"equal": len(digests) == 1, "rows_per_second": rate, "seconds": seconds}


MEASURES: dict[str, Measure] = {
    "stats": measure_stats,
    "job": partial(measure_job, "job"),
    "tokenise": partial(measure_job, "tokenise"),
}


def written(data: Path | None, copies: int, file: Path) -> int:
    """Writes the rows, all of which differ, and returns their number."""
    rows = read_rows(data / "train.jsonl.gz" if data else SHIPPED)
    numbers = count()
    with file.open("w", encoding="utf-8") as lines:
        for row in chain.from_iterable(repeat(rows, copies)):
            number = next(numbers)
            own = {"id": str(number), "input": f"{row['input']} {number}", "output": row["output"]}
            lines.write(json.dumps(own, ensure_ascii=False) + "\n")
    return next(numbers)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_data(parser)
    add_parts(parser, tuple(MEASURES))
    add_repeats(parser, 5)
    parser.add_argument("--copies", type=at_least(1), default=40, help="times the rows (40)")
    parser.add_argument("--before", type=folder, help="checkout of an older commit to measure, too")
    add_json(parser)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    use_one_thread()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    use_test_helpers()
    with tempfile.TemporaryDirectory(prefix="bench-counting-") as data:
        file = Path(data) / "train.jsonl"
        rows = written(options.data, options.copies, file)
        checkouts = {"now": ROOT} | ({"before": options.before} if options.before else {})
        work = Work(file, rows, checkouts, options.repeats)
        found = measured(MEASURES, options.parts, work)
    equal = all(found[part]["equal"] for part in options.parts)
    print("all sides have the same figures" if equal else "the sides DIFFER")
    made_with = versions("pyarrow", "numpy", "ray", "tokenizers")
    finish(
        {"benchmark": "counting", "rows": rows, **found, "versions": made_with, **about()},
        options.json,
    )
    missed = [figure for figure in found["figures"] if figure["passed"] is False]
    return 1 if missed or not equal else 0


if __name__ == "__main__":
    sys.exit(main())
