"""Fine-tune a model on a task's rows. A killed run goes on from its last checkpoint."""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.checkpoints import (
    FINETUNE,
    REPORT,
    Checkpoints,
    claimed,
    require_unfinished,
)
from tasc_jobs.finetune.examples import Example, digest_of, examples_of
from tasc_jobs.finetune.hyperparameters import FinetuneSettings
from tasc_jobs.finetune.model import (
    AddedVocabulary,
    adapted,
    add_rows,
    dtype_on,
    load_base,
    vocabulary_of,
)
from tasc_jobs.finetune.result import CARD, Made, Result, discard
from tasc_jobs.finetune.training import Trainer, WorkerGroup, memory_to, run_through
from tasc_jobs.task_inputs import TaskInputs
from tasc_runtime.progress import StageProgress, note, silent
from tasc_store import CorpusRow
from tasc_text import PromptTemplate, resolve_folder

STAGES = {"train": "steps", "write": "files"}
CHECKPOINT = "checkpoint"
_DYING_S = 30.0  # a group begins again while the system still buries its dead


@dataclass(frozen=True)
class Finetune:
    """What is to be fine-tuned on what.

    Attributes:
        base: Folder of the model.
        tokenizer: Folder of its tokenizer, or of one that `tasc enrich` made of it.
        output: Folder for the result, and for checkpoints meanwhile.
        base_name: The model's name on the Hugging Face hub, where it has one.
        revision: Of it there, which ``base`` is a copy of.
        eos: Text of the token that is to end answers; None: the one that ends the model's.
    """

    task: str
    base: Path
    tokenizer: Path
    rows: Sequence[CorpusRow]
    template: PromptTemplate
    settings: FinetuneSettings
    output: Path
    checkpoint_s: float = 60.0
    base_name: str | None = None
    revision: str | None = None
    eos: str | None = None

    @property
    def base_told(self) -> str:
        """How those who load the adapter find the model."""
        return self.base_name or str(self.base.resolve())


@dataclass(frozen=True)
class TrainingPlan:
    """What is learnt, and by what arithmetic.

    Attributes:
        too_long: Rows that were left out.
    """

    vocabulary: AddedVocabulary
    examples: Sequence[Example]
    too_long: int
    device: str
    nf4: bool

    @property
    def arithmetic(self) -> dict[str, Any]:
        dtype = str(dtype_on(self.device)).removeprefix("torch.")
        return {"nf4": self.nf4, "device": self.device, "dtype": dtype}


