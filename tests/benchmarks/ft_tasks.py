"""The tasks that TASC-ft is measured on, cut to what a small model on two cores can learn.

It reads rows and tells how they are asked and judged; it trains nothing.
"""

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path

from tasc_jobs.evaluate.quality import Metrics
from tasc_store import CorpusRow
from tasc_text import PromptTemplate

_ORDER = 1  # seed of the order that rows are taken in
_MEASURES: dict[Metrics, tuple[str, ...]] = {
    "massive": ("joint_accuracy", "intent_accuracy", "slot_f1"),
    "tags": ("tag_accuracy",),
    "labels": ("f1", "precision", "recall"),
    "exact": ("exact_match", "token_f1"),
    "text": ("rouge_l", "token_f1"),
}


@dataclass(frozen=True)
class FtTask:
    """How a task is asked and judged.

    Attributes:
        words: Of an input, this many are asked: the first ones, or the last if negative; None: all.
        rows, epochs: That a fine-tune learns unless a part says otherwise.
        max_tokens: Of an answer.
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
        """Of its answers' quality, by name; the one it is judged by first."""
        return _MEASURES[self.metrics]

    @property
    def prompt(self) -> PromptTemplate:
        return PromptTemplate(self.template)

    def read(self, data: Path, split: str) -> list[CorpusRow]:
        """All rows, in an order that has nothing to do with the file's."""
        with gzip.open(data / self.name / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            found = [json.loads(line) for line in lines]
        rows = [CorpusRow(row["id"], self._asked(row["input"]), row["output"]) for row in found]
        random.Random(_ORDER).shuffle(rows)
        return rows

    def _asked(self, text: str) -> str:
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
