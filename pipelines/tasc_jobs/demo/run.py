"""The whole workflow on the shipped data: corpus, statistics, index, service, answers.

It uses a Redis server, Ray Data jobs, a Ray Serve application and a trained model.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Any

import ray

from tasc_jobs.demo import measure
from tasc_jobs.demo.measure import DemoFigures, HttpRun, latency_ms, tokens_per_second
from tasc_jobs.demo.tasks import TASK, TASKS, read_split
from tasc_jobs.report.document import Bars, Curve, Lines, ReportDocument, Table, show
from tasc_jobs.report.web_page import write_html
from tasc_jobs.serve import run_service, say_of_task
from tasc_jobs.statistics.quality import IntentQuality, intent_quality
from tasc_runtime.engine_settings import DraftOverrides, EngineSettings
from tasc_runtime.progress import note, show_progress
from tasc_serve import app
from tasc_serve.http import ray_proxy
from tasc_serve.settings import HttpSettings, ServedTask, ServeSettings
from tasc_store import TaskRecord, TaskStore, connect

_SIDES = {
    "plain": "HTTP, plain",
    "drafted": "HTTP, drafted",
    "engine_plain": "engine alone, plain",
    "engine_drafted": "engine alone, drafted",
}
EXAMPLE = "wake me up at nine am on friday"
ROWS = 256
ENGINE = EngineSettings(rows=8, max_model_len=512, torch_threads=1, device="cpu")
# The same rows are sent several times, so drafts must not come from earlier answers.
FORGETFUL = DraftOverrides(recent_tokens=0)
_NEXT = """next: `{tasc} demo --serve` keeps a service on port 8000, and `{tasc} task create --help`
shows how to make a task of your own"""


def summary(
    measured: DemoFigures, identical: int, quality: IntentQuality, record: TaskRecord
) -> dict[str, Any]:
    """Returns the JSON object that is the demo's last line."""
    sides = {
        "plain": measured.http[False],
        "drafted": measured.http[True],
        "engine_plain": measured.engine[False],
        "engine_drafted": measured.engine[True],
    }
    return {
        "rows": len(measure.answers_of(measured.http[True])),
        "identical": identical,
        "dtype": record.quantization or record.dtype,
        "block_efficiency": round(measured.counters.block_efficiency, 3),
        "accepted_by_source": {k: round(v) for k, v in measured.counters.by_source.items() if v},
        "acceptance_by_position": [round(a, 3) for a in measured.counters.acceptance_by_position],
        "tokens_per_second": {k: round(tokens_per_second(v), 1) for k, v in sides.items()},
        "latency_ms": {k: latency_ms(v) for k, v in sides.items()},
        "quality": {k: round(v, 4) for k, v in asdict(quality).items()},
    }


def demo_page(measured: DemoFigures, found: dict[str, Any]) -> ReportDocument:
    """Returns the report of a run: speed, latency, and acceptance by position and by source.

    Args:
        found: The `summary` of the run.
    """
    speeds, quality = found["tokens_per_second"], found["quality"]
    sides = {side: _SIDES[side] for side in speeds}
    of_source = sorted(measured.counters.by_source.items(), key=lambda each: -each[1])
    emitted = measured.counters.generation_tokens
    by_model = emitted - sum(n for _, n in of_source)
    rates = found["acceptance_by_position"]
    return ReportDocument(
        f"tasc demo: {found['rows']} test rows of {TASK}, {found['dtype']}",
        (
            f"drafting makes the engine {speeds['engine_drafted'] / speeds['engine_plain']:.2f} x "
            f"as fast, and the service {speeds['drafted'] / speeds['plain']:.2f} x",
            f"{measured.counters.steps / found['rows']:.2f} forward passes an answer; without "
            f"drafts {emitted / found['rows']:.2f}",
            "quality: " + ", ".join(f"{k.replace('_', ' ')} {v:.1%}" for k, v in quality.items()),
            f"identical: {found['identical']}/{found['rows']} answers, drafted and plain",
        ),
        (
            Table.of(
                "Plain against drafted",
                (
                    {"": label, "tokens/s": f"{speeds[side]:,.0f}"}
                    | {f"{p} ms": f"{ms:.1f}" for p, ms in found["latency_ms"][side].items()}
                    for side, label in sides.items()
                ),
            ),
            Table.of(
                "Tokens of the answers by source",
                (
                    {"source": name, "tokens": f"{n:,.0f}", "of all answers": f"{n / emitted:.1%}"}
                    for name, n in (*of_source, ("the model itself", by_model))
                    if n
                ),
            ),
            Table.of(
                "Acceptance by position in the draft",
                ({"position": str(i), "accepted": f"{r:.1%}"} for i, r in enumerate(rates)),
            ),
        ),
        (
            Bars("Speed", "tokens/s", tuple((sides[s], speeds[s]) for s in sides), "{:,.0f}"),
            Lines(
                "Requests answered within a time, over HTTP",
                "milliseconds",
                "% of requests",
                (
                    _latencies("plain", measured.http[False]),
                    _latencies("drafted", measured.http[True]),
                ),
            ),
            Lines(
                "Acceptance by position in the draft",
                "position",
                "accepted / reached",
                (Curve("drafted", range(len(rates)), rates),),
            ),
            Bars(
                "Accepted tokens by source",
                "tokens",
                tuple(e for e in of_source if e[1]),
                "{:,.0f}",
            ),
        ),
        "First the service and then the engine alone answered one half of the rows plain and then "
        "drafted, and the other half drafted and then plain. "
        "Drafting adapts to answers: the second half begins with weights learnt on the first half. "
        f"Over HTTP, {measure.CONCURRENCY} requests at a time share the {ENGINE.rows} rows of the "
        "engine, so latencies include waiting for a row. Latencies of the engine alone do not. "
        "Acceptance at a position: drafts accepted there over drafts that reach it.",
    )