def finetune(
    job: Finetune,
    progress: StageProgress = silent,
    group: WorkerGroup | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train, write the result, and say what it is like. Run again, a killed run goes on.

    A group that begins again behind its own result says what it is like, and trains nothing.

    Args:
        say: Told in words how the training goes.

    Raises:
        FinetuneError: Nothing to train on, a tokenizer that does not fit the model, a loss that is
            no number, no memory, no room on disk, or another process trains in the output.
        TokenizerError: A tokenizer cannot be read.
    """
    if group is None:
        refuse_made(job.output)
    leads = group is None or group.rank == 0
    waits = 0.0 if group is None else _DYING_S
    plan = plan_of(job)  # refused, it leaves no folder
    data = {"task": job.task, "rows": len(plan.examples), "too_long": plan.too_long}
    new = {"new_tokens": len(plan.vocabulary.parts), "end": plan.vocabulary.end}
    settings = {**asdict(job.settings), **new, **plan.arithmetic}
    with claimed(job.output, FINETUNE, waits) if leads else nullcontext():
        made = leads and _is_made(job.output, {"data": data, "settings": settings}, group)
        # Nobody looks for a checkpoint before the first has the folder for itself.
        if _first_says(made, group, plan.device):
            metrics = json.loads((job.output / REPORT).read_text())["metrics"]
        else:
            result = Result(job.output, plan.vocabulary) if leads else None
            checkpoints = Checkpoints(job.output / CHECKPOINT, _pins(job, plan))
            metrics = _trained(job, plan, checkpoints, result, (progress, say), group)
            if result:
                _free()
                progress("write", 0, 1)
                result.end(job.base, Made(job.base_told, job.revision, data, settings, metrics))
                checkpoints.remove()
                progress("write", 1, 1)
    return {**data, **settings, **metrics, "output": str(job.output), "card": CARD}


def refuse_made(output: Path) -> None:
    """Raise FinetuneError where a fine-tune has ended; what it had no time to remove goes."""
    try:
        require_unfinished(output)
    except FinetuneError:
        with suppress(FinetuneError), claimed(output, FINETUNE):
            _clear(output)
        raise


def _is_made(output: Path, as_told: Mapping[str, Any], group: WorkerGroup | None) -> bool:
    """Whether this group has written its result, and one of it died behind that.

    Args:
        as_told: What its report says, but for its metrics.

    Raises:
        FinetuneError: Another run has ended there.
    """
    if not (output / REPORT).is_file():
        return False
    _clear(output)
    there = json.loads((output / REPORT).read_text())
    if group is None or any(there[name] != value for name, value in as_told.items()):
        require_unfinished(output)
    return True


def _clear(output: Path) -> None:
    """Remove what a run needs until its result is there."""
    discard(output)
    Checkpoints(output / CHECKPOINT, {}).remove()


def _first_says(yes: bool, group: WorkerGroup | None, device: str) -> bool:
    """What the first of a group says; the others say no, and all have come here behind it."""
    if group is None:
        return yes
    said = torch.tensor(float(yes), device=device)
    group.sum([said])
    return bool(said.item())


def plan_of(job: Finetune) -> TrainingPlan:
    """All that can be told without the output.

    Raises:
        FinetuneError: There is nothing to train on, or the tokenizer does not fit the model.
        TokenizerError: A tokenizer cannot be read.
    """
    vocabulary = vocabulary_of(job.base, job.tokenizer, job.eos)
    longest = job.settings.max_length
    examples, too_long = examples_of(job.rows, vocabulary.tokenizer, job.template, longest)
    if not examples:
        raise FinetuneError(
            f"none of {len(job.rows)} rows has at most {longest} tokens; raise --max-length, or "
            "ingest rows"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = job.settings.quantization
    nf4 = wanted == "nf4" or (wanted == "auto" and device != "cpu")
    return TrainingPlan(vocabulary, examples, too_long, device, nf4)


def _trained(
    job: Finetune,
    plan: TrainingPlan,
    checkpoints: Checkpoints,
    result: Result | None,
    told: tuple[StageProgress, Callable[[str], None]],
    group: WorkerGroup | None,
) -> dict[str, Any]:
    """Take all steps and write the adapter; the model is gone behind it."""
    there = checkpoints.load()
    _first_says(False, group, plan.device)  # nor is it replaced before all have it
    way_out = "take a smaller model" if plan.nf4 else "take --quantization nf4, or a smaller model"
    with memory_to(f"load {job.base} and an adapter of rank {job.settings.rank}", way_out):
        model = load_base(job.base, nf4=plan.nf4, device=plan.device)
        add_rows(model, plan.vocabulary.tokenizer.vocab_size, plan.vocabulary.parts)
        model = adapted(model, plan.vocabulary.parts, job.settings)
        trainer = Trainer(model, plan.examples, job.settings, group)
        if there:
            trainer.resume(there)
    if result:
        how = "QLoRA, frozen weights in NF4" if plan.nf4 else "LoRA, frozen weights as they are"
        note(f"{how}, on {plan.device}")
        if there:
            note(f"going on behind step {there.step} of {trainer.steps}")
    kept = checkpoints if result else None
    metrics = run_through(trainer, kept, job.checkpoint_s, *told)
    if result:
        result.begin(trainer.model, job.base_told, job.revision)
    return metrics


def _free() -> None:
    """A merge needs the room that the training had."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _pins(job: Finetune, plan: TrainingPlan) -> dict[str, Any]:
    """What changes the result; not what was asked for, but what became of it on this machine."""
    asked = {k: v for k, v in asdict(job.settings).items() if k != "quantization"}
    return {
        **asked,
        **plan.arithmetic,
        "base": str(job.base),
        "tokenizer": plan.vocabulary.tokenizer.fingerprint,
        "rows": digest_of(plan.examples),
    }


def in_words(found: dict[str, Any]) -> str:
    """What became of a fine-tune, for people."""
    return (
        f"{found['steps']} steps on {found['rows']:,} rows ({found['too_long']} were too long),"
        f" loss {found['first_loss']:.3f} -> {found['loss']:.3f}, {found['new_tokens']} new"
        f" tokens, {found['seconds']:.0f} s"
        f"\n{found['output']}; `tasc evaluate --model {found['output']}/model` says how good "
        "it is, and whether it writes in its new tokens"
    )


def finetune_with(
    workers: int,
    threads: int | None,
    job: Finetune,
    progress: StageProgress,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run a job in this process or, with several workers, by Ray Train.

    Raises what `finetune` does.

    Args:
        threads: Of this process on a CPU; None: all cores.
    """
    if workers == 1:
        if threads:
            torch.set_num_threads(threads)
        return finetune(job, progress, say=say)
    from tasc_jobs.finetune.distributed import finetune_by
    from tasc_jobs.ray_local import local_ray

    with local_ray(num_cpus=workers + 1):
        return finetune_by(workers, job, progress, say, gpus=torch.cuda.is_available())


def job_of(
    inputs: TaskInputs, settings: FinetuneSettings, output: Path, checkpoint_s: float
) -> Finetune:
    """A job on a task's rows.

    Raises:
        UsageError: No model or no prompt is named.
        EmptyCorpusError: There are no rows.
        TextError: There is no such model, or the template has not exactly one place for the input.
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
    """What the hub's cache has a copy of: branches and tags move, and the copy does not."""
    return folder.name if folder.parent.name == "snapshots" else None
