"""A batch job that writes a folder of parts: its speed, its memory, faults, and an object store.

    python benchmarks/batch/bench_parts.py
    python benchmarks/batch/bench_parts.py --parts speed --repeats 3
    python benchmarks/batch/bench_parts.py --parts memory --most-rows 10000000
    python benchmarks/batch/bench_parts.py --parts kills --kill-rows 2000 --tiny
    python benchmarks/batch/bench_parts.py --parts s3 --s3-rows 2000

``speed``: rows/s of `tasc generate` that writes one file, and parts, divided by those of one `LLM`
in a process without Ray's actors. All have one engine of the shipped model with one thread, drafts
of the same rows, and the same distinct inputs. Starts are left out: the time of a job begins at the
first report of finished rows, that of the `LLM` after its first batch. The sides alternate. Rows
per CPU second of the job's process and its engine say the same on a machine that others use, too.

``memory``: the peak memory of the process of a job, by its number of rows. Its engine is a stub
without a model, see `stub_parts`. The fewest rows are measured twice, which shows the noise.

``kills``: a job with two engines on a cluster of two nodes on this machine. Once each, SIGKILL ends
the command, an engine, Redis and a node, and the disk of the output is full. Redis is away for some
seconds. A command that ended is run again. Each row is decoded, although inputs repeat. The output
must have the bytes of an undisturbed run and each id once. The disk is a small tmpfs, which only
root can mount; others miss this fault. With --tiny, the model is a random one of two layers.

``s3``: a job whose input and output are in moto's S3 server, behind a proxy that answers with
errors, late, or not at all. Its output must have the bytes of the same job on a disk.

Each part of this benchmark runs in a process of its own, which has one Ray. The last line of stdout
is one JSON object. The exit code is 1 if answers or outputs differ, an id is missing or doubled, or
a fault did not happen.
"""

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    Figure,
    Measure,
    about,
    add_json,
    add_parts,
    add_repeats,
    at_least,
    finish,
    in_turn,
    measured,
    names_of,
    parser_of,
    show_table,
    to_stderr,
    use_one_thread,
    use_test_helpers,
)

TASK: Final = "massive_en"
PARTS: Final = ("speed", "memory", "kills", "s3")
FAULTS: Final = ("driver", "engine", "redis", "node", "disk")
BAR: Final = 0.9  # of the rows/s of the engine alone
MOST_MB: Final = 50.0  # of further memory with many rows
FIRST: Final = 256  # rows of the `LLM` before its time begins
WARM_ROWS: Final = 300
FEWEST_ROWS: Final = 100_000
MOST_STARTS: Final = 12  # of a job that is disturbed
DEADLINE_S: Final = 3 * 3600.0
ACTOR: Final = "ray::PartActor"
# The command would measure the step costs of a new model, which takes longer than the tiny job.
_TINY_COMMAND = """
import sys
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.parts import Plan, generate_parts
from tasc_jobs.ray_local import local_ray
from tasc_runtime.engine_settings import EngineSettings
_, _, task, _, source, _, output, _, url, _, length, _, _, actors, _, part_bytes, *_ = sys.argv
engine = EngineSettings(max_model_len=int(length), cost_aware=False)
plan = Plan.of(Source.of(source), output, int(part_bytes))
with local_ray():
    generate_parts(url, task, plan, engine=engine, actors=int(actors), dedupe_bytes=0)
"""


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_parts(parser, PARTS)
    add("--rows", type=at_least(2), default=5000, help="rows of speed (5000)")
    add("--few-rows", type=at_least(1), default=FEWEST_ROWS, help="fewest of memory (100000)")
    add("--most-rows", type=at_least(1), default=2_000_000, help="most of memory (2000000)")
    add("--kill-rows", type=at_least(1), default=20_000, help="rows of kills (20000)")
    add("--s3-rows", type=at_least(1), default=2000, help="rows of s3 (2000)")
    add("--part-bytes", type=at_least(1), default=1 << 15, help="bytes of a part (32768)")
    faults = ",".join(FAULTS)
    add("--faults", type=names_of(*FAULTS), default=FAULTS, help=f"faults of kills ({faults})")
    add("--redis-down", type=float, default=3.0, help="seconds without Redis (3)")
    add("--disk-mb", type=at_least(1), default=64, help="size of the disk that is filled (64)")
    add("--seed", type=int, default=0, help="seed of the faults (0)")
    add("--tiny", action="store_true", help="use a random model of two layers for kills and s3")
    add_repeats(parser, 3)
    add_json(parser)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    use_one_thread()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's processes get it from `local_ray`; torch reads it once.
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    measures: dict[str, Measure] = {
        name: partial(apart, measure)
        for name, measure in zip(PARTS, (speed, memory, kills, s3), strict=True)
    }
    found = measured(measures, options.parts, options)
    sound = all(found[part]["sound"] for part in options.parts)
    print("all outputs are right" if sound else "AN OUTPUT IS WRONG, or a fault did not happen")
    finish({"benchmark": "parts", **found, "sound": sound, **about()}, options.json)
    return 0 if sound else 1


