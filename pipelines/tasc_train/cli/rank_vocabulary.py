"""The command `tasc rank-vocabulary`, which ranks the tokens that a task needs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tasc_jobs.cli.options import (
    AsJson,
    StoreOptions,
    Task,
    grouped,
    print_result,
    require_files,
)
from tasc_jobs.errors import require_writable
from tasc_runtime.errors import FileError

if TYPE_CHECKING:
    from tasc_engine.drafting.neural.ranking import Ranking
    from tasc_store import Artifact

From = Annotated[
    Literal["raw", "target", "draft"],
    typer.Option(
        "--from",
        help="raw: all outputs of the corpus; target: answers that services collected; draft: "
        "answers of a draft model in a file. With --answers, the file is counted, and --from only "
        "labels the ranking.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        "--model",
        help="Count tokens of this model folder or tokenizer.json.",
        show_default="that of the task's model",
    ),
]
Answers = Annotated[
    Path | None,
    typer.Option(
        help="Count answers of this file (.jsonl, .jsonl.gz, .parquet), as `tasc generate` writes.",
        show_default="the corpus of TASK",
    ),
]
AnswerField = Annotated[str, typer.Option(help="Field of --answers with the answer.")]
TopK = Annotated[
    int | None,
    typer.Option(
        min=1, help="Keep this many of the most frequent tokens.", show_default="all that were seen"
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Keep the fewest tokens that make up this share, for example 0.99.",
        show_default="all that were seen",
    ),
]
MinFrequency = Annotated[
    int | None,
    typer.Option(
        min=1, help="Keep tokens that occur at least this often.", show_default="all that were seen"
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Also write the ranking to this .npz file.", show_default="the store only"),
]
EXAMPLES = """\
A neural draft model that chooses among fewer tokens is faster (FR-Spec, VocabTrim). Answers do not
change, because the model verifies drafts with all tokens. Rankings of the model's own answers work
best.

Collected answers: tasc rank-vocabulary tickets --from target --top-k 4000

A file: tasc rank-vocabulary tickets --from draft --answers drafted.jsonl --top-p 0.999"""


@grouped()
def rank_vocabulary(
    *,
    task: Task,
    origin: From,
    tokenizer: Tokenizer = None,
    answers: Answers = None,
    answer_field: AnswerField = "text",
    top_k: TopK = None,
    top_p: TopP = None,
    min_frequency: MinFrequency = None,
    output: Output = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Rank the tokens of TASK's answers by frequency, and make the ranking current."""
    if output:
        require_writable("--output", output)
    require_files(tokenizer, answers)
    with store.open(None if tokenizer and answers else task) as url:
        from tasc_runtime.progress import Stages
        from tasc_train.drafter.rank_vocabulary import STAGES, Choice, RankJob, rank_and_publish

        choice = Choice(top_k, top_p, min_frequency)
        job = RankJob(task, origin, tokenizer, answers, answer_field, choice)
        with Stages(f"vocabulary {task}", STAGES) as stages:
            artifact, ranking = rank_and_publish(url, job, stages)
    if output:
        try:
            ranking.save(output)
        except OSError as error:
            raise FileError(
                f"version {artifact.version} is current, but --output {output} was not written "
                f"({error}); free disk space or choose another file, and run the command again"
            ) from error
    figures: dict[str, Any] = {
        **asdict(artifact),
        "origin": origin,
        "rows": ranking.rows,
        "counted": ranking.total,
        "kept": len(ranking.ids),
        "vocab_size": ranking.vocab_size,
        "coverage": ranking.coverage,
        "output": str(output) if output else None,
    }
    text = in_words(artifact, ranking, top_k)
    print_result(figures, text + (f"; also in {output}" if output else ""), as_json)


def in_words(artifact: "Artifact", ranking: "Ranking", top_k: int | None) -> str:
    """Returns one line on the new ranking, with a note if fewer than ``top_k`` tokens occurred."""
    kept = len(ranking.ids)
    fewer = f"; fewer than --top-k {top_k:,} were seen" if kept < (top_k or 0) else ""
    return (
        f"version {artifact.version} of the vocabulary of {artifact.task} is current: it keeps "
        f"{kept:,} of {ranking.vocab_size:,} tokens, which cover {ranking.coverage:.2%} of the "
        f"{ranking.total:,} tokens in {ranking.rows:,} answers ({ranking.origin}){fewer}"
    )
