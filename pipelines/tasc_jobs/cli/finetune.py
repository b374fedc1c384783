"""The command `tasc finetune`: train a model on a task's outputs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tasc_jobs.cli.options import (
    AsJson,
    BatchRows,
    CheckpointS,
    MicroRows,
    RowOptions,
    StoreOptions,
    Task,
    Template,
    grouped,
    print_result,
)

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
Epochs = Annotated[float, typer.Option(min=0.01, max=1000, help="Passes over the rows.")]
LearningRate = Annotated[float, typer.Option(min=0, max=1, help="At the first step.")]
Rank = Annotated[int, typer.Option(min=1, max=1024, help="Of the LoRA adapter.")]
Alpha = Annotated[int, typer.Option(min=1, max=4096, help="Of the LoRA adapter.")]
Dropout = Annotated[float, typer.Option(min=0, max=0.9, help="Of the LoRA adapter.")]
MaxLength = Annotated[
    int, typer.Option(min=2, help="Tokens of prompt and output; longer rows are left out.")
]
Quantization = Annotated[
    Literal["auto", "nf4", "none"],
    typer.Option(help="Of the frozen weights; auto is nf4 on a GPU (QLoRA)."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the rows' order and of dropout.")]
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
    epochs: Epochs = 3.0,
    learning_rate: LearningRate = 2e-4,
    rank: Rank = 16,
    alpha: Alpha = 16,
    dropout: Dropout = 0.2,
    batch_rows: BatchRows = 64,
    micro_rows: MicroRows = 8,
    max_length: MaxLength = 1024,
    quantization: Quantization = "auto",
    seed: Seed = 0,
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
    from tasc_jobs.finetune.finetuning import (
        STAGES,
        finetune_with,
        in_words,
        job_of,
        refuse_made,
    )
    from tasc_jobs.finetune.hyperparameters import FinetuneSettings
    from tasc_jobs.task_inputs import InputOptions, TaskInputs
    from tasc_runtime.progress import Stages

    refuse_made(output)
    settings = FinetuneSettings(
        epochs=epochs,
        learning_rate=learning_rate,
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        batch_rows=batch_rows,
        micro_rows=micro_rows,
        max_length=max_length,
        quantization=quantization,
        seed=seed,
    )
    options = InputOptions(
        task=task,
        model=model,
        tokenizer=tokenizer,
        eos=eos,
        template=template,
        files=train or (),
        fields=row.fields,
    )
    with store.open_if(not options.name_all) as url:
        job = job_of(TaskInputs.read(url, options), settings, output, checkpoint_s)
    with Stages(f"fine-tune {task}", STAGES) as stages:
        found = finetune_with(workers, threads, job, stages, stages.tell)
    print_result(found, in_words(found), as_json)
