"""The command `tasc finetune`: a model that has learnt a task's outputs. It computes nothing."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from tasc_jobs.cli.options import (
    DEFAULT_DATA_DIR,
    AsJson,
    BatchRows,
    CheckpointS,
    DataDir,
    InputField,
    MicroRows,
    OutputField,
    RedisUrl,
    Task,
    Template,
    open_store,
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


def finetune(
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
    input_field: InputField = "input",
    output_field: OutputField = "output",
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Train an adapter, and the rows of new tokens, on what TASK answers (TASC-ft, second half).

    Killed at any moment and run again by the same command, it goes on from its last checkpoint and
    ends with the same weights. Ctrl-C makes one first, unless --workers share the work.

    OUTPUT/adapter is for transformers and PEFT; OUTPUT/model has the adapter in its weights and is
    served like any model (`tasc task create TASK --model ...`).
    """
    from tasc_jobs.finetune.finished import REPORT

    if (output / REPORT).is_file():
        from tasc_jobs.finetune.finetuning import refuse_made

        refuse_made(output)
    from tasc_jobs.finetune.command import FinetuneOptions, FinetuneRequest, job_of, run
    from tasc_jobs.finetune.finetuning import STAGES
    from tasc_jobs.finetune.hyperparameters import FinetuneSettings
    from tasc_jobs.runtime.stages import Stages

    settings = FinetuneSettings(
        epochs, learning_rate, rank, alpha, dropout, batch_rows, micro_rows, max_length,
        quantization, seed,
    )  # fmt: skip
    fields = input_field, output_field
    given = FinetuneRequest(task, model, tokenizer, template, tuple(train or ()), fields, eos)
    with open_store(redis_url, data_dir) if given.wants_store else nullcontext() as url:
        job = job_of(url, given, settings, output, checkpoint_s)
    with Stages(f"fine-tune {task}", STAGES) as stages:
        report = run(job, FinetuneOptions(workers, threads), stages, stages.tell)
    print_result(report.as_json, report.in_words, as_json)
