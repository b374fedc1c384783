"""Fine-tunes a model on the rows of a task. A killed run resumes from its last checkpoint."""

import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tasc_jobs.task_inputs import TaskInputs
from tasc_runtime.progress import StageProgress, note, silent
from tasc_store import CorpusRow
from tasc_text import Template, resolve_folder
from tasc_train.errors import FinetuneError
from tasc_train.finetune.checkpoints import FINETUNE, REPORT, Checkpoints, claimed
from tasc_train.finetune.examples import Example, digest_of, examples_of
from tasc_train.finetune.hyperparameters import FinetuneSettings
from tasc_train.finetune.model import (
    AddedVocabulary,
    adapted,
    add_rows,
    dtype_on,
    load_base,
    vocabulary_of,
)
from tasc_train.finetune.result import CARD, Report, Result, discard
from tasc_train.finetune.training import Trainer, memory_to, run_through

STAGES = {"train": "steps", "write": "files"}
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Finetune:
    """The inputs of a fine-tune.

    Attributes:
        base: Folder of the model.
        tokenizer: Folder of the model's tokenizer, or the output of `tasc enrich` for that
            tokenizer.
        output: Folder for the result, and for checkpoints during the training.
        checkpoint_s: Seconds between checkpoints.
        base_name: Name of the model on the Hugging Face Hub; None for a local model.
        revision: Hub revision that ``base`` is a copy of.
        eos: Text of the token that ends answers. None uses the EOS token of the model.
    """

    task: str
    base: Path
    tokenizer: Path
    rows: Sequence[CorpusRow]
    template: Template
    settings: FinetuneSettings
    output: Path
    checkpoint_s: float = 60.0
    base_name: str | None = None
    revision: str | None = None
    eos: str | None = None

    @property
    def base_reference(self) -> str:
        """The Hub name or path of the base model, which the saved adapter stores."""
        return self.base_name or str(self.base.resolve())


@dataclass(frozen=True)
class TrainingPlan:
    """The training examples, the tokenizer and the numeric precision of a fine-tune.

    Attributes:
        too_long: Number of rows left out because they exceed ``max_length``.
        nf4: Whether the frozen weights are quantised to NF4.
    """

    vocabulary: AddedVocabulary
    examples: Sequence[Example]
    too_long: int
    device: str
    nf4: bool

    @property
    def precision(self) -> dict[str, Any]:
        """The device and number formats of the training; they affect the result."""
        dtype = str(dtype_on(self.device)).removeprefix("torch.")
        return {"nf4": self.nf4, "device": self.device, "dtype": dtype}


