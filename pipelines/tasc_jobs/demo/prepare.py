"""Prepares the demo's tasks, corpora and draft indexes in the store. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from tasc_jobs.demo.tasks import data_file, demo_record, read_split
from tasc_jobs.index.build import NOTES, STAGES, build_and_publish
from tasc_jobs.index.ingest import ingest
from tasc_jobs.report.document import show
from tasc_jobs.statistics.task_statistics import STAGES as STATISTICS_STAGES
from tasc_jobs.statistics.task_statistics import corpus_statistics, stats_page
from tasc_runtime.models import fastest_on_cpu
from tasc_runtime.progress import Stages, note, show_progress
from tasc_store import TaskStore, connect


def prepare(url: str, tasks: Sequence[str]) -> None:
    """Register the tasks, ingest their training rows, print statistics, build their indexes."""
    client, precision = connect(url), fastest_on_cpu()
    kind = precision.get("quantization", precision["dtype"])
    note(f"the model runs in {kind}, which is fastest on this processor")
    for task in tasks:
        record = demo_record(task, **precision)
        TaskStore(client).put(record)
        rows = len(read_split(task, "train"))
        with show_progress(f"ingest {task}", rows) as bar:
            rejects = Path(f"{task}.rejected.jsonl")
            ingest(client, task, [data_file(task, "train")], reject=rejects, progress=bar.advance)
        with Stages(f"statistics {task}", STATISTICS_STAGES) as stages:
            found = corpus_statistics(url, task, progress=stages)
        show(stats_page(task, found))
        with Stages(f"index {task}", STAGES, notes=NOTES) as stages:
            artifact, index = build_and_publish(url, record, progress=stages)
        print(
            f"{task}: draft index version {artifact.version}, {index.corpus.documents:,} outputs, "
            f"{index.corpus.tokens:,} tokens, {artifact.size_bytes / 1e6:.1f} MB\n"
        )
