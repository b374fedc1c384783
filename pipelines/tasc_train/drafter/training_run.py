"""Trains a drafter on its target's own answers. A killed run resumes from its last checkpoint."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tasc_engine import EngineError, ModelSource
from tasc_engine.drafting.neural.card import CARD, DrafterCard, target_fingerprint
from tasc_engine.drafting.neural.files import save_drafter
from tasc_engine.model.loading import load_model
from tasc_jobs.errors import JobError
from tasc_jobs.task_inputs import GenerationSettings, TaskInputs
from tasc_runtime.progress import StageProgress, note, silent
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer
from tasc_train.drafter.answers import (
    ANSWERS,
    TargetAnswer,
    examples_of,
    make_answers,
    read_answers,
)
from tasc_train.drafter.hyperparameters import DrafterSettings
from tasc_train.drafter.training import (
    DrafterTrainer,
    Trainable,
    TrainableEagle,
    TrainableSmallModel,
    agreement,
)
from tasc_train.errors import FinetuneError
from tasc_train.evaluate.measured_model import Setup
from tasc_train.finetune.checkpoints import DISK_FULL, Checkpoints, OutputKind, claimed
from tasc_train.finetune.examples import Example, digest_of
from tasc_train.finetune.training import run_through

STAGES = {"answer": "rows", "train": "steps", "write": "files"}
CHECKPOINT, REPORT = "checkpoint.pt", "training.json"
DRAFTER = OutputKind(
    "a drafter's training", ("config.json", "model.safetensors", CARD, REPORT, ANSWERS)
)
_HELD_OUT = 20  # the last twentieth of the rows is held out


@dataclass(frozen=True)
class DrafterJob:
    """The inputs of a drafter's training.

    Attributes:
        source: The target.
        rows: Rows with the inputs that the target answers. While it answers, drafts come from the
            outputs of the rows.
        answers: Answers made earlier; if None, the run makes them.
        output: Folder for the drafter, and for answers and checkpoints during the run.
    """

    task: str
    source: ModelSource
    generation: GenerationSettings
    setup: Setup
    rows: Sequence[CorpusRow]
    answers: Sequence[TargetAnswer] | None
    settings: DrafterSettings
    output: Path
    checkpoint_s: float = 60.0

    @property
    def target(self) -> str:
        """Fingerprint of the target."""
        return target_fingerprint(self.source.folder, self.source.adapter)


def train_drafter(
    job: DrafterJob,
    progress: StageProgress = silent,
    notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Make the answers, train, write the result and return its report. Resumes a killed run.

    If the output already has the result of this run, its report is returned and nothing is trained.

    Args:
        notify: Called with messages about the progress of the training.

    Raises:
        FinetuneError: There is nothing to train on, the loss or a gradient is not finite, memory or
            disk space runs out, or the output folder is in use by another process, or has another
            drafter or other content.
        JobError: The target cannot be loaded, or answers cannot be made or read.
    """
    with claimed(job.output, DRAFTER):
        return _trained(job, progress, notify)


def _trained(
    job: DrafterJob, progress: StageProgress, notify: Callable[[str], None]
) -> dict[str, Any]:
    tokenizer = TaskTokenizer.from_folder(job.source.folder)
    run = _run_of(job, tokenizer)
    if (job.output / CARD).is_file():
        return _finished(job.output, run)
    trained, held_out, left_out = _learnable(job, tokenizer, progress)
    torch.set_num_threads(job.setup.threads)
    torch.manual_seed(job.settings.seed)
    trainable = _trainable(job)
    trainer = DrafterTrainer(trainable, trained, job.settings)
    pins = {name: value for name, value in run.items() if name != "asked"}
    checkpoints = Checkpoints(job.output / CHECKPOINT, {**pins, "answers": digest_of(trained)})
    if there := checkpoints.load():
        note(f"resuming after step {there.step} of {trainer.steps}")
        trainer.resume(there)
    metrics = run_through(trainer, checkpoints, job.checkpoint_s, progress, notify)
    metrics["parameters"] = sum(p.numel() for p in trainable.model.parameters() if p.requires_grad)
    metrics["agreement"] = agreement(trainable, held_out, job.settings.micro_rows)
    data = {"task": job.task, "rows": len(trained), "held_out": len(held_out), "left_out": left_out}
    report = {**data, **run, **metrics, "output": str(job.output)}
    progress("write", 0, 1)
    _write(job, trainable, tokenizer, report)
    checkpoints.remove()
    progress("write", 1, 1)
    return report


