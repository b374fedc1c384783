"""Fine-tunes of the benchmark: how one is made, measured and kept in files.

A fine-tune that a folder has already is not made or measured again, so that a benchmark that was
stopped continues. The name of a folder does not contain all settings, so a fine-tune that was made
with other settings is refused.
"""

import hashlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import read_json, to_stderr, use_one_thread, write_json
from benchmarks.demo_model.train import SIZES
from benchmarks.finetune.tasks import TASKS, FtTask
from tasc_engine import ModelSource
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.statistics.distribution import renyi2_bits
from tasc_jobs.task_inputs import GenerationSettings
from tasc_runtime.errors import FileError
from tasc_store import CorpusRow
from tasc_text import PromptTemplate, TaskTokenizer
from tasc_train.enrich.enrichment import RECORD, enrich_and_save
from tasc_train.enrich.ngram_selection import EnrichSettings
from tasc_train.evaluate.evaluation import Evaluation, evaluate
from tasc_train.evaluate.measured_model import Setup
from tasc_train.finetune.checkpoints import REPORT
from tasc_train.finetune.finetuning import Finetune, finetune
from tasc_train.finetune.hyperparameters import FinetuneSettings

PCS = 0.02
HALF_EPOCHS = 3  # of the base of half the size of the shipped model
# For a model of 7 M parameters instead of 500 M: larger and more steps, without dropout.
SETTINGS = FinetuneSettings(learning_rate=3e-3, dropout=0.0, batch_rows=32, quantization="none")
_MEASURED_WITH = "measured_with"


@dataclass(frozen=True)
class FtRun:
    """A fine-tune.

    Attributes:
        base: A name of `benchmarks.demo_model.train.SIZES`.
        n_max: The longest n-gram of new tokens; without effect if the budget is 0.
        budget: The number of new tokens; with 0 the tokenizer is that of the base.
        rows, epochs: The train rows and epochs; None for those of the task.
        rank: The rank of the adapter, and its alpha.
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
    """The folder of fine-tunes, and the data that they are made from.

    Every method raises SystemExit for a file that was made with other settings; see `require_same`.
    """

    data: Path
    work: Path
    test_rows: int
    repeats: int

    @property
    def bases(self) -> Path:
        """The folder of the bases that the benchmark trains."""
        return self.work / f"bases-{HALF_EPOCHS}"

    def base(self, name: str) -> Path:
        return MODEL if name == "demo" else self.bases / SIZES[name].name

    def measured(self, run: FtRun) -> dict[str, Any] | None:
        """An earlier measurement with as many rows and repeats; None if there is none."""
        file = self._measured(run)
        if not file.is_file():
            return None
        found = read_json(file)
        require_same(file, found.get(_MEASURED_WITH, {}), circumstances(run.of.prompt))
        return found

    def is_made(self, run: FtRun) -> bool:
        """Compare the settings and the number of rows; changed rows are not detected."""
        folder = self.work / run.name
        if not (folder / REPORT).is_file():
            return False
        kept = read_json(folder / REPORT)
        data = kept["data"]
        told = kept["settings"] | {"rows": data["rows"] + data.get("too_long", 0)}
        settings = asdict(run.settings) | {"rows": len(self.learnt(run))}
        require_same(folder, told, settings)
        return True

    def learnt(self, run: FtRun) -> list[CorpusRow]:
        return run.of.read(self.data, "train")[: run.rows or run.of.rows]

    def tokenizer(self, run: FtRun) -> Path:
        """The tokenizer of the base, or one with new tokens, which is made once."""
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
                if not folder.is_dir():  # otherwise another process has made it meanwhile
                    raise
        require_same(folder, read_json(folder / RECORD)["settings"], asdict(settings))
        return folder

    def make(self, run: FtRun) -> None:
        """Fine-tune on one thread."""
        torch.set_num_threads(1)
        job = Finetune(
            run.task, self.base(run.base), self.tokenizer(run), self.learnt(run), run.of.prompt,
            run.settings, self.work / run.name,
        )  # fmt: skip
        finetune(job)

    def make_all(self, runs: Sequence[FtRun], processes: int) -> None:
        """Make the fine-tunes that are missing, in this order."""
        missing = [run for run in runs if not self.is_made(run)]
        begun = time.monotonic()
        jobs = {run.name: (self.make, run) for run in missing}
        for done, name in enumerate(in_processes(jobs, processes), 1):
            left = (time.monotonic() - begun) / done * (len(missing) - done)
            to_stderr(f"{done}/{len(missing)} {name}; {left:.0f} s left")

    def measure(self, run: FtRun, *, drafts: bool) -> dict[str, Any]:
        """Answer the test rows plainly and, with ``drafts``, also with drafts from the train rows.

        The entropy of tokens is that of all train rows, which determine the new tokens.
        """
        train = run.of.read(self.data, "train")
        source = ModelSource(self.work / run.name / "model")
        tokenizer = TaskTokenizer.from_folder(source.folder)
        outputs = tokenizer.encode_outputs([row.output for row in train])
        found = evaluate(
            Evaluation(
                source,
                GenerationSettings(run.of.prompt, run.of.max_tokens),
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
        write_json(self._measured(run), found)
        return found

    def measure_all(self, runs: Sequence[FtRun], *, drafts: bool) -> dict[FtRun, dict[str, Any]]:
        """Measure the runs one after the other; earlier measurements are read."""
        found = dict[FtRun, dict[str, Any]]()
        for run in runs:
            known = self.measured(run)
            if known is None or (drafts and "drafted" not in known["sides"]):
                to_stderr(f"measuring {run.name}")
                known = self.measure(run, drafts=drafts)
            found[run] = known
        return found

    def _measured(self, run: FtRun) -> Path:
        return self.work / run.name / f"measured-{self.test_rows}x{self.repeats}.json"


def in_processes(jobs: Mapping[str, tuple[Any, ...]], processes: int) -> Iterator[str]:
    """Run jobs, each a function and its arguments; yields the names of jobs that are done."""
    if processes == 1:
        for name, (do, *given) in jobs.items():
            do(*given)
            yield name
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, use_one_thread) as pool:
        made = {pool.submit(*job): name for name, job in jobs.items()}
        for future in as_completed(made):
            future.result()
            yield made[future]


def require_same(path: Path, kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare the settings of a file or folder with the wanted ones.

    Settings that the file does not have are ignored, because older files have fewer.

    Raises:
        SystemExit: Settings differ.
    """
    differ = [
        f"{name} is {kept[name]!r} there and {value!r} here"
        for name, value in wanted.items()
        if name in kept and kept[name] != value
    ]
    if differ:
        raise SystemExit(
            f"{path} has other settings: {', '.join(differ)}; name another --work, or delete it"
        )


def circumstances(template: PromptTemplate) -> dict[str, str]:
    """The libraries and the prompt, which affect times and quality beside the fine-tune."""
    digest = hashlib.blake2b(template.text.encode(), digest_size=8).hexdigest()
    return {"torch": version("torch"), "transformers": version("transformers"), "template": digest}
