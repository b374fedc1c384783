"""The command `tasc train-drafter`: train a model that drafts for a task's model."""

from pathlib import Path
from typing import Annotated

import typer

from tasc_jobs.cli.options import (
    AsJson,
    ChatOptions,
    CheckpointS,
    Device,
    MaxModelLen,
    MaxTokens,
    RowOptions,
    StoreOptions,
    Task,
    Template,
    Threads,
    grouped,
    print_result,
    require_files,
)
from tasc_jobs.drafter.hyperparameters import DrafterOptions
from tasc_runtime.progress import Stages

Output = Annotated[Path, typer.Option(help="Folder for the drafter, answers and checkpoints.")]
Model = Annotated[
    str | None,
    typer.Option(help="Target model: folder or Hugging Face name.", show_default="the task's"),
]
Adapter = Annotated[
    str | None, typer.Option(help="PEFT adapter of --model.", show_default="none, or the task's")
]
Train = Annotated[
    list[Path] | None,
    typer.Option(help="File of rows to answer; repeatable.", show_default="the task's corpus"),
]
Answers = Annotated[
    Path | None,
    typer.Option(
        help="Existing answers of this model (answers.jsonl of an earlier --output).",
        show_default="generated first",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=2, help="Maximum number of rows.", show_default="all")
]
Rows = Annotated[int, typer.Option(min=1, max=4096, help="Batch size.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Data type of --model: float32, bfloat16, float16, float64",
        show_default="the task's, or float32",
    ),
]


@grouped()
def train_drafter(
    *,
    task: Task,
    drafter: DrafterOptions,
    output: Output,
    model: Model = None,
    adapter: Adapter = None,
    template: Template = None,
    chat: ChatOptions,
    train: Train = None,
    answers: Answers = None,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    max_model_len: MaxModelLen = None,
    rows: Rows = 8,
    dtype: Dtype = None,
    device: Device = "auto",
    threads: Threads = 1,
    checkpoint_s: CheckpointS = 60.0,
    row: RowOptions,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Train a draft model for the model of TASK on answers of that model.

    The model answers the inputs of the rows, and the drafter is trained on the answers. The last
    5 % of them are held out to measure how often the drafter predicts the model's next token. An
    interrupted run resumes when it is run again, and ends with the same weights.
    """
    settings = drafter.settings
    require_files(*(train or ()), answers)
    from tasc_jobs.task_inputs import InputOptions, TaskInputs

    options = InputOptions(
        task=task,
        model=model,
        adapter=adapter,
        template=template,
        **vars(chat),
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        files=train or (),
        fields=row.fields,
        limit=limit,
    )
    needed = not (options.names_everything or (answers and model and options.names_template))
    with store.open_if(needed, task) as url:
        from tasc_jobs.drafter.training_run import STAGES, in_words, job_of
        from tasc_jobs.drafter.training_run import train_drafter as run
        from tasc_jobs.evaluate.measured_model import Setup

        inputs = TaskInputs.read(url, options, with_rows=answers is None)
        setup = Setup(rows, max_model_len, threads)
        job = job_of(inputs, answers, settings, setup, output, checkpoint_s)
    with Stages(f"train {settings.kind} drafter {task}", STAGES) as stages:
        report = run(job, stages, stages.tell)
    print_result(report, in_words(report), as_json)
