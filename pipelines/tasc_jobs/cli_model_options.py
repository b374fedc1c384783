"""Options that several commands which run or train a model share. They do nothing."""

from typing import Annotated

import typer

Template = Annotated[
    str | None,
    typer.Option(help=r"Prompt with {input}; \n is a line break.", show_default="the task's"),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of an answer.", show_default="the task's, or 256"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=8, help="Tokens of prompt and answer.", show_default="1024, or what the model has"
    ),
]
BatchRows = Annotated[int, typer.Option(min=1, help="Rows of one step.")]
MicroRows = Annotated[
    int, typer.Option(min=1, help="Rows at the same time; fewer need less memory.")
]
CheckpointS = Annotated[float, typer.Option(min=1, help="Seconds between two checkpoints.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 ...")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Gpus = Annotated[float, typer.Option(min=0, help="GPUs of each engine.")]
