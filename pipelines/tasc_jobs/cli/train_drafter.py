"""The command `tasc train-drafter`: train a model that drafts for a task's model."""

from pathlib import Path
from typing import Annotated

import typer

from tasc_engine.drafting.neural.card import Kind
from tasc_jobs.cli.options import (
    AsJson,
    BatchRows,
    CheckpointS,
    Device,
    MaxModelLen,
    MaxTokens,
    MicroRows,
    RowOptions,
    StoreOptions,
    Task,
    Template,
    Threads,
    grouped,
    print_result,
)
from tasc_jobs.drafter.hyperparameters import DrafterSettings, of_kind
from tasc_runtime.progress import Stages

KindOption = Annotated[
    Kind,
    typer.Option(help="A layer over the model's hidden states, or a small model of its own."),
]
Output = Annotated[Path, typer.Option(help="Folder for the drafter, answers and checkpoints.")]
Model = Annotated[
    str | None,
    typer.Option(help="Whom to draft for: folder or name.", show_default="the task's"),
]
Adapter = Annotated[
    str | None, typer.Option(help="PEFT adapter of --model.", show_default="none, or the task's")
]
Train = Annotated[
    list[Path] | None,
    typer.Option(help="Answer rows of this file; repeatable.", show_default="the task's corpus"),
]
Answers = Annotated[
    Path | None,
    typer.Option(
        help="Answers of this model, made before (answers.jsonl of another --output).",
        show_default="made first",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=2, help="Take only so many rows.", show_default="all")
]
Rows = Annotated[int, typer.Option(min=1, max=4096, help="Rows answered together.")]
Layers = Annotated[
    int | None,
    typer.Option(min=1, help="Of an independent drafter.", show_default="a quarter of the model's"),
]
Hidden = Annotated[
    int | None,
    typer.Option(
        min=8, help="Width of an independent drafter.", show_default="a quarter of the model's"
    ),
]
Epochs = Annotated[float, typer.Option(min=0.01, max=1000, help="Passes over the answers.")]
LearningRate = Annotated[float, typer.Option(min=0, max=1, help="The greatest.")]
TokenWeight = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1000,
        help="Of an EAGLE head's cross-entropy; raise it if small.",
        show_default=str(DrafterSettings.token_weight),
    ),
]
Noise = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=100,
        help="On the hidden states that an EAGLE head reads.",
        show_default=str(DrafterSettings.noise),
    ),
]
OwnShare = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Of the hidden states that an EAGLE head reads, replaced by its own.",
        show_default=str(DrafterSettings.own_share),
    ),
]
PromptWeight = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Of a prompt's tokens, for an independent drafter.",
        show_default=str(DrafterSettings.prompt_weight),
    ),
]
MaxLength = Annotated[
    int, typer.Option(min=3, help="Tokens of prompt and answer to learn; longer are left out.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of --model: float32, bfloat16, float16, float64",
        show_default="the task's, or float32",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of first values, the rows' order and noise.")]


@grouped()
def train_drafter(
    *,
    task: Task,
    kind: KindOption,
    output: Output,
    model: Model = None,
    adapter: Adapter = None,
    template: Template = None,
    train: Train = None,
    answers: Answers = None,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    max_model_len: MaxModelLen = None,
    rows: Rows = 8,
    layers: Layers = None,
    hidden: Hidden = None,
    epochs: Epochs = 10.0,
    learning_rate: LearningRate = 1e-3,
    token_weight: TokenWeight = None,
    noise: Noise = None,
    own_share: OwnShare = None,
    prompt_weight: PromptWeight = None,
    batch_rows: BatchRows = 32,
    micro_rows: MicroRows = 8,
    max_length: MaxLength = 1024,
    dtype: Dtype = None,
    device: Device = "auto",
    threads: Threads = 1,
    seed: Seed = 0,
    checkpoint_s: CheckpointS = 60.0,
    row: RowOptions,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Train a model that drafts for the model of TASK, on that model's own answers.

    The model answers the rows' inputs, the drafter learns the answers; the last 20th of them tells
    how often it says what the model does. Killed and run again, it ends with the same weights.
    """
    own = of_kind(
        kind,
        token_weight=token_weight,
        noise=noise,
        own_share=own_share,
        prompt_weight=prompt_weight,
        layers=layers,
        hidden=hidden,
    )
    from tasc_jobs.drafter.training_run import STAGES, in_words, job_of
    from tasc_jobs.drafter.training_run import train_drafter as run
    from tasc_jobs.evaluate.subject import Setup
    from tasc_jobs.task_inputs import InputOptions, TaskInputs

    settings = DrafterSettings(
        kind, epochs, learning_rate, batch_rows, micro_rows, max_length, seed=seed, **own
    )
    options = InputOptions(
        task=task,
        model=model,
        adapter=adapter,
        template=template,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        files=train or (),
        fields=row.fields,
        limit=limit,
    )
    needed = not (options.name_all or (answers and model and template))
    with store.open_if(needed) as url:
        inputs = TaskInputs.read(url, options, with_rows=answers is None)
        setup = Setup(rows, max_model_len, threads)
        job = job_of(inputs, answers, settings, setup, output, checkpoint_s)
    with Stages(f"train {kind} drafter {task}", STAGES) as stages:
        found = run(job, stages, stages.tell)
    print_result(found, in_words(found), as_json)
