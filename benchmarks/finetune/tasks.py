"""The tasks of the TASC-ft benchmark, reduced to what a small model can learn on two cores."""

import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import read_rows
from tasc_jobs.statistics.quality import Metrics
from tasc_store import CorpusRow
from tasc_text import PromptTemplate

_ORDER = 1  # seed of the order of rows
_MEASURES: dict[Metrics, tuple[str, ...]] = {
    "massive": ("joint_accuracy", "intent_accuracy", "slot_f1"),
    "tags": ("tag_accuracy",),
    "labels": ("f1", "precision", "recall"),
    "exact": ("exact_match", "token_f1"),
    "text": ("rouge_l", "token_f1"),
}


@dataclass(frozen=True)
class FtTask:
    """The prompt and the measures of a task.

    Attributes:
        rows, epochs: The train rows and epochs of a fine-tune unless a part has its own.
        words: The number of words of an input in the prompt: the first ones, or the last ones if
            negative; None for all.
        max_tokens: The greatest length of an answer.
    """

    name: str
    template: str
    metrics: Metrics
    rows: int
    epochs: float
    words: int | None = None
    max_tokens: int = 96

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of the measures of quality; the main one is first."""
        return _MEASURES[self.metrics]

    @property
    def prompt(self) -> PromptTemplate:
        return PromptTemplate(self.template)

    def read(self, data: Path, split: str) -> list[CorpusRow]:
        """All rows of a split in a fixed random order."""
        found = read_rows(data / self.name / f"{split}.jsonl.gz")
        rows = [CorpusRow(row["id"], self._shortened(row["input"]), row["output"]) for row in found]
        random.Random(_ORDER).shuffle(rows)
        return rows

    def _shortened(self, text: str) -> str:
        if self.words is None:
            return text
        words = text.split()
        return " ".join(words[: self.words] if self.words > 0 else words[self.words :])


TASKS = {
    task.name: task
    for task in (
        FtTask("massive_en", "intent and slots: {input}\n", "massive", 6000, 2),
        FtTask("pos_ewt", "part of speech: {input}\n", "tags", 900, 2),
        FtTask("clinc150", "intent: {input}\n", "exact", 1500, 3),
        FtTask("wikisql", "sql: {input}\n", "text", 3000, 3),
        FtTask("eurlex_labels", "labels: {input}\n", "labels", 1100, 4, words=40),
        FtTask("sgd_calls", "call: {input}\n", "text", 600, 3, words=-40),
    )
}
