"""The command `tasc finetune`: train a model on a task's outputs."""

from pathlib import Path
from typing import Annotated

import typer

from tasc_jobs.cli.options import (
    AsJson,
    CheckpointS,
    RowOptions,
    StoreOptions,
    Task,
    Template,
    grouped,
    print_result,
)
from tasc_jobs.finetune.hyperparameters import FinetuneSettings

Output = Annotated[Path, typer.Option(help="Folder for the model, and for checkpoints.")]
Train = Annotated[
    list[Path] | None,
    typer.Option(help="Learn rows of this file; repeatable.", show_default="the task's corpus"),
]
Model = Annotated[
    str | None, typer.Option(help="Folder or Hugging Face name.", show_default="the task's")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="What `tasc enrich` made of its tokenizer.", show_default="its own"),
]
Eos = Annotated[
    str | None,
    typer.Option(help="The token that is to end answers.", show_default="what ends the model's"),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes that share the work, by Ray Train.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Of a process on a CPU.", show_default="all cores")
]


@grouped()
def finetune(
    *,
    task: Task,
    output: Output,
    train: Train = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    template: Template = None,
    eos: Eos = None,
    settings: FinetuneSettings,
    workers: Workers = 1,
    threads: Threads = None,
    checkpoint_s: CheckpointS = 60.0,
    row: RowOptions,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Train an adapter, and the rows of new tokens, on what TASK answers (TASC-ft, second half).

    Killed at any moment and run again by the same command, it goes on from its last checkpoint and
    ends with the same weights. Ctrl-C makes one first, unless --workers share the work.

    OUTPUT/adapter is for transformers and PEFT; OUTPUT/model has the adapter in its weights and is
    served like any model (`tasc task create TASK --model ...`).
    """
    from tasc_jobs.finetune.finetuning import STAGES, finetune_with, in_words, job_of, refuse_made
    from tasc_jobs.task_inputs import InputOptions, TaskInputs
    from tasc_runtime.progress import Stages

    refuse_made(output)
    options = InputOptions(
        task=task,
        model=model,
        tokenizer=tokenizer,
        eos=eos,
        template=template,
        files=train or (),
        fields=row.fields,
    )
    with store.open_if(not options.names_everything) as url:
        job = job_of(TaskInputs.read(url, options), settings, output, checkpoint_s)
    with Stages(f"fine-tune {task}", STAGES) as stages:
        found = finetune_with(workers, threads, job, stages, stages.tell)
    print_result(found, in_words(found), as_json)
