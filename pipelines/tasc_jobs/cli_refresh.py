"""The command `tasc refresh`: a better index of what a service answered. It computes nothing."""

import time
from typing import Annotated

import typer

from tasc_jobs.cli_options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    RedisUrl,
    Task,
    open_store,
    print_result,
)
from tasc_jobs.outcomes import in_short, known_errors
from tasc_jobs.progress import note


def refresh(
    task: Task,
    every: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Do it again and again, so many seconds apart, also where it fails.",
            show_default="once",
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(min=0, max=10, help="Share by which tokens per step must rise."),
    ] = 0.01,
    min_rows: Annotated[
        int, typer.Option(min=100, help="New rows of the corpus to wait for.")
    ] = 200,
    keep: Annotated[
        int, typer.Option(min=2, help="Versions kept in the store, the current one besides.")
    ] = 5,
    parallelism: Annotated[
        int | None,
        typer.Option(min=1, help="See `tasc build-index`.", show_default="by rows and cores"),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="See `tasc build-index`.", show_default="no cap"),
    ] = None,
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Move answers that services collected for TASK into its corpus, and renew its index.

    The new index becomes current only if it drafts better for rows that neither index has seen.
    Services collect answers of tasks whose settings say `collect: {share: 0.1}`, or another share.
    """
    from tasc_jobs.refresh import STAGES, RefreshOptions
    from tasc_jobs.refresh import refresh as run
    from tasc_jobs.stages import Stages

    options = RefreshOptions(margin, min_rows, keep, parallelism, max_bytes)
    judged = 0
    with open_store(redis_url, data_dir) as url:
        while True:
            try:
                with Stages(f"refresh {task}", STAGES) as stages:
                    done = run(url, task, options, stages, judged=judged)
                if done.judged_rows:
                    judged = done.corpus_rows
                print_result(done.as_json, done.in_words, as_json)
            except known_errors() as error:
                if every is None:
                    raise
                note(f"refresh {task} failed, next try in {every:g} s: {in_short(error)}")
            if every is None:
                return
            time.sleep(every)
