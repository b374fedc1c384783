"""One fine-tune of the benchmark: what it is, how it is made, how it is measured; kept in files.

A run that a folder has already is not made or measured again, so a benchmark that was stopped goes
on; one that was made otherwise is refused, since a folder's name does not say all. It prints
nothing.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ft_kept import circumstances, read, require_same, write_whole
from ft_tasks import TASKS, FtTask

from tasc_engine import ModelSource
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.demo.train import SIZES
from tasc_jobs.enrich.algorithm import EnrichSettings
from tasc_jobs.enrich.job import enrich_and_save
from tasc_jobs.enrich.saving import RECORD
from tasc_jobs.errors import FileError
from tasc_jobs.evaluate.job import Evaluation, evaluate
from tasc_jobs.evaluate.subject import Asking, Setup
from tasc_jobs.finetune.finished import REPORT
from tasc_jobs.finetune.job import Finetune, finetune
from tasc_jobs.finetune.settings import FinetuneSettings
from tasc_jobs.statistics.distribution import renyi2_bits
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer

PCS = 0.02
HALF_EPOCHS = 3  # of the base of half the shipped one's size
# A model of 7 M parameters is not one of 500 M: more steps, each longer, and nothing dropped.
SETTINGS = FinetuneSettings(learning_rate=3e-3, dropout=0.0, batch_rows=32, quantization="none")
_MEASURED_WITH = "measured_with"


@dataclass(frozen=True)
class FtRun:
    """A fine-tune.

    Attributes:
        base: A name of `tasc_jobs.demo.train.SIZES`.
        budget: Of new tokens; 0 keeps the tokenizer.
        n_max: Of n-grams; says nothing where the budget is 0.
        rows, epochs: What is learnt; the task's own if None.
        rank: Of the adapter, and its alpha.
    """

    task: str
    base: str = "demo"
    n_max: int = 4
    budget: int = 500
    seed: int = 0
    rows: int | None = None
    epochs: float | None = None
    rank: int = SETTINGS.rank

    @property
    def of(self) -> FtTask:
        return TASKS[self.task]

    @property
    def name(self) -> str:
        n_max = self.n_max if self.budget else 0
        rows, epochs = self.rows or self.of.rows, self.epochs or self.of.epochs
        rank = f"-r{self.rank}" if self.rank != SETTINGS.rank else ""
        return f"{self.task}-{self.base}-{n_max}-{self.budget}-{rows}x{epochs:g}{rank}-{self.seed}"

    @property
    def settings(self) -> FinetuneSettings:
        epochs = self.epochs or self.of.epochs
        return replace(SETTINGS, epochs=epochs, seed=self.seed, rank=self.rank, alpha=self.rank)


@dataclass(frozen=True)
class Workshop:
    """Where runs are made and kept.

    Every method raises SystemExit where what is kept was made otherwise; see `require_same`.
    """

    data: Path
    work: Path
    test_rows: int
    repeats: int

    @property
    def bases(self) -> Path:
        """Of those that are made here."""
        return self.work / f"bases-{HALF_EPOCHS}"

    def base(self, name: str) -> Path:
        return MODEL if name == "demo" else self.bases / SIZES[name].name

    def measured(self, run: FtRun) -> dict[str, Any] | None:
        """What was found of as many rows and repeats before."""
        file = self._measured(run)
        if not file.is_file():
            return None
        found = read(file)
        require_same(file, found.get(_MEASURED_WITH, {}), circumstances(run.of.prompt))
        return found

    def is_made(self, run: FtRun) -> bool:
        """Settings and number of rows are compared; a file of rows that changed is not seen."""
        folder = self.work / run.name
        if not (folder / REPORT).is_file():
            return False
        kept = read(folder / REPORT)
        data = kept["data"]
        told = kept["settings"] | {"rows": data["rows"] + data.get("too_long", 0)}
        asked = asdict(run.settings) | {"rows": len(self.learnt(run))}
        require_same(folder, told, asked)
        return True

    def learnt(self, run: FtRun) -> list[CorpusRow]:
        return run.of.read(self.data, "train")[: run.rows or run.of.rows]

    def tokenizer(self, run: FtRun) -> Path:
        """The base's own, or an enriched one, made once."""
        base = self.base(run.base)
        if not run.budget:
            return base
        folder = self.work / "tokenizers" / f"{run.task}-{run.base}-{run.n_max}-{run.budget}"
        settings = EnrichSettings(run.budget, run.n_max, PCS)
        if not folder.is_dir():
            outputs = [row.output for row in run.of.read(self.data, "train")]
            try:
                enrich_and_save(TaskTokenizer.from_folder(base), outputs, settings, folder)
            except FileError:
                if not folder.is_dir():  # else another process was faster
                    raise
        require_same(folder, read(folder / RECORD)["settings"], asdict(settings))
        return folder

    def make(self, run: FtRun) -> None:
        """Fine-tune, on one thread."""
        torch.set_num_threads(1)
        job = Finetune(
            run.task, self.base(run.base), self.tokenizer(run), self.learnt(run), run.of.prompt,
            run.settings, self.work / run.name,
        )  # fmt: skip
        finetune(job)

    def measure(self, run: FtRun, *, drafts: bool) -> dict[str, Any]:
        """Answers of test rows, plain and, if wanted, with drafts from the rows that were learnt.

        The tokens' entropy is that of all train rows, by which new tokens were chosen.
        """
        train = run.of.read(self.data, "train")
        source = ModelSource(self.work / run.name / "model")
        tokenizer = TaskTokenizer.from_folder(source.folder)
        outputs = tokenizer.encode_outputs([row.output for row in train])
        found = evaluate(
            Evaluation(
                source,
                Asking(run.of.prompt, run.of.max_tokens),
                Setup(8, 512, 1),
                run.of.metrics,
                run.of.read(self.data, "test")[: self.test_rows],
                train[: run.rows or run.of.rows],
                self.repeats,
                drafts,
                f"{run.task}, {run.base}, n_max {run.n_max}",
            )
        ).as_json
        counts = Counter(id_ for ids in outputs for id_ in ids)
        found["renyi2_bits"] = renyi2_bits(list(counts.values()))
        found[_MEASURED_WITH] = circumstances(run.of.prompt)
        write_whole(self._measured(run), found)
        return found

    def _measured(self, run: FtRun) -> Path:
        return self.work / run.name / f"measured-{self.test_rows}x{self.repeats}.json"
