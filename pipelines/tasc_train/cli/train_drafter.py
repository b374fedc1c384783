"""The command `tasc train-drafter`, which trains a model that drafts for a task's model."""

from pathlib import Path
from typing import Annotated

import typer

from tasc_jobs.cli.options import (
    AsJson,
    MaxTokens,
    ModelDtype,
    StoreOptions,
    Task,
    TrainOptions,
    grouped,
    print_result,
    require_files,
)
from tasc_jobs.errors import UsageError
from tasc_jobs.hints import command
from tasc_runtime.progress import Stages
from tasc_train.cli.options import CheckpointS, EngineOptions, ModelAndPrompt
from tasc_train.drafter.hyperparameters import OF_KIND, DrafterSettings

Output = Annotated[Path, typer.Option(help="Folder for the drafter, answers and checkpoints.")]
Adapter = Annotated[
    str | None, typer.Option(help="PEFT adapter of --model.", show_default="none, or the task's")
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
EXAMPLES = """\
A head on the task's model: tasc train-drafter tickets --kind eagle --output drafter

Then: tasc task set tickets --drafter ./drafter"""


@grouped({ModelAndPrompt: "the task's"})
def train_drafter(
    context: typer.Context,
    *,
    task: Task,
    settings: DrafterSettings,
    output: Output,
    model: ModelAndPrompt,
    adapter: Adapter = None,
    data: TrainOptions,
    answers: Answers = None,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    engine: EngineOptions,
    dtype: ModelDtype = None,
    checkpoint_s: CheckpointS = 60.0,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Train a draft model for the model of TASK on answers of that model.

    The model answers the inputs of the rows, and the drafter is trained on the answers. The last
    5 % of the rows that fit --max-length are held out to measure how often the drafter predicts the
    model's next token. An interrupted run resumes when it is run again, and ends with the same
    weights. If the run is already finished, its report is printed again.
    """
    _refuse_other_settings(settings, context)
    require_files(*data.files, answers)
    from tasc_jobs.task_inputs import TaskInputs

    options = model.inputs(
        task,
        data,
        adapter=adapter,
        max_tokens=max_tokens,
        dtype=dtype,
        device=engine.device,
        limit=limit,
    )
    needed = not (options.names_everything or (answers and model.model and options.names_template))
    with store.open_if(needed, task) as url:
        from tasc_train.drafter.training_run import STAGES, in_words, job_of
        from tasc_train.drafter.training_run import train_drafter as run

        inputs = TaskInputs.read(url, options, with_rows=answers is None)
        job = job_of(inputs, answers, settings, engine.setup, output, checkpoint_s)
    with Stages(f"train {settings.kind} drafter {task}", STAGES) as stages:
        report = run(job, stages, stages.set_suffix)
    text = in_words(report)
    if inputs.record:
        text += f"\nto use it: {command('task', 'set', task, '--drafter', output)}"
    print_result(report, text, as_json)


def _refuse_other_settings(settings: DrafterSettings, context: typer.Context) -> None:
    """Raises UsageError if an option was given that only the other kind of drafter has."""
    (other,) = OF_KIND.keys() - {settings.kind}
    for name in OF_KIND[other]:
        source = context.get_parameter_source(name)
        if source and source.name == "COMMANDLINE":
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(settings, name)} applies only to --kind "
                f"{other}; remove it, or replace --kind {settings.kind}"
            )
