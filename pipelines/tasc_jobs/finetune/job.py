"""Fine-tunes a model on a task's rows, from wherever an earlier run of the same stopped.

It knows no Redis and no command line.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tasc_jobs.finetune.card import Made
from tasc_jobs.finetune.checkpoints import Checkpoints
from tasc_jobs.finetune.claim import claimed
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.examples import Example, digest_of, examples_of
from tasc_jobs.finetune.finished import require_unfinished
from tasc_jobs.finetune.memory import memory_to
from tasc_jobs.finetune.model import adapted, add_rows, dtype_on, load_base
from tasc_jobs.finetune.result import CARD, Result
from tasc_jobs.finetune.running import run_through
from tasc_jobs.finetune.settings import FinetuneSettings
from tasc_jobs.finetune.training import Crew, Trainer
from tasc_jobs.finetune.vocabulary import Vocabulary, vocabulary_of
from tasc_jobs.progress import note
from tasc_jobs.stages import StageProgress, silent
from tasc_store import CorpusRow
from tasc_text import PromptTemplate

STAGES = {"train": "steps", "write": "files"}
CHECKPOINT = "checkpoint"
_DYING_S = 30.0  # a crew begins again while the system still buries its dead


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
class _Lesson:
    """What is learnt, and by what arithmetic.

    Attributes:
        too_long: Rows that were left out.
    """

    vocabulary: Vocabulary
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
    crew: Crew | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train, write the result, and say what it is like. Run again, a killed run goes on.

    Args:
        say: Told in words how the training goes.

    Raises:
        FinetuneError: Nothing to train on, a tokenizer that does not fit the model, a loss that is
            no number, no memory, no room on disk, or another process trains in the output.
        TokenizerError: A tokenizer cannot be read.
    """
    leads = crew is None or crew.rank == 0
    waits = 0.0 if crew is None else _DYING_S
    with claimed(job.output, waits) if leads else nullcontext():
        require_unfinished(job.output)
        lesson = _lesson(job)
        result = Result(job.output, lesson.vocabulary) if leads else None
        checkpoints = Checkpoints(job.output / CHECKPOINT, _pins(job, lesson))
        metrics = _trained(job, lesson, checkpoints, result, (progress, say), crew)
        data = {"task": job.task, "rows": len(lesson.examples), "too_long": lesson.too_long}
        new = {"new_tokens": len(lesson.vocabulary.parts), "end": lesson.vocabulary.end}
        settings = {**asdict(job.settings), **new, **lesson.arithmetic}
        if result:
            _free()
            progress("write", 0, 1)
            result.end(job.base, Made(job.base_told, job.revision, data, settings, metrics))
            checkpoints.remove()
            progress("write", 1, 1)
    return {**data, **settings, **metrics, "output": str(job.output), "card": CARD}


def _lesson(job: Finetune) -> _Lesson:
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
    return _Lesson(vocabulary, examples, too_long, device, nf4)


def _trained(
    job: Finetune, lesson: _Lesson, checkpoints: Checkpoints, result: Result | None,
    told: tuple[StageProgress, Callable[[str], None]], crew: Crew | None,
) -> dict[str, Any]:  # fmt: skip
    """Take all steps and write the adapter; the model is gone behind it."""
    there = checkpoints.load()
    way_out = (
        "take a smaller model" if lesson.nf4 else "take --quantization nf4, or a smaller model"
    )
    with memory_to(f"load {job.base} and an adapter of rank {job.settings.rank}", way_out):
        model = load_base(job.base, nf4=lesson.nf4, device=lesson.device)
        add_rows(model, lesson.vocabulary.tokenizer.vocab_size, lesson.vocabulary.parts)
        model = adapted(model, lesson.vocabulary.parts, job.settings)
        trainer = Trainer(model, lesson.examples, job.settings, crew)
        if there:
            trainer.resume(there)
    if result:
        how = "QLoRA, frozen weights in NF4" if lesson.nf4 else "LoRA, frozen weights as they are"
        note(f"{how}, on {lesson.device}")
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


def _pins(job: Finetune, lesson: _Lesson) -> dict[str, Any]:
    """What changes the result; not what was asked for, but what became of it on this machine."""
    asked = {k: v for k, v in asdict(job.settings).items() if k != "quantization"}
    return {
        **asked, **lesson.arithmetic, "base": str(job.base),
        "tokenizer": lesson.vocabulary.tokenizer.fingerprint, "rows": digest_of(lesson.examples),
    }  # fmt: skip
