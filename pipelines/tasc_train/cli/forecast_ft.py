"""The command `tasc forecast-ft`, which forecasts the effect of adding tokens to a vocabulary."""

from pathlib import Path
from typing import Annotated

import typer

from tasc_jobs.cli.options import (
    AsJson,
    Dtype,
    Eos,
    Report,
    StoreOptions,
    TrainOptions,
    check_report,
    grouped,
    numbers,
    require_files,
    show,
)
from tasc_jobs.tasks.options import PromptOptions
from tasc_train.cli.options import EngineOptions, NgramOptions

Task = Annotated[str | None, typer.Argument(help="Use the corpus of this task.")]
Test = Annotated[
    list[Path] | None,
    typer.Option(help="File of held-out rows; repeatable.", show_default="a part of the rows"),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="Folder, or tokenizer.json.", show_default="the model's, or the task's"),
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="Model folder; its prompts and steps are timed on this machine.",
        show_default="no times",
    ),
]
Budgets = Annotated[str, typer.Option(help="Numbers of new tokens, separated by commas.")]
EXAMPLES = """\
Lengths: tasc forecast-ft tickets

Also times on this machine: tasc forecast-ft tickets --model ./my-model --report forecast.html"""


@grouped({PromptOptions: "the task's"})
def forecast_ft(
    *,
    task: Task = None,
    data: TrainOptions,
    test: Test = None,
    tokenizer: Tokenizer = None,
    model: Model = None,
    prompt: PromptOptions,
    budget: Budgets = "0,60,125,250,500,1000",
    ngrams: NgramOptions,
    eos: Eos = None,
    engine: EngineOptions,
    dtype: Dtype = "float32",
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Forecast what `tasc enrich` and `tasc finetune` would gain, by number of new tokens.

    With --model, it also estimates the time of an answer: the time of its prompt plus one step for
    each token.
    """
    data.require_either(task)
    check_report(report)
    require_files(*data.files, *(test or ()), tokenizer)
    from tasc_jobs.task_inputs import InputOptions, TaskInputs, read_files
    from tasc_runtime.progress import Stages

    budgets = numbers("--budget", [budget], 0, 100_000)
    settings = ngrams.settings(budgets[-1])
    options = InputOptions(
        task=task,
        model=str(model) if model else None,
        tokenizer=tokenizer or model,
        eos=eos,
        **vars(prompt),
        dtype=dtype,
        device=engine.device,
        files=data.files,
        fields=data.fields,
    )
    with store.open_if(task is not None, task) as url:
        from tasc_train.forecast import STAGES, forecast_job, forecast_page

        with Stages("forecast", STAGES) as stages:
            inputs = TaskInputs.read(url, options)
            held = read_files(test, data.fields).rows if test else ()
            found = forecast_job(inputs, held, settings, budgets, engine.setup, stages)
    show(forecast_page(found), found.as_json, report, as_json)
