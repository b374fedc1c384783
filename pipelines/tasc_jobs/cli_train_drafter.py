"""The command `tasc train-drafter`: a model that drafts for a task's model. It computes nothing."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer

from tasc_jobs.cli_options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    InputField,
    OutputField,
    RedisUrl,
    Task,
    open_store,
    print_result,
)

KindOption = Annotated[
    Literal["eagle", "independent"],
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
Template = Annotated[
    str | None,
    typer.Option(help=r"Prompt with {input}; \n is a line break.", show_default="the task's"),
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
    float,
    typer.Option(min=0, max=1000, help="Of an EAGLE head's cross-entropy; raise it if small."),
]
Noise = Annotated[
    float, typer.Option(min=0, max=100, help="On the hidden states that an EAGLE head reads.")
]
OwnShare = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Of the hidden states that an EAGLE head reads, replaced by its own."
    ),
]
PromptWeight = Annotated[
    float, typer.Option(min=0, max=1, help="Of a prompt's tokens, for an independent drafter.")
]
BatchRows = Annotated[int, typer.Option(min=1, help="Rows of one step.")]
MicroRows = Annotated[
    int, typer.Option(min=1, help="Rows at the same time; fewer need less memory.")
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
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 ...")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Seed = Annotated[int, typer.Option(min=0, help="Of first values, the rows' order and noise.")]
CheckpointS = Annotated[float, typer.Option(min=1, help="Seconds between two checkpoints.")]


def train_drafter(
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
    token_weight: TokenWeight = 0.1,
    noise: Noise = 0.1,
    own_share: OwnShare = 0.5,
    prompt_weight: PromptWeight = 0.1,
    batch_rows: BatchRows = 32,
    micro_rows: MicroRows = 8,
    max_length: MaxLength = 1024,
    dtype: Dtype = None,
    device: Device = "auto",
    threads: Threads = 1,
    seed: Seed = 0,
    checkpoint_s: CheckpointS = 60.0,
    input_field: InputField = "input",
    output_field: OutputField = "output",
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Train a model that drafts for the model of TASK, on that model's own answers.

    The model answers the rows' inputs, the drafter learns the answers; the last 20th of them tells
    how often it says what the model does. Killed and run again, it ends with the same weights.
    """
    from tasc_jobs.drafter import job as jobs
    from tasc_jobs.drafter.command import Given, in_words, job_of
    from tasc_jobs.drafter.settings import DrafterSettings
    from tasc_jobs.evaluate.subject import Setup
    from tasc_jobs.stages import Stages

    settings = DrafterSettings(
        kind, epochs, learning_rate, batch_rows, micro_rows, max_length, token_weight, noise,
        own_share, prompt_weight, layers, hidden, seed,
    )  # fmt: skip
    given = Given(
        task, model, adapter, template, tuple(train or ()), (input_field, output_field), answers,
        dtype, device, max_tokens, limit,
    )  # fmt: skip
    setup = Setup(rows, max_model_len, threads)
    with open_store(redis_url, data_dir) if given.wants_store else nullcontext() as url:
        job = job_of(url, given, settings, setup, output, checkpoint_s)
    with Stages(f"train {kind} drafter {task}", jobs.STAGES) as stages:
        found = jobs.train_drafter(job, stages, stages.tell)
    print_result(found, in_words(found), as_json)
