"""The main job on the shipped data, end to end: corpus, statistics, index, service, answers.

Everything is real: a Redis server, Ray Data jobs, a Ray Serve application and a trained model.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tasc_jobs.demo import measure
from tasc_jobs.demo.measure import DemoFigures, latency_ms, tokens_per_second
from tasc_jobs.demo.tasks import TASKS, data_file, demo_record, read_split
from tasc_jobs.evaluate.quality import IntentQuality, intent_quality
from tasc_jobs.index.build import NOTES, STAGES, build_and_publish
from tasc_jobs.index.ingest import ingest
from tasc_jobs.ray_local import local_ray
from tasc_jobs.serve import run_service, say_of_task
from tasc_jobs.statistics.task_statistics import STAGES as STATISTICS_STAGES
from tasc_jobs.statistics.task_statistics import CorpusStatistics, corpus_statistics
from tasc_runtime.engine_settings import DraftOverrides, EngineSettings
from tasc_runtime.llm import LLM
from tasc_runtime.progress import Progress, Stages, note
from tasc_serve import app
from tasc_serve.http import ray_proxy
from tasc_serve.settings import HttpSettings, ServedTask, ServeSettings
from tasc_store import TaskStore, connect

_BAR_CELLS = 30
TASK = "massive_en"
EXAMPLE = "wake me up at nine am on friday"
ROWS = 256
ENGINE = EngineSettings(rows=8, max_model_len=512, torch_threads=1, device="cpu")
# The same rows are asked several times: answers of before must not be drafted from.
FORGETFUL = DraftOverrides(recent_tokens=0)


def show_statistics(console: Console, task: str, found: CorpusStatistics) -> None:
    """How variable the task is (Tsur et al. 2026, arXiv 2602.24174, Table 1)."""
    table = Table(title=f"{task}: statistics of the training corpus", title_justify="left")
    for heading in ("", "rows", "words", "bigram entropy, bits", "bigrams for 80 %"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, side in (("inputs", found.input), ("outputs", found.output)):
        table.add_row(
            name,
            f"{side.rows:,}",
            f"{side.words.count:,}",
            f"{side.words.ngrams.shannon_bits:.2f}",
            f"{side.words.ngrams.ngrams_for_80_percent:,}",
        )
    console.print(table)


def summary(measured: DemoFigures, identical: int, quality: IntentQuality) -> dict[str, Any]:
    """The demo's last line."""
    sides = {
        "plain": measured.http[False],
        "drafted": measured.http[True],
        "engine_plain": measured.engine[False],
        "engine_drafted": measured.engine[True],
    }
    return {
        "rows": len(measured.http[True][0].texts),
        "identical": identical,
        "block_efficiency": round(measured.counters.block_efficiency, 3),
        "acceptance_by_position": [round(a, 3) for a in measured.counters.acceptance_by_position],
        "tokens_per_second": {k: round(tokens_per_second(v), 1) for k, v in sides.items()},
        "latency_ms": {k: latency_ms(v) for k, v in sides.items()},
        "quality": {k: round(v, 4) for k, v in asdict(quality).items()},
    }


def show_summary(console: Console, found: dict[str, Any]) -> None:
    speeds = found["tokens_per_second"]
    table = Table(title="plain against drafted", title_justify="left")
    for heading in ("", "tokens/s", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(heading, justify="right" if heading else "left")
    for side, label in (
        ("plain", "HTTP, plain"),
        ("drafted", "HTTP, drafted"),
        ("engine_plain", "engine alone, plain"),
        ("engine_drafted", "engine alone, drafted"),
    ):
        times = found["latency_ms"][side].values()
        table.add_row(label, f"{speeds[side]:,.0f}", *(f"{t:.1f}" for t in times))
    console.print(table)
    _show_acceptance(console, found["acceptance_by_position"])
    console.print(
        f"speed-up            engine {speeds['engine_drafted'] / speeds['engine_plain']:.2f} x, "
        f"HTTP {speeds['drafted'] / speeds['plain']:.2f} x"
    )
    console.print(f"block efficiency    {found['block_efficiency']:.2f} tokens per row and forward")
    quality = ", ".join(f"{k.replace('_', ' ')} {v:.1%}" for k, v in found["quality"].items())
    console.print(f"quality             {quality}")
    console.print(f"identical: {found['identical']}/{found['rows']}")


def _show_acceptance(console: Console, rates: list[float]) -> None:
    console.print("acceptance by draft position")
    for position, rate in enumerate(rates):
        bar = "█" * round(rate * _BAR_CELLS)
        console.print(f"  {position:>2}  {bar:<{_BAR_CELLS}}  {rate:6.1%}", highlight=False)


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
        show_statistics(console, task, found)
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
    served = settings([TASK], port=0, draft=FORGETFUL)
    with local_ray(environment=partial(ray_proxy.environment, served.http)):
        prepare(url, [TASK], console)
        note(f"starting the service, {ray_proxy.in_words(served.http)} ...")
        try:
            base = app.start(served, url, on_note=partial(say_of_task, note))
            found = _measure(url, base)
        finally:
            with suppress(Exception):  # what brought us here is the error to show
                app.stop()
    show_summary(console, found)
    console.file.flush()
    print(json.dumps(found))


def serve_demo(url: str, port: int, wait: Callable[[], None]) -> None:
    """Keep the service running with both shipped tasks until ``wait`` returns."""
    served = settings(TASKS, port)
    with local_ray(environment=partial(ray_proxy.environment, served.http)):
        note(ray_proxy.in_words(served.http))
        prepare(url, TASKS, Console(file=sys.stdout))
        run_service(served, url, wait, EXAMPLE)


def _measure(url: str, base: str) -> dict[str, Any]:
    rows = read_split(TASK, "test")[:ROWS]
    inputs, truth = [r["input"] for r in rows], [r["output"] for r in rows]
    with Progress("answers over HTTP", len(measure.ORDER) * len(rows)) as bar:
        http, counters = measure.over_http(base, TASK, inputs, bar.advance)
    llm = LLM.from_task(TASK, url, draft=FORGETFUL, **ENGINE.model_dump())
    with Progress("answers by the engine alone", len(measure.ORDER) * len(rows)) as bar:
        engine = measure.engine_alone(llm, inputs, bar.advance)
    plain = http[False][0].texts
    others = [r.texts for runs in (http, engine) for side in runs.values() for r in side]
    identical = sum(len({p, *rest}) == 1 for p, *rest in zip(plain, *others, strict=True))
    found = measure.DemoFigures(http, engine, counters)
    return summary(found, identical, intent_quality(plain, truth))
