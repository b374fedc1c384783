"""The options of `tasc generate`, as typer reads them. They do nothing."""

from pathlib import Path
from typing import Annotated, Any

import typer


def _option(help_: str, panel: str) -> Any:
    return typer.Option(help=help_, show_default="the task's", rich_help_panel=panel)


Actors = Annotated[int, typer.Option(min=1, help="Engines in the pool.")]
Rows = Annotated[int, typer.Option(min=1, help="b, rows an engine decodes together.")]
Unflushed = Annotated[
    int, typer.Option(min=1, help="Most answers in Redis that are in no file yet.")
]
Stall = Annotated[
    float, typer.Option(min=1, help="Seconds without any row finished that end the job.")
]
Choices = Annotated[
    Path | None,
    _option("File of labels, one a line or a .json list: each answer is one.", "Answers"),
]
Schema = Annotated[Path | None, _option("File with the JSON schema of every answer.", "Answers")]
Regex = Annotated[str | None, _option("Expression that a whole answer matches.", "Answers")]
Adapter = Annotated[
    str | None,
    typer.Option(help="Which of the task's adapters answers.", show_default="its first"),
]
Temperature = Annotated[float | None, _option("0 takes the likeliest token, to 100.", "Sampling")]
TopP = Annotated[
    float | None, _option("Above 0, to 1: share of probability drawn from.", "Sampling")
]
TopK = Annotated[int | None, _option("Likeliest tokens drawn from; 0: all.", "Sampling")]
Seed = Annotated[
    int, typer.Option(min=0, help="Same seed, same answers.", rich_help_panel="Sampling")
]
Input = Annotated[
    list[str],
    typer.Option(
        "--input",
        help=".jsonl, .jsonl.gz or .parquet, a folder of them, or redis:TASK for the inputs of "
        "that task's corpus; files and folders may be several.",
    ),
]
Output = Annotated[
    Path, typer.Option(help="One row per good input row, in order: .parquet, else JSON lines.")
]
Reject = Annotated[
    Path | None,
    typer.Option(help="File for rows without an answer.", show_default="OUTPUT.rejected.jsonl"),
]
MaxErrors = Annotated[
    int | None, typer.Option(min=0, help="More of them end the job.", show_default="any number")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Time 20 rows with and without drafts; write nothing.", show_default="off"
    ),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart", help="Throw away what an earlier start has done.", show_default="off"
    ),
]
Draft = Annotated[bool, typer.Option(help="Whether to draft; answers are the same.")]
