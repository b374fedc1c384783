"""The command `tasc stats`: how variable the texts of a task are."""

from pathlib import Path
from typing import Annotated

import typer

from tasc_jobs.cli.options import (
    AsJson,
    Report,
    StoreOptions,
    TrainOptions,
    check_report,
    grouped,
    show,
)

Task = Annotated[
    str | None, typer.Argument(help="Name of the task.", show_default="none, with --train")
]
Words = Annotated[int, typer.Option("--n", min=1, max=16, help="Number of words in an n-gram.")]
AcrossRows = Annotated[
    bool,
    typer.Option(
        "--across-rows",
        help="Count all rows as one running text, whose n-grams may span rows, as in the paper's "
        "Table 1.",
        show_default="off",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        help="Also count tokens, with this tokenizer.json or folder with one; on a cluster it "
        "must be on every machine.",
        show_default="words only",
    ),
]


@grouped()
def stats(
    *,
    task: Task = None,
    data: TrainOptions,
    n: Words = 2,
    across_rows: AcrossRows = False,
    tokenizer: Tokenizer = None,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Show how repetitive a task is: entropies, coverage and lengths of its inputs and outputs."""
    from tasc_jobs.statistics.ngrams import Units
    from tasc_jobs.statistics.task_statistics import (
        STAGES,
        corpus_statistics,
        file_statistics,
        stats_page,
    )
    from tasc_runtime.progress import Stages, note

    data.require_either(task)
    check_report(report)
    units = Units.of(n, tokenizer, across_rows=across_rows)
    if data.train:
        name = ", ".join(path.name for path in data.train)
        with Stages("statistics", STAGES) as stages:
            found = file_statistics(data.train, units, data.fields, progress=stages)
    else:
        assert task is not None
        name = task
        with store.open(task) as url:
            note("starting Ray ...")
            from tasc_jobs.ray_local import local_ray

            with local_ray(), Stages(f"statistics {task}", STAGES) as stages:
                found = corpus_statistics(url, task, units, progress=stages)
    show(stats_page(name, found), found.as_json, report, as_json)
