"""The main job on the shipped data, end to end: corpus, statistics, index, service, answers.

Everything is real: a Redis server, Ray Data jobs, a Ray Serve application and a trained model.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tasc_jobs.demo import measure, report
from tasc_jobs.demo.tasks import TASKS, data_file, demo_record, read_split
from tasc_jobs.evaluate.quality import intent_quality
from tasc_jobs.index.build import NOTES, STAGES, build_and_publish
from tasc_jobs.index.ingest import ingest
from tasc_jobs.runtime.progress import Progress, note
from tasc_jobs.runtime.ray_local import local_ray
from tasc_jobs.runtime.stages import Stages
from tasc_jobs.serve import run_service, say_of_task
from tasc_jobs.statistics.task_statistics import STAGES as STATISTICS_STAGES
from tasc_jobs.statistics.task_statistics import corpus_statistics
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import DraftOverrides, EngineSettings
from tasc_serve import app
from tasc_serve.settings import HttpSettings, ServedTask, ServeSettings
from tasc_store import TaskStore, connect

TASK = "massive_en"
EXAMPLE = "wake me up at nine am on friday"
ROWS = 256
ENGINE = EngineSettings(rows=8, max_model_len=512, torch_threads=1)
# The same rows are asked several times: answers of before must not be drafted from.
FORGETFUL = DraftOverrides(recent_tokens=0)


def prepare(url: str, tasks: Sequence[str], console: Console) -> None:
    """Register the tasks, ingest their training rows, print statistics, build their indexes."""
    client = connect(url)
    for task in tasks:
        TaskStore(client).put(demo_record(task))
        rows = len(read_split(task, "train"))
        with Progress(f"ingest {task}", rows) as bar:
            rejects = Path(f"{task}.rejected.jsonl")
            ingest(client, task, [data_file(task, "train")], reject=rejects, progress=bar.advance)
        with Stages(f"statistics {task}", STATISTICS_STAGES) as stages:
            found = corpus_statistics(url, task, progress=stages)
        report.show_statistics(console, task, found)
        with Stages(f"index {task}", STAGES, notes=NOTES) as stages:
            artifact, index = build_and_publish(url, demo_record(task), progress=stages)
        console.print(
            f"{task}: draft index version {artifact.version}, {index.corpus.documents:,} outputs, "
            f"{index.corpus.tokens:,} tokens, {artifact.size_bytes / 1e6:.1f} MB\n"
        )


def settings(tasks: Sequence[str], port: int, draft: DraftOverrides | None = None) -> ServeSettings:
    draft = draft or DraftOverrides()
    return ServeSettings(
        tasks=tuple(ServedTask(name=task, draft=draft) for task in tasks),
        http=HttpSettings(port=port),
        engine=ENGINE,
    )


def run_demo(url: str) -> None:
    """Run the demo; the last line on stdout is a JSON object."""
    console = Console(file=sys.stdout)
    with local_ray():
        prepare(url, [TASK], console)
        note("starting the service ...")
        try:
            served = settings([TASK], port=0, draft=FORGETFUL)
            base = app.start(served, url, told=partial(say_of_task, note))
            found = _measure(url, base)
        finally:
            with suppress(Exception):  # what brought us here is the error to show
                app.stop()
    report.show_summary(console, found)
    console.file.flush()
    print(json.dumps(found))


def serve_demo(url: str, port: int, wait: Callable[[], None]) -> None:
    """Keep the service running with both shipped tasks until ``wait`` returns."""
    with local_ray():
        prepare(url, TASKS, Console(file=sys.stdout))
        run_service(settings(TASKS, port), url, wait, EXAMPLE)


def _measure(url: str, base: str) -> dict[str, Any]:
    rows = read_split(TASK, "test")[:ROWS]
    inputs, truth = [r["input"] for r in rows], [r["output"] for r in rows]
    with Progress("answers over HTTP", len(measure.ORDER) * len(rows)) as bar:
        http, counters = measure.over_http(base, TASK, inputs, bar.advance)
    worker = EngineBuilder(connect(url), TASK, ENGINE, draft=FORGETFUL)
    with Progress("answers by the engine alone", len(measure.ORDER) * len(rows)) as bar:
        engine = measure.engine_alone(worker, inputs, bar.advance)
    plain = http[False][0].texts
    others = [r.texts for runs in (http, engine) for side in runs.values() for r in side]
    identical = sum(len({p, *rest}) == 1 for p, *rest in zip(plain, *others, strict=True))
    found = measure.DemoFigures(http, engine, counters)
    return report.summary(found, identical, intent_quality(plain, truth))