def _latencies(name: str, runs: Sequence[HttpRun]) -> Curve:
    ms = sorted(1000 * s for run in runs for s in run.latencies)
    return Curve(name, ms, [100 * (i + 1) / len(ms) for i in range(len(ms))])


def settings(
    tasks: Sequence[str],
    http: HttpSettings,
    draft: DraftOverrides | None = None,
    files: str | None = None,
) -> ServeSettings:
    draft = draft or DraftOverrides()
    served = tuple(ServedTask(name=task, draft=draft) for task in tasks)
    return ServeSettings(tasks=served, http=http, engine=ENGINE, files_url=files)


def listen(http: HttpSettings) -> str:
    """Start Ray Serve; returns the base URL at which `run_demo` will have its service."""
    return app.listen(settings([TASK], http))


def run_demo(
    url: str, http: HttpSettings, files: str, report: Path, base: str | None = None
) -> None:
    """Run the demo on a running Ray and write its page; the last line on stdout is a JSON object.

    Before the engine is measured, this process leaves Ray and ends a local Ray.

    Args:
        url: Address of the store, which has the task and its index.
        files: Folder for uploaded files.
        base: The return value of `listen`, if it was called before.

    Raises:
        FileError: The page cannot be written.
    """
    rows = read_split(TASK, "test")[:ROWS]
    inputs, truth = [r["input"] for r in rows], [r["output"] for r in rows]
    served, on_note = settings([TASK], http, FORGETFUL, files), partial(say_of_task, note)
    note(f"starting the service, {ray_proxy.in_words(http)} ...")
    try:
        base = app.start(served, url, on_running=_came_up, on_note=on_note, base=base)
        with show_progress("answers over HTTP", 2 * len(rows)) as bar:
            served_runs, counters = measure.over_http(base, TASK, inputs, bar.advance)
        note("ending the service, and building an engine in this process ...")
    finally:
        if os.environ.get("RAY_ADDRESS"):  # a local Ray stops the service when it ends
            with suppress(Exception):
                app.stop()
    gc.collect()  # frees Ray's objects before Ray ends
    with ThreadPoolExecutor(1) as aside:
        ending = aside.submit(ray.shutdown, wait_for_processes=True)
        # Imported here because it loads torch, which `tasc demo --serve` does not need.
        from tasc_runtime.llm import LLM

        # The engine is built on this thread because torch's number of threads is set per thread.
        llm = LLM.from_task(TASK, url, draft=FORGETFUL, **ENGINE.model_dump())
        ending.result()
    with show_progress("answers by the engine alone", 2 * len(rows)) as bar:
        engine_runs = measure.engine_alone(llm, inputs, bar.advance)
    sides = [
        measure.answers_of(runs) for side in (served_runs, engine_runs) for runs in side.values()
    ]
    identical = sum(len({*answers}) == 1 for answers in zip(*sides, strict=True))
    measured = DemoFigures(served_runs, engine_runs, counters)
    record = TaskStore(connect(url)).get(TASK)
    found = summary(measured, identical, intent_quality(sides[0], truth), record)
    page = demo_page(measured, found)
    write_html(page, report)
    show(page)
    print(f"\nplots: {report}\n{_NEXT.format(tasc=_command())}")
    print(json.dumps(found), flush=True)


def _command() -> str:
    """Returns a command with which a user can start `tasc`, even if it is not on PATH."""
    own, found = Path(sys.argv[0]), which("tasc")
    if not own.is_file() or (found and own.samefile(found)):
        return "tasc"
    return quote(os.path.relpath(own))


def _came_up(deployment: str, running: int) -> None:
    note("the HTTP gateway is up" if deployment == "gateway" else f"task {deployment} is up")


def serve_demo(url: str, http: HttpSettings, files: str, wait: Callable[[], None]) -> None:
    """Run a service of both shipped tasks on a running Ray until ``wait`` returns."""
    note(ray_proxy.in_words(http))
    run_service(settings(TASKS, http, files=files), url, wait, EXAMPLE)