def finetune(
    job: Finetune,
    progress: StageProgress = silent,
    notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train a model, write the result and return its report. Resumes a killed run.

    If the output already has the result of this run, its report is returned and nothing is trained.

    Args:
        notify: Called with messages about the progress of the training.

    Raises:
        FinetuneError: There is nothing to train on, the tokenizer does not fit the model, the loss
            or a gradient is not finite, memory or disk space runs out, another process is training
            in the output folder, or the folder has the result of another run.
        TokenizerError: A tokenizer cannot be read.
    """
    plan = plan_of(job)  # before the output folder is created, because the job may be refused
    data = {"task": job.task, "rows": len(plan.examples), "too_long": plan.too_long}
    new = {"new_tokens": len(plan.vocabulary.parts), "end": plan.vocabulary.end}
    settings = {**asdict(job.settings), **new, **plan.precision}
    run = _run_of(job, plan)
    with claimed(job.output, FINETUNE):
        if _is_finished(job.output, run):
            note(f"{job.output} already has the result of this run; nothing is trained again")
            return report_of(job.output)
        result = Result(job.output, plan.vocabulary, job.template)
        checkpoints = Checkpoints(job.output / CHECKPOINT, _pins(job, plan))
        metrics = _trained(job, plan, checkpoints, result, progress, notify)
        _free()
        progress("write", 0, 1)
        report = Report(job.base_reference, job.revision, data, settings, metrics, run)
        result.write_model(job.base, report)
        checkpoints.remove()
        progress("write", 1, 1)
        return report_of(job.output)


def report_of(output: Path) -> dict[str, Any]:
    """Reads the report of a finished fine-tune."""
    report = json.loads((output / REPORT).read_text())
    files = {"output": str(output), "card": CARD}
    return {**report["data"], **report["settings"], **report["metrics"], **files}


def _is_finished(output: Path, run: str) -> bool:
    """Whether a folder has the result of a run. If so, removes the other files of the run.

    Raises:
        FinetuneError: The folder has the result of another run.
    """
    if not (output / REPORT).is_file():
        return False
    discard(output)
    Checkpoints(output / CHECKPOINT, {}).remove()
    if json.loads((output / REPORT).read_text()).get("run") != run:
        raise FinetuneError(
            f"{output} has a model that was fine-tuned from other rows, another base or prompt, or "
            "with other settings; choose another output to train a new one"
        )
    return True


def _run_of(job: Finetune, plan: TrainingPlan) -> str:
    """Returns a hash of all inputs and settings.

    The machine is not included, although it affects the result.
    """
    inputs = [job.base_reference, job.revision, plan.vocabulary.tokenizer.fingerprint]
    text = json.dumps([*inputs, asdict(job.settings), digest_of(plan.examples)])
    return hashlib.sha256(text.encode()).hexdigest()


def plan_of(job: Finetune) -> TrainingPlan:
    """Prepares the examples of a job. Does not touch the output folder.

    Raises:
        FinetuneError: There is nothing to train on, or the tokenizer does not fit the model.
        TokenizerError: A tokenizer cannot be read.
    """
    vocabulary = vocabulary_of(job.base, job.tokenizer, job.eos)
    max_length = job.settings.max_length
    examples, too_long = examples_of(job.rows, vocabulary.tokenizer, job.template, max_length)
    if not examples:
        raise FinetuneError(
            f"all {len(job.rows)} rows have more than {max_length} tokens; raise --max-length, or "
            "ingest shorter rows"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quantization = job.settings.quantization
    nf4 = quantization == "nf4" or (quantization == "auto" and device != "cpu")
    return TrainingPlan(vocabulary, examples, too_long, device, nf4)


def _trained(
    job: Finetune,
    plan: TrainingPlan,
    checkpoints: Checkpoints,
    result: Result,
    progress: StageProgress,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Runs all steps and writes the adapter. Returns the metrics and frees the model."""
    checkpoint = checkpoints.load()
    advice = "use a smaller model" if plan.nf4 else "use --quantization nf4, or a smaller model"
    with memory_to(f"load {job.base} and an adapter of rank {job.settings.rank}", advice):
        model = load_base(job.base, nf4=plan.nf4, device=plan.device)
        add_rows(model, plan.vocabulary.tokenizer.vocab_size, plan.vocabulary.parts)
        model = adapted(model, plan.vocabulary.parts, job.settings)
        trainer = Trainer(model, plan.examples, job.settings)
        if checkpoint:
            trainer.resume(checkpoint)
    method = "QLoRA, frozen weights in NF4" if plan.nf4 else "LoRA, frozen weights unquantised"
    note(f"{method}, on {plan.device}")
    if checkpoint:
        note(f"resuming after step {checkpoint.step} of {trainer.steps}")
    metrics = run_through(trainer, checkpoints, job.checkpoint_s, progress, notify)
    result.write_adapter(trainer.model, job.base_reference, job.revision)
    return metrics


def _free() -> None:
    """Frees the memory of the training, which merging the adapter needs."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _pins(job: Finetune, plan: TrainingPlan) -> dict[str, Any]:
    """Returns all inputs and settings that affect the result.

    The requested quantization is left out; the resolved precision takes its place.
    """
    settings = {k: v for k, v in asdict(job.settings).items() if k != "quantization"}
    return {
        **settings,
        **plan.precision,
        "base": str(job.base),
        "tokenizer": plan.vocabulary.tokenizer.fingerprint,
        "rows": digest_of(plan.examples),
    }


def in_words(report: dict[str, Any]) -> str:
    """Formats the report of a fine-tune for a terminal."""
    return (
        f"{report['steps']} steps on {report['rows']:,} rows ({report['too_long']} too long, left"
        f" out), loss {report['first_loss']:.3f} -> {report['loss']:.3f}, {report['new_tokens']}"
        f" new tokens, {report['seconds']:.0f} s\n{report['output']}"
    )


def job_of(
    inputs: TaskInputs, settings: FinetuneSettings, output: Path, checkpoint_s: float
) -> Finetune:
    """Creates the job for the given inputs.

    Raises:
        UsageError: The inputs name no model or no template.
        EmptyCorpusError: There are no rows.
        TextError: The model does not exist, or the template does not have exactly one {input}.
    """
    rows, template = inputs.some_rows, inputs.template
    name, revision = inputs.named_model
    folder = resolve_folder(name, revision)
    is_local = Path(name).expanduser().is_dir()
    return Finetune(
        task=inputs.options.task or "",
        base=folder,
        tokenizer=inputs.options.tokenizer or folder,
        rows=rows,
        template=template,
        settings=settings,
        output=output,
        checkpoint_s=checkpoint_s,
        base_name=None if is_local else name,
        revision=None if is_local else _commit(folder) or revision,
        eos=inputs.options.eos,
    )


def _commit(folder: Path) -> str | None:
    """Returns the commit of a snapshot in the Hub's cache.

    A branch or tag may move later, but the commit stays valid.
    """
    return folder.name if folder.parent.name == "snapshots" else None
