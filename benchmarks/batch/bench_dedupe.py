"""Rows/s of a batch job whose rows repeat earlier ones, with each answer decoded once or each time.

    python benchmarks/batch/bench_dedupe.py
    python benchmarks/batch/bench_dedupe.py --rows 5000 --repeats 3 --parts float32,int8,bfloat16
    python benchmarks/batch/bench_dedupe.py --rows 5000 --parts float32 --logprobs 2

`tasc generate` answers inputs of the shipped MASSIVE test data with the shipped model, one engine
and a draft index of the training data. A share of the rows repeats the input of an earlier row,
which is drawn uniformly. Where more distinct inputs are needed than the data has, number words are
added to them. Rows/s are those from the first report with a running engine, at most half a second
late, until the output is written, so starting Ray and the engine is left out. Rows per CPU second
of this process and its engine say the same on a machine that others use, too. The bar is a ratio of
1.2 with equal bytes in float32 and int8. In bfloat16 the kernels of some processors make a logit
depend on the rows computed with it; differing answers are counted there. The last line of stdout is
one JSON object. The exit code is 1 if outputs of float32 or int8 differ.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    Figure,
    about,
    add_json,
    add_repeats,
    at_least,
    finish,
    in_turn,
    names_of,
    parser_of,
    show_figures,
    to_stderr,
    use_one_thread,
    use_test_helpers,
)

TASK: Final = "massive_en"
PARTS: Final = {
    "float32": {},
    "int8": {"quantization": "int8-dynamic"},
    "bfloat16": {"dtype": "bfloat16"},
}
EXACT: Final = ("float32", "int8")
BAR: Final = 1.2
WORDS: Final = "", " one", " two", " three", " four", " five", " six", " seven", " eight", " nine"


@dataclass(frozen=True)
class Run:
    """A finished job.

    Attributes:
        repeats: Number of rows whose answer was copied.
        tokens: Number of tokens that were decoded.
    """

    output: Path
    rows_per_second: float
    rows_per_cpu_second: float
    repeats: int
    tokens: int
    block_efficiency: float


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=at_least(2), default=20_000, help="number of input rows (20000)")
    add("--share", type=float, default=0.3, help="share of rows that repeat an earlier one (0.3)")
    add(
        "--parts", type=names_of(*PARTS), default=EXACT, help="float32,int8,bfloat16 (float32,int8)"
    )
    add("--logprobs", type=at_least(0), help="write this many log-probabilities a token (none)")
    add_repeats(parser, 3)
    add("--seed", type=int, default=0, help="seed of the repeats (0)")
    add_json(parser)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    use_one_thread()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    use_test_helpers()
    from killable import RedisServer
    from tasc_jobs.demo.tasks import data_file, demo_record
    from tasc_jobs.index.build import build_and_publish
    from tasc_jobs.index.ingest import ingest
    from tasc_jobs.ray_local import local_ray
    from tasc_store import connect

    figures, parts = list[Figure](), dict[str, Any]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-dedupe-")))
        server = RedisServer(folder / "redis")
        stack.callback(server.kill)
        stack.enter_context(local_ray())
        to_stderr("draft index ...")
        with closing(connect(server.url)) as client:
            ingest(client, TASK, [data_file(TASK, "train")], reject=folder / "rejects")
        build_and_publish(server.url, demo_record(TASK))
        source = write_source(folder / "in.jsonl", options.rows, options.share, options.seed)
        for part in options.parts:
            parts[part], new = compared(part, server.url, source, folder / part, options)
            figures += new
    show_figures(figures)
    found = {"rows": options.rows, "share": options.share, "logprobs": options.logprobs}
    records = [figure.record for figure in figures]
    finish(
        {"benchmark": "dedupe", **found, "figures": records, "parts": parts, **about()},
        options.json,
    )
    return 0 if all(parts[part]["differing"] == 0 for part in EXACT if part in parts) else 1


def write_source(file: Path, rows: int, share: float, seed: int) -> Path:
    """Write rows, of which exactly a share repeats the input of an earlier row."""
    from support import write_rows
    from tasc_jobs.demo.tasks import read_split

    texts = dict.fromkeys(row["input"] for row in read_split(TASK, "test"))
    distinct = dict.fromkeys(text + a + b for b, a, text in product(WORDS, WORDS, texts))
    chance, repeats = random.Random(seed), round(rows * share)
    if not 0 < rows - repeats <= len(distinct):
        raise SystemExit(f"{rows - repeats} distinct rows; 1 to {len(distinct)} are possible")
    new, places = iter(distinct), set(chance.sample(range(1, rows), repeats))
    inputs: list[str] = []
    for place in range(rows):
        inputs.append(chance.choice(inputs) if place in places else next(new))
    return write_rows(file, [{"id": f"{n:06}", "input": text} for n, text in enumerate(inputs)])


def compared(
    part: str, url: str, source: Path, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], list[Figure]]:
    """Run the job on both sides in turn; returns the runs, and the figures of their ratios."""
    from tasc_jobs.demo.tasks import demo_record
    from tasc_store import TaskStore, connect

    with closing(connect(url)) as client:
        TaskStore(client).put(demo_record(TASK, **PARTS[part]))
    folder.mkdir()
    sides = {name: partial(run, name, url, source, folder, options) for name in ("on", "off")}
    to_stderr(f"{part}: warm-up ...")
    sides["off"]()
    found = in_turn(sides, options.repeats)
    pairs = list(zip(found["on"], found["off"], strict=True))
    differing = max(differing_lines(a.output, b.output) for a, b in pairs)
    ratios = [a.rows_per_second / b.rows_per_second for a, b in pairs]
    of_cpu = [a.rows_per_cpu_second / b.rows_per_cpu_second for a, b in pairs]
    figures = [
        Figure.of_runs(f"{part}: rows/s, dedupe on / off", ratios, "x", BAR),
        Figure.of_runs(f"{part}: rows per CPU second, dedupe on / off", of_cpu, "x"),
        *(
            Figure.of_runs(f"{part}: dedupe {name}", [r.rows_per_second for r in runs], "rows/s")
            for name, runs in found.items()
        ),
    ]
    runs = {
        name: [{k: v for k, v in asdict(each).items() if k != "output"} for each in runs]
        for name, runs in found.items()
    }
    return {"differing": differing, **runs}, figures


def run(name: str, url: str, source: Path, folder: Path, options: argparse.Namespace) -> Run:
    """Run the job once, to an output of its own."""
    from killable import pids
    from tasc_jobs.batch.generate import generate
    from tasc_jobs.batch.inputs import Source
    from tasc_jobs.batch.work import JobProgress
    from tasc_protocol import Request
    from tasc_runtime.engine_settings import EngineSettings

    began: list[tuple[float, int]] = []  # the time, and the rows that were done
    engines: list[int] = []  # ids of their processes
    used: list[float] = []  # CPU seconds so far, at each turn of the job

    def progress(found: JobProgress) -> None:
        if found.engines and not began:
            engines.extend(pids("ray::EngineActor"))
            began.append((time.monotonic(), found.report.rows))

    def look() -> bool:
        if began:
            used.append(cpu_seconds(engines))
        return False

    output = folder / f"{len(list(folder.glob('*.jsonl')))}.jsonl"
    more = {} if name == "on" else {"dedupe_bytes": 0}
    engine, asked = EngineSettings(max_model_len=256), Request(logprobs=options.logprobs)
    report = generate(
        url, TASK, Source.of(source), output,
        engine=engine, asked=asked, progress=progress, should_stop=look, **more,
    )  # fmt: skip
    (start, done), ended = began[0], time.monotonic()
    assert (report.rows, report.errors) == (options.rows, 0)
    rate, cpu_rate = ((report.rows - done) / s for s in (ended - start, used[-1] - used[0]))
    to_stderr(f"  dedupe {name}: {rate:.1f} rows/s, {cpu_rate:.1f} per CPU second")
    return Run(output, rate, cpu_rate, report.repeats, report.tokens, report.block_efficiency)


def cpu_seconds(engines: Sequence[int]) -> float:
    """CPU seconds of this process and of its engines so far."""
    ticks = 0
    for pid in engines:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def differing_lines(one: Path, other: Path) -> int:
    """The number of lines that differ; 0 if the files have the same bytes."""
    with one.open("rb") as left, other.open("rb") as right:
        return sum(a != b for a, b in zip(left, right, strict=True))


if __name__ == "__main__":
    sys.exit(main())