def _run_of(job: DrafterJob, tokenizer: TaskTokenizer) -> dict[str, Any]:
    """Returns all inputs and settings by name; they are known before the answers are made."""
    inputs = [job.generation.template.identity, job.generation.max_tokens, job.generation.stop]
    rows = [(row.key, row.input) for row in job.rows] if job.answers is None else job.answers
    return {
        **asdict(job.settings),
        "target": job.target,
        "tokenizer": tokenizer.fingerprint,
        "asked": hashlib.sha256(repr((inputs, rows)).encode()).hexdigest(),
    }


def _finished(output: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Returns the report of the finished run; raises FinetuneError if it was another run."""
    report: dict[str, Any] = json.loads((output / REPORT).read_text(encoding="utf-8"))
    if changed := [name for name, value in run.items() if report.get(name) != value]:
        raise FinetuneError(
            f"{output} already has a drafter of a run with different {', '.join(changed)}; choose "
            "another output to train a new one"
        )
    note(f"{output} already has the result of this run; nothing is trained again")
    return {**report, "output": str(output)}


def _learnable(
    job: DrafterJob, tokenizer: TaskTokenizer, progress: StageProgress
) -> tuple[list[Example], list[Example], int]:
    """Returns the rows for training, the held-out rows, and the number of rows left out."""
    answers = job.answers
    if answers is None:
        answers = make_answers(
            job.output, job.rows, job.source, job.generation, job.setup, progress
        )
    max_length = job.settings.max_length
    examples, left_out = examples_of(answers, tokenizer, job.generation.template, max_length)
    if len(examples) < 2:  # one for training, one held out
        raise FinetuneError(
            f"only {len(examples)} of {len(answers)} answers have 3 to {max_length} tokens with "
            "their prompts, and at least 2 are needed; raise --max-length, or name more rows"
        )
    held_out = max(1, len(examples) // _HELD_OUT)
    return examples[:-held_out], examples[-held_out:], left_out


def _trainable(job: DrafterJob) -> Trainable:
    try:
        if job.settings.kind == "eagle":
            return TrainableEagle(load_model(job.source).requires_grad_(False), job.settings)
        config = AutoConfig.from_pretrained(job.source.folder).get_text_config()
    except (EngineError, OSError, ValueError) as error:
        raise JobError(f"cannot load {job.source.folder}: {error}") from error
    return TrainableSmallModel(config, job.settings, job.source.device)


def _write(
    job: DrafterJob,
    trainable: Trainable,
    tokenizer: TaskTokenizer,
    report: dict[str, Any],
) -> None:
    """Write the drafter; the file that marks it as complete is written last."""
    target = job.target if job.settings.kind == "eagle" else None
    card = DrafterCard(job.settings.kind, tokenizer.fingerprint, target)
    try:
        job.output.mkdir(parents=True, exist_ok=True)
        (job.output / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if isinstance(trainable, TrainableSmallModel):
            save_drafter(job.output, trainable.model, card)
            return
        body, joint = trainable.model.body, trainable.model.joint.weight
        body.config.vocab_size = trainable.model.vocab_size  # size of the target's embedding
        save_drafter(job.output, body, card, joint)
    except DISK_FULL as error:
        raise FinetuneError(
            f"the drafter cannot be written to {job.output}: {error}; free disk space and run the "
            "same command again; no step is repeated"
        ) from error


def job_of(
    inputs: TaskInputs,
    answers: Path | None,
    settings: DrafterSettings,
    setup: Setup,
    output: Path,
    checkpoint_s: float,
) -> DrafterJob:
    """Creates the job for a task's rows, or for answers that are read from a file.

    Raises:
        UsageError: The inputs contradict each other.
        FileError, EmptyCorpusError: The answers cannot be read, or there are no rows or answers.
        TextError: The model does not exist, or the template does not have exactly one {input}.
    """
    made = read_answers(answers)[: inputs.options.limit] if answers else None
    return DrafterJob(
        task=inputs.options.task or "",
        source=inputs.source,
        generation=replace(inputs.generation, guide=None),  # a drafter is not limited to labels
        setup=setup,
        rows=inputs.rows if made else inputs.some_rows,
        answers=made,
        settings=settings,
        output=output,
        checkpoint_s=checkpoint_s,
    )


def in_words(found: dict[str, Any]) -> str:
    """Formats the report of a training for a terminal."""
    return (
        f"{found['steps']} steps on {found['rows']:,} answers ({found['left_out']} were left out), "
        f"loss {found['first_loss']:.3f} -> {found['loss']:.3f}, {found['parameters']:,} "
        f"parameters, {found['seconds']:.0f} s; it predicts {found['agreement']:.1%} of the tokens "
        f"of {found['held_out']} held-out answers\n{found['output']}"
    )
