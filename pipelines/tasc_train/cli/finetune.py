"""The command `tasc finetune`, which trains a model on a task's outputs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tasc_jobs.cli.options import (
    AsJson,
    Eos,
    StoreOptions,
    Task,
    TrainOptions,
    grouped,
    print_result,
    require_files,
)
from tasc_jobs.hints import command
from tasc_store import TaskStore, connect
from tasc_train.cli.options import CheckpointS, ModelAndPrompt
from tasc_train.finetune.hyperparameters import FinetuneSettings

Output = Annotated[Path, typer.Option(help="Folder for the model and for checkpoints.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="Folder that `tasc enrich` wrote.", show_default="the model's own"),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="all cores")]
EXAMPLES = """\
The task's own model: tasc finetune tickets --output tuned

With the tokens of tasc enrich: tasc finetune tickets --tokenizer tokenizer-500 --output tuned"""


@grouped({ModelAndPrompt: "the task's"})
def finetune(
    *,
    task: Task,
    output: Output,
    data: TrainOptions,
    model: ModelAndPrompt,
    tokenizer: Tokenizer = None,
    eos: Eos = None,
    settings: FinetuneSettings,
    threads: Threads = None,
    checkpoint_s: CheckpointS = 60.0,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Train an adapter, and embeddings of new tokens, on outputs of TASK (step 2 of TASC-ft).

    A run that was killed continues from its last checkpoint when the same command is run again, and
    ends with the same weights. Ctrl-C saves a checkpoint first.

    OUTPUT/adapter is for transformers and PEFT. OUTPUT/model has the adapter merged into its
    weights; serve it like any model (`tasc task create TASK --model ...`). Both keep the prompt of
    the training, and a task that is created from them uses it unless options give another.

    If the run is already finished, its report is printed again.
    """
    require_files(*data.files, tokenizer)
    from tasc_jobs.task_inputs import TaskInputs
    from tasc_runtime.progress import Stages

    options = model.inputs(task, data, tokenizer=tokenizer, eos=eos)
    with store.open_if(not options.names_everything, task) as url:
        import torch

        from tasc_train.finetune.finetuning import STAGES, in_words, job_of
        from tasc_train.finetune.finetuning import finetune as run

        if threads:
            torch.set_num_threads(threads)
        inputs = TaskInputs.read(url, options)
        job = job_of(inputs, settings, output, checkpoint_s)
        registered = TaskStore(connect(url)).names() if url else []
    with Stages(f"fine-tune {task}", STAGES) as stages:
        found = run(job, stages, stages.set_suffix)
    name = task
    while name in registered:
        name += "-ft"
    corpus = inputs.record.corpus_name if inputs.record else task
    steps = _to_serve(name, output / "model", data, None if data.files else corpus)
    print_result(found, "\n".join([in_words(found), "to serve it:", *steps]), as_json)


def _to_serve(name: str, model: Path, data: TrainOptions, corpus: str | None) -> Iterator[str]:
    """Yields the commands that create a task with the model and the rows of its training."""
    if corpus:
        yield command("task", "create", name, "--model", model, "--corpus", corpus)
    else:
        yield command("task", "create", name, "--model", model)
        own, usual = data.fields, TrainOptions().fields
        fields = ("--input-field", own.input, "--output-field", own.output)
        yield command("ingest", name, *data.files, *(() if own == usual else fields))
    yield command("build-index", name)
