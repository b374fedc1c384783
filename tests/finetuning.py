"""A tiny model, an enriched tokenizer and rows, to fine-tune in less than a second."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tiny
from tasc_jobs.enrich.algorithm import EnrichSettings
from tasc_jobs.enrich.job import enrich_and_save
from tasc_jobs.finetune.job import Finetune
from tasc_jobs.finetune.settings import FinetuneSettings
from tasc_jobs.finetune.vocabulary import Parts, vocabulary_of
from tasc_store import CorpusRow
from tasc_text import PromptTemplate, TaskTokenizer

SETTINGS = FinetuneSettings(epochs=3, batch_rows=8, micro_rows=3, learning_rate=2e-3)
OUTPUTS = [f"intent: {a}_{b}" for a in ("play", "set") for b in ("music", "alarm")] * 5


@dataclass(frozen=True)
class Bench:
    """What fine-tunes of a test share."""

    base: Path
    tokenizer: Path
    rows: tuple[CorpusRow, ...]

    @property
    def parts(self) -> Parts:
        return vocabulary_of(self.base, self.tokenizer).parts

    def job(self, output: Path, **changes: Any) -> Finetune:
        settings = replace(SETTINGS, **changes)
        template = PromptTemplate("{input} ->")
        return Finetune("intents", self.base, self.tokenizer, self.rows, template, settings, output)


def make(folder: Path, architecture: str, *, tied: bool = False) -> Bench:
    tiny.make_tokenizer(folder / architecture)
    return make_on(folder / architecture, architecture, tied=tied)


def make_on(base: Path, architecture: str, *, tied: bool = False) -> Bench:
    """On a folder that has a tokenizer."""
    tokenizer = base.with_name(f"{base.name}-enriched")
    tiny.make_model(base, architecture, dtype=torch.float32, tied=tied)
    enrich_and_save(TaskTokenizer.from_folder(base), OUTPUTS, EnrichSettings(6), tokenizer)
    rows = tuple(CorpusRow(str(i), f"{o[8:]} {i % 4}", o) for i, o in enumerate(OUTPUTS))
    return Bench(base, tokenizer, rows)
