"""The command `tasc rank-vocabulary`: rank the tokens that a task needs."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tasc_jobs.cli.options import AsJson, StoreOptions, Task, grouped, print_result

if TYPE_CHECKING:
    from tasc_engine.drafting.neural.ranking import Ranking
    from tasc_store import Artifact

RANKINGS = """Vocabularies for neural drafts (FR-Spec, VocabTrim): a head of the tokens kept drafts
faster; answers do not change, since they are verified with all tokens. The target's own answers
rank best; those of a corpus as well, where the target says what the corpus does; a draft model's
lack what it cannot say.

tasc rank-vocabulary tickets --from target --top-k 4000

tasc rank-vocabulary tickets --from draft --answers drafted.jsonl --top-p 0.999"""

From = Annotated[
    Literal["raw", "target", "draft"],
    typer.Option(
        "--from",
        help="raw: all outputs of the corpus; target: those that services gave and collected; "
        "draft: a draft model's, in a file. With --answers only a name for what is in the file.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        "--model",
        help="Count tokens of this model folder or tokenizer.json; on a cluster it must be on "
        "every machine.",
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
AnswerField = Annotated[str, typer.Option(help="Field of that file with the answer.")]
TopK = Annotated[
    int | None,
    typer.Option(
        min=1, help="Keep so many tokens, the most frequent.", show_default="all that were seen"
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Keep the fewest that are this share of all counted, as 0.99.",
        show_default="all that were seen",
    ),
]
MinFrequency = Annotated[
    int | None,
    typer.Option(min=1, help="Keep those seen so often.", show_default="all that were seen"),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Write the ranking to this file too, .npz.", show_default="the store only"),
]


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
    """Rank the tokens of TASK's answers by how often they come; the ranking becomes current."""
    from tasc_jobs.drafter.rank_vocabulary import STAGES, Choice, RankJob, rank_and_publish
    from tasc_jobs.ray_local import local_ray
    from tasc_runtime.progress import Stages

    choice = Choice(top_k, top_p, min_frequency)
    job = RankJob(task, origin, tokenizer, answers, answer_field, choice)
    _check_output(output)
    with (
        store.open() as url,
        nullcontext() if answers else local_ray(),
        Stages(f"vocabulary {task}", STAGES) as stages,
    ):
        artifact, ranking = rank_and_publish(url, job, stages)
    _save(ranking, output)
    told: dict[str, Any] = {
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
    print_result(told, text + (f"; also in {output}" if output else ""), as_json)


def in_words(artifact: "Artifact", ranking: "Ranking", top_k: int | None) -> str:
    """The ranking that became current; it says so where fewer tokens were seen than asked for."""
    kept = len(ranking.ids)
    fewer = f", and fewer than the {top_k:,} asked for were seen" if kept < (top_k or 0) else ""
    return (
        f"version {artifact.version} of the vocabulary of {artifact.task} is current: {kept:,} of "
        f"{ranking.vocab_size:,} tokens are {ranking.coverage:.2%} of {ranking.total:,} in "
        f"{ranking.rows:,} answers ({ranking.origin}){fewer}"
    )


def _save(ranking: "Ranking", output: Path | None) -> None:
    from tasc_jobs.errors import UsageError

    try:
        if output:
            ranking.save(output)
    except OSError as error:
        raise UsageError(
            f"--output: {output} cannot be written ({error}); the ranking is current all the same"
        ) from error


def _check_output(output: Path | None) -> None:
    """Raises UsageError where the file cannot be written; called before anything slow."""
    from tasc_jobs.errors import UsageError

    if output and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise UsageError(
            f"--output: {output} is no place for a file; name one in a folder there is"
        )