def apart(measure: Measure, options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """Measure in a process of its own; the record has the machine's load before and after."""
    before = os.getloadavg()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        figures, found = pool.submit(measure, options).result()
    return figures, {**found, "load_before": before, "load_after": os.getloadavg()}


@contextmanager
def folder_of(name: str) -> Iterator[Path]:
    use_test_helpers()
    with tempfile.TemporaryDirectory(prefix=f"bench-{name}-", ignore_cleanup_errors=True) as made:
        yield Path(made)


# Speed


def speed(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    with folder_of("speed") as folder, ExitStack() as stack:
        from benchmarks.batch.bench_dedupe import write_source
        from killable import RedisServer
        from tasc_jobs.demo.tasks import data_file, demo_record
        from tasc_jobs.index.build import build_and_publish
        from tasc_jobs.index.ingest import ingest
        from tasc_jobs.ray_local import local_ray
        from tasc_store import TaskStore, connect

        server = RedisServer(folder / "redis")
        stack.callback(server.kill)
        stack.enter_context(local_ray())
        to_stderr("draft index ...")
        with closing(connect(server.url)) as client:
            TaskStore(client).put(demo_record(TASK))
            ingest(client, TASK, [data_file(TASK, "train")], reject=folder / "rejects")
        build_and_publish(server.url, demo_record(TASK))
        texts: dict[str, list[str]] = {}

        def sides(rows: int) -> dict[str, Callable[[], tuple[float, float]]]:
            source = write_source(folder / f"in-{rows}.jsonl", rows, 0.0, options.seed)
            jobs = {
                name: partial(
                    by_job, name, server.url, source, folder, rows, options.part_bytes, texts
                )
                for name in ("one file", "parts")
            }
            return {"alone": partial(by_llm, source, texts), **jobs}

        to_stderr("all sides on a few rows, to compile and to measure step costs ...")
        in_turn(sides(min(options.rows, WARM_ROWS)), 1)
        runs = in_turn(sides(options.rows), options.repeats)
    equal = texts["alone"] == texts["one file"] == texts["parts"]
    figures = list[Figure]()
    for name in ("one file", "parts"):
        pairs = list(zip(runs[name], runs["alone"], strict=True))
        ratios, of_cpu = ([mine[i] / alone[i] for mine, alone in pairs] for i in (0, 1))
        figures.append(Figure.of_runs(f"rows/s, {name} / engine alone", ratios, "x", BAR))
        figures.append(Figure.of_runs(f"rows per CPU second, {name} / alone", of_cpu, "x"))
    for name, found in runs.items():
        figures.append(Figure.of_runs(f"speed: {name}", [rate for rate, _ in found], "rows/s"))
    print(f"speed: answers {'equal' if equal else 'DIFFERENT'}")
    return figures, {"rows": options.rows, "runs": runs, "sound": equal}


def by_llm(source: Path, texts: dict[str, list[str]]) -> tuple[float, float]:
    """Rows/s and rows per CPU second of a new `LLM` in this process."""
    from tasc_jobs.demo.tasks import ADAPTERS, MODEL, TEMPLATES, data_file
    from tasc_serve import LLM

    with source.open(encoding="utf-8") as lines:
        inputs = [json.loads(line)["input"] for line in lines]
    corpus, adapter = data_file(TASK, "train"), ADAPTERS / TASK
    llm = LLM(
        MODEL, adapter=adapter, template=TEMPLATES[TASK], corpus=corpus, device="cpu",
        max_model_len=256,
    )  # fmt: skip
    first = min(FIRST, len(inputs) // 2)
    answers = llm.generate(inputs[:first], progress=False)
    began, used = time.monotonic(), time.process_time()
    answers += llm.generate(inputs[first:], progress=False)
    seconds, cpu = time.monotonic() - began, time.process_time() - used
    texts["alone"] = [answer.text for answer in answers]
    rows = len(inputs) - first
    to_stderr(f"  alone: {rows / seconds:.1f} rows/s, {rows / cpu:.1f} per CPU second")
    return rows / seconds, rows / cpu


def by_job(
    side: str,
    url: str,
    source: Path,
    folder: Path,
    rows: int,
    part_bytes: int,
    texts: dict[str, list[str]],
) -> tuple[float, float]:
    """Rows/s and rows per CPU second of a job with one engine, dedupe off."""
    from benchmarks.batch.bench_dedupe import cpu_seconds
    from killable import pids
    from tasc_jobs.batch import job
    from tasc_jobs.batch.generate import generate
    from tasc_jobs.batch.inputs import Source
    from tasc_jobs.batch.parts import Plan, generate_parts
    from tasc_jobs.batch.work import JobProgress
    from tasc_runtime.engine_settings import EngineSettings

    actor, engines = ACTOR if side == "parts" else "ray::EngineActor", list[int]()
    began, used = list[tuple[float, int]](), list[float]()

    def progress(found: JobProgress) -> None:
        if found.report.rows and not began:
            engines.extend(pids(actor))
            began.append((time.monotonic(), found.report.rows))

    def look() -> bool:
        if began:
            used.append(cpu_seconds(engines))
        return False

    output = folder / f"{side.replace(' ', '-')}-{len(list(folder.iterdir()))}.jsonl"
    given = Source.of(source)
    more: dict[str, Any] = {
        "engine": EngineSettings(max_model_len=256),
        "dedupe_bytes": 0,
        "progress": progress,
        "should_stop": look,
    }
    with patch.object(job, "_REPORT_S", 0.0):  # else reports are up to half a second late
        if side == "parts":
            report = generate_parts(url, TASK, Plan.of(given, str(output), part_bytes), **more)
        else:
            report = generate(url, TASK, given, output, **more)
    (start, done), ended = began[0], time.monotonic()
    assert (report.rows, report.errors) == (rows, 0)
    assert len(engines) == 1
    texts[side] = [row["text"] for row in answers_of(output)]
    later = rows - done
    rate, of_cpu = later / (ended - start), later / (used[-1] - used[0])
    to_stderr(f"  {side}: {rate:.1f} rows/s, {of_cpu:.1f} per CPU second; the last {later} rows")
    return rate, of_cpu


def answers_of(output: Path) -> Iterator[dict[str, Any]]:
    """The rows of an output, which is one file or a folder of parts."""
    for file in [output] if output.is_file() else sorted(output.glob("part-*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


# Memory


def memory(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    with folder_of("memory") as folder, ExitStack() as stack:
        from killable import RedisServer
        from tasc_jobs.demo.tasks import demo_record
        from tasc_store import TaskStore, connect

        server = RedisServer(folder / "redis")
        stack.callback(server.kill)
        with closing(connect(server.url)) as client:
            TaskStore(client).put(demo_record(TASK))
        counts = options.few_rows, options.most_rows, options.few_rows
        runs = [driven(server.url, folder, rows) for rows in counts]
    peaks = [run["peak_mb"] for run in runs]
    growth = [peaks[1] - peaks[0], peaks[1] - peaks[2]]
    label = f"driver's memory, {options.most_rows:,} rows - {options.few_rows:,}"
    figures = [Figure(label, max(growth), "MB", MOST_MB, False, min(growth), max(growth))]
    for run in runs:
        name = f"{run['rows']:,} rows with a stub"
        figures.append(Figure(f"{name}: driver's peak", run["peak_mb"], "MB"))
        figures.append(
            Figure(f"{name}: of it during the job", run["peak_mb"] - run["before_mb"], "MB")
        )
        figures.append(Figure(f"{name}: answers on disk", run["output_mb"], "MB"))
    sound = all(run["rows"] == rows == run["lines"] for run, rows in zip(runs, counts, strict=True))
    return figures, {"engine": "stub", "runs": runs, "sound": sound}


def driven(url: str, folder: Path, rows: int) -> dict[str, Any]:
    """Run a job with a stub engine in a process of its own; returns its report and its memory."""
    to_stderr(f"  {rows:,} rows ...")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        source, output = Path(made, "in.jsonl"), Path(made, "out")
        with source.open("w", encoding="utf-8") as file:
            for number in range(rows):
                row = {"id": f"{number:08}", "input": f"wake me up at nine am on day {number}"}
                file.write(json.dumps(row) + "\n")
        program = Path(__file__).with_name("stub_parts.py")
        command = [sys.executable, program, url, TASK, source, f"{output}/"]
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError("the job with a stub engine failed; see above")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        parts = list(output.glob("part-*"))
        found["parts"], found["input_mb"] = len(parts), source.stat().st_size / 1e6
        found["output_mb"] = sum(part.stat().st_size for part in parts) / 1e6
        found["lines"] = sum(map(lines_of, parts))
    to_stderr(f"  {found}")
    return found


def lines_of(file: Path) -> int:
    with file.open("rb") as opened:
        return sum(block.count(b"\n") for block in iter(lambda: opened.read(1 << 20), b""))


# Kills


@dataclass(frozen=True)
class Hit:
    """A fault and its effect.

    Attributes:
        parts: Number of written parts at the fault.
        shown: Whether it was seen to happen, by ``evidence``.
        recovery_seconds: The time from the fault until another part was written.
    """

    kind: str
    parts: int
    shown: bool
    evidence: str
    recovery_seconds: float


class Job:
    """`tasc generate` in a process of its own, on the cluster at RAY_ADDRESS, which is harmed."""

    def __init__(
        self, command: list[str], output: Path, log: Path, server: Any, nodes: "Nodes"
    ) -> None:
        self._command, self.output, self._log = command, output, log
        self._server, self._nodes = server, nodes
        self.starts, self.hits, self.statuses = 0, list[Hit](), list[int]()
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        if self.starts == MOST_STARTS:
            raise RuntimeError(f"the job was started {MOST_STARTS} times: {self.said()[-2000:]}")
        with self._log.open("ab") as log:
            log.write(b"\n--- a start ---\n")
            log.flush()
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True
            )
        self.starts += 1

    def said(self) -> str:
        """The output of the last start."""
        return self._log.read_text(errors="replace").rpartition("--- a start ---")[2]

    def end(self) -> None:
        """Kill the command if it is still running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def parts(self) -> int:
        return len(list(self.output.glob("part-*.jsonl")))

    def reaches(self, parts: float) -> bool:
        """Wait for so many parts, and run the command again if it fails; whether it still runs."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            status = self.process.poll()
            if status == 0:
                return False
            if status is not None:
                self.statuses.append(status)
                to_stderr(f"  the command ended with {status}: {self.said().strip()[-300:]}")
                self.start()
            if self.parts >= parts:
                return True
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.02)

    def whole(self) -> float:
        """Run the command until it succeeds; returns the seconds since the call."""
        began = time.monotonic()
        self.reaches(float("inf"))
        return time.monotonic() - began

    def harm(self, kind: str, filler: Path) -> None:
        """Cause a fault, make sure that it happened, and wait for another part."""
        parts, began = self.parts, time.monotonic()
        harms: Mapping[str, Callable[[], tuple[bool, str]]] = {
            "driver": self._kill_driver,
            "engine": self._kill_engine,
            "redis": self._kill_redis,
            "node": self._kill_node,
            "disk": partial(self._fill_disk, filler),
        }
        shown, evidence = harms[kind]()
        self.reaches(parts + 1)
        self.hits.append(Hit(kind, parts, shown, evidence, time.monotonic() - began))
        to_stderr(f"  {self.hits[-1]}")

    def _kill_driver(self) -> tuple[bool, str]:
        self.process.kill()
        status, evidence = self.process.wait(), f"status {self.process.returncode}"
        self.start()
        return status == -signal.SIGKILL, evidence

    def _kill_engine(self) -> tuple[bool, str]:
        pid = self._engines()[0]
        os.kill(pid, signal.SIGKILL)
        return gone([pid]), f"engine {pid} is gone"

    def _kill_redis(self) -> tuple[bool, str]:
        from killable import redis_answers

        self._server.kill()
        down = not redis_answers(self._server.url)
        before = self.parts
        time.sleep(self._nodes.redis_down_s)
        down = down and not redis_answers(self._server.url)
        written = self.parts - before
        self._server.start()
        return down, f"no answer for {self._nodes.redis_down_s} s, {written} parts meanwhile"

    def _kill_node(self) -> tuple[bool, str]:
        there = self._engines(self._nodes.raylet)
        self._nodes.replace_node()
        return bool(there) and gone(there), f"engines {there} of the node are gone"

    def _fill_disk(self, filler: Path) -> tuple[bool, str]:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        status = self.process.wait(DEADLINE_S)
        full = "No space left" in self.said()
        said = " ".join(self.said().split())[-200:]
        filler.unlink()
        self.start()
        return bool(status) and full, f"status {status}: {said}"

    def _engines(self, below: int | None = None) -> list[int]:
        """Ids of the engines that work; waits for one."""
        from killable import pids
        from support import eventually

        eventually(lambda: pids(ACTOR, below))
        return sorted(pids(ACTOR, below))


def gone(those: list[int]) -> bool:
    """Wait until processes have ended."""
    from support import eventually

    eventually(lambda: not any(map(runs, those)))
    return True


def runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Nodes:
    """Two nodes of Ray on this machine with a logical CPU each; the second can be killed."""

    def __init__(self, redis_down_s: float) -> None:
        from ray.cluster_utils import Cluster

        self.redis_down_s = redis_down_s
        args: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
        head = {**args, "include_dashboard": False}
        self._args, self.cluster = args, Cluster(initialize_head=True, head_node_args=head)
        self._node = self.cluster.add_node(**args)

    @property
    def raylet(self) -> int:
        """Process of the second node, which has its engines below it."""
        pid: int = self._node.all_processes["raylet"][0].process.pid
        return pid

    def replace_node(self) -> None:
        self.cluster.remove_node(self._node, allow_graceful=False)
        self._node = self.cluster.add_node(**self._args)


def kills(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    # Ray's sockets are open to others, so that they need a token.
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["RAY_scheduler_spread_threshold"] = "0.0"  # an engine on each node
    os.environ.update({**environment, "RAY_worker_niceness": "0"})
    with folder_of("kills") as folder, ExitStack() as stack:
        from benchmarks.batch.runs import prepare
        from killable import RedisServer

        server = RedisServer(folder / "redis")
        stack.callback(server.kill)
        of_ray = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        os.environ["RAY_TMPDIR"] = stack.enter_context(of_ray)  # short, for the paths of sockets
        nodes = Nodes(options.redis_down)
        stack.callback(nodes.cluster.shutdown)
        os.environ["RAY_ADDRESS"] = nodes.cluster.address
        work = prepare(server.url, folder, options.kill_rows, tiny=options.tiny)
        if options.tiny:
            work = replace(work, code=_TINY_COMMAND)
        disk = stack.enter_context(small_disk(folder / "disk", options.disk_mb))
        faults = [kind for kind in options.faults if disk or kind != "disk"]
        random.Random(options.seed).shuffle(faults)

        def job(output: Path) -> Job:
            output.mkdir()
            more = ["--actors", "2", "--part-bytes", str(options.part_bytes), "--no-dedupe"]
            command = [*work.command(output, server.url), *more]
            made = Job(command, output, folder / f"{output.name}.log", server, nodes)
            made.start()
            stack.callback(made.end)
            return made

        to_stderr(f"  undisturbed: {options.kill_rows} rows ...")
        alone = job(folder / "alone")
        seconds = {"undisturbed": alone.whole()}
        to_stderr(f"  {alone.parts} parts in {seconds['undisturbed']:.1f} s; disturbed ...")
        began, harmed = time.monotonic(), job((disk or folder) / "harmed")
        for number, kind in enumerate(faults, 1):
            least = max(alone.parts * number // (len(faults) + 1), harmed.parts + 1)
            if not harmed.reaches(least):
                break
            harmed.harm(kind, (disk or folder) / "filler")
        harmed.whole()
        seconds["disturbed"] = time.monotonic() - began
        identical = contents(alone.output) == contents(harmed.output)
        rejected = list(answers_of(harmed.output / "_rejected"))
        ids = Counter(row["id"] for row in (*answers_of(harmed.output), *rejected))
        parts = alone.parts
    missing = len({f"{number:06}" for number in range(options.kill_rows)} - ids.keys())
    doubled = sum(count > 1 for count in ids.values())
    show_table(
        f"kills: {options.kill_rows:,} rows, {parts} parts",
        ["fault", "at part", "seen", "another part after s", "evidence"],
        [
            [h.kind, str(h.parts), str(h.shown), f"{h.recovery_seconds:.1f}", h.evidence[:70]]
            for h in harmed.hits
        ],
    )
    shown = sum(hit.shown for hit in harmed.hits)
    same = "equal byte for byte" if identical else "DIFFERENT"
    print(
        f"kills: outputs {same}; {missing} ids missing, {doubled} doubled; {len(rejected)} rows "
        "rejected"
    )
    figures = [
        Figure("faults that happened", shown, "", len(options.faults)),
        Figure("ids missing or doubled", missing + doubled, "", 0, False),
        *(Figure(f"kills: {name} job", took, "s") for name, took in seconds.items()),
    ]
    found = {
        "rows": options.kill_rows,
        "model": "tiny" if options.tiny else TASK,
        "parts": parts,
        "identical": identical,
        "missing": missing,
        "doubled": doubled,
        "rejected": len(rejected),
        "starts": harmed.starts,
        "unplanned_ends": harmed.statuses,
        "seconds": seconds,
        "faults": [asdict(hit) for hit in harmed.hits],
        "left_out": sorted({*options.faults} - {*faults}),
    }
    sound = identical and not missing and not doubled and shown == len(faults) == len(harmed.hits)
    return figures, {**found, "sound": sound}


@contextmanager
def small_disk(folder: Path, size_mb: int) -> Iterator[Path | None]:
    """Mount a disk of this size in memory for the block; None if this user may not."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        to_stderr("  no disk can be mounted, so that none is filled")
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def contents(output: Path) -> dict[str, bytes]:
    """The files of an output by their names, without those of the job's state."""
    from tasc_jobs.batch.parts import MANIFEST

    files = (file for file in output.rglob("*") if file.is_file())
    return {
        str(file.relative_to(output)): file.read_bytes()
        for file in files
        if file.name not in (MANIFEST, ".lock")
    }


# An object store


def s3(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    with folder_of("s3") as folder, ExitStack() as stack:
        from benchmarks.batch.runs import prepare
        from killable import RedisServer
        from object_store import FAULTS as KINDS
        from object_store import Endpoint, Faults, FaultyProxy, ObjectStore, credentials
        from tasc_jobs.batch.inputs import Source
        from tasc_jobs.batch.parts import MANIFEST, Plan, generate_parts
        from tasc_jobs.batch.places import Place
        from tasc_jobs.errors import JobError
        from tasc_jobs.ray_local import local_ray
        from tasc_runtime.engine_settings import EngineSettings
        from tasc_runtime.errors import FileError

        os.environ.update(credentials())
        server = RedisServer(folder / "redis")
        stack.callback(server.kill)
        stack.enter_context(local_ray())
        work = prepare(server.url, folder, options.s3_rows, tiny=options.tiny)
        engine = EngineSettings(max_model_len=256, cost_aware=not options.tiny)

        def url(endpoint: Endpoint, key: str) -> str:
            return str(endpoint.url("bucket", key))

        def job(source: str, output: str) -> tuple[float, list[str]]:
            """Run a job until it succeeds; returns its seconds, and the errors of failed runs."""
            began, failed = time.monotonic(), list[str]()
            while True:
                try:
                    plan = Plan.of(Source.of(source), output, options.part_bytes // 4)
                    report = generate_parts(server.url, TASK, plan, engine=engine)
                except (JobError, FileError) as error:
                    to_stderr(f"  the job ended: {error}")
                    if len(failed) == MOST_STARTS:
                        raise
                    failed.append(str(error))
                else:
                    assert report.rows == options.s3_rows
                    return time.monotonic() - began, failed

        to_stderr("  on a disk ...")
        on_disk, _ = job(str(work.source), f"{folder / 'right'}/")
        right = contents(folder / "right")
        store = stack.enter_context(ObjectStore())
        store.make("bucket")
        there = Place.of(url(store.endpoint, "in"))
        there.write("in.jsonl", work.source.read_bytes())
        faults = Faults(error=0.1, slow_down=0.1, delay=0.1, cut_request=0.08, cut_response=0.08)
        proxy = stack.enter_context(FaultyProxy(store.endpoint.port, faults, options.seed))
        to_stderr("  in an object store with faults ...")
        in_store, failed = job(url(proxy.endpoint, "in"), url(proxy.endpoint, "out"))
        did = {name: proxy.did[name] for name in ("passed", *KINDS)}
        place = Place.of(url(store.endpoint, "out"))
        found = {name: place.read(name) for name in place.names() if name != MANIFEST}
        unfinished = store.unfinished("bucket")
    identical = found == right
    show_table("s3: requests", ["fault", "requests"], [[n, str(c)] for n, c in did.items()])
    print(f"s3: outputs {'equal byte for byte' if identical else 'DIFFERENT'}")
    shown = [name for name in KINDS if did[name]]
    figures = [
        Figure("s3: kinds of faults that happened", len(shown), "", len(KINDS)),
        Figure("s3: faults", sum(did[name] for name in KINDS), "requests"),
        Figure("s3: job on a disk", on_disk, "s"),
        Figure("s3: job in a store with faults", in_store, "s"),
    ]
    record = {
        "rows": options.s3_rows,
        "model": "tiny" if options.tiny else TASK,
        "parts": len(right),
        "identical": identical,
        "requests": did,
        "failed_runs": failed,
        "unfinished_uploads": unfinished,
        "seconds": {"disk": on_disk, "store": in_store},
    }
    return figures, {**record, "sound": identical and len(shown) == len(KINDS)}


if __name__ == "__main__":
    sys.exit(main())
