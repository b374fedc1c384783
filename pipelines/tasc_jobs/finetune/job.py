"""Fine-tunes a model on a task's rows, from wherever an earlier run of the same stopped.

It knows no Redis and no command line.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tasc_jobs.enrich.saving import RECORD
from tasc_jobs.finetune.checkpoints import Checkpoints
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.examples import Example, digest_of, examples_of
from tasc_jobs.finetune.finished import require_unfinished
from tasc_jobs.finetune.model import Parts, adapted, add_rows, load_base
from tasc_jobs.finetune.result import CARD, Made, write
from tasc_jobs.finetune.running import run_through
from tasc_jobs.finetune.settings import FinetuneSettings
from tasc_jobs.finetune.training import Crew, Trainer
from tasc_jobs.stages import StageProgress, silent
from tasc_store import CorpusRow
from tasc_text import PromptTemplate, TaskTokenizer

log = logging.getLogger(__name__)
STAGES = {"train": "steps", "write": "files"}
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Finetune:
    """What is to be fine-tuned on what.

    Attributes:
        base: Folder of the model.
        tokenizer: Folder of its tokenizer, or of one that `tasc enrich` made of it.
        output: Folder for the result, and for checkpoints meanwhile.
        base_name: The model's name on the Hugging Face hub, where it has one.
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

    @property
    def base_told(self) -> str:
        """How those who load the adapter find the model."""
        return self.base_name or str(self.base.resolve())


def finetune(
    job: Finetune, progress: StageProgress = silent, crew: Crew | None = None
) -> dict[str, Any]:
    """Train, write the result, and say what it is like. Run again, a killed run goes on.

    Raises:
        FinetuneError: Nothing to train on, a loss that is no number, no memory, no room on disk.
    """
    require_unfinished(job.output)
    tokenizer = TaskTokenizer.from_folder(job.tokenizer)
    parts = new_tokens(job.tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nf4 = _wants_nf4(job.settings, device)
    examples, too_long = examples_of(job.rows, tokenizer, job.template, job.settings.max_length)
    if not examples:
        raise FinetuneError(
            f"none of {len(job.rows)} rows has at most {job.settings.max_length} tokens; raise "
            "--max-length, or ingest rows"
        )
    model = load_base(job.base, nf4=nf4, device=device)
    add_rows(model, tokenizer.vocab_size, parts)
    trainer = Trainer(adapted(model, parts, job.settings), examples, job.settings, crew)
    checkpoints = Checkpoints(job.output / CHECKPOINT, _pins(job, tokenizer, examples))
    if there := checkpoints.load():
        log.info("going on behind step %d of %d", there.step, trainer.steps)
        trainer.resume(there)
    leads = crew is None or crew.rank == 0
    metrics = run_through(trainer, checkpoints if leads else None, job.checkpoint_s, progress)
    data = {"task": job.task, "rows": len(examples), "too_long": too_long}
    settings = {**asdict(job.settings), "new_tokens": len(parts), "nf4": nf4, "device": device}
    if leads:
        progress("write", 0, 1)
        made = Made(job.base_told, data, settings, metrics)
        write(trainer.model, job.base, job.tokenizer, made, job.output)
        checkpoints.remove()
        progress("write", 1, 1)
    return {**data, **settings, **metrics, "output": str(job.output), "card": CARD}


def new_tokens(tokenizer: Path) -> Parts:
    """Of each token that `tasc enrich` added, the tokens it stands for; elsewhere none."""
    record = tokenizer / RECORD
    if not record.is_file():
        return {}
    return {token["id"]: token["parts"] for token in json.loads(record.read_text())["tokens"]}


def _wants_nf4(settings: FinetuneSettings, device: str) -> bool:
    nf4 = settings.quantization == "nf4" or (settings.quantization == "auto" and device != "cpu")
    how = "QLoRA: frozen weights in NF4" if nf4 else "plain LoRA: frozen weights as they are"
    log.info("fine-tuning on %s, %s", device, how)
    return nf4


def _pins(job: Finetune, tokenizer: TaskTokenizer, examples: Sequence[Example]) -> dict[str, Any]:
    """What changes the result."""
    return {
        **asdict(job.settings), "base": str(job.base), "tokenizer": tokenizer.fingerprint,
        "rows": digest_of(examples),
    }  # fmt: skip
