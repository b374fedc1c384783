"""A tiny model, an enriched tokenizer and rows, to fine-tune in less than a second."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tiny
from tasc_runtime.progress import StageProgress
from tasc_store import CorpusRow
from tasc_text import PromptTemplate, TaskTokenizer
from tasc_train.enrich.enrichment import enrich_and_save
from tasc_train.enrich.ngram_selection import EnrichSettings
from tasc_train.finetune.finetuning import Finetune, finetune
from tasc_train.finetune.hyperparameters import FinetuneSettings
from tasc_train.finetune.model import Parts, vocabulary_of

SETTINGS = FinetuneSettings(epochs=3, batch_rows=8, micro_rows=3, learning_rate=2e-3)
OUTPUTS = [f"intent: {a}_{b}" for a in ("play", "set") for b in ("music", "alarm")] * 5
ADAPTER = "adapter/adapter_model.safetensors"


@dataclass(frozen=True)
class Bench:
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


@dataclass(frozen=True)
class Made:
    """The output of a fine-tune, and its report."""

    bench: Bench
    output: Path
    found: dict[str, Any]


def make(folder: Path, architecture: str, *, tied: bool = False) -> Bench:
    tiny.make_tokenizer(folder / architecture)
    return make_on(folder / architecture, architecture, tied=tied)


def make_on(base: Path, architecture: str, *, tied: bool = False) -> Bench:
    tokenizer = base.with_name(f"{base.name}-enriched")
    tiny.make_model(base, architecture, dtype=torch.float32, tied=tied)
    enrich_and_save(TaskTokenizer.from_folder(base), OUTPUTS, EnrichSettings(6), tokenizer)
    rows = tuple(CorpusRow(str(i), f"{o[8:]} {i % 4}", o) for i, o in enumerate(OUTPUTS))
    return Bench(base, tokenizer, rows)


def made_by(bench: Bench, output: Path) -> Made:
    return Made(bench, output, finetune(bench.job(output)))


class Killed(BaseException):
    """Simulates the end of the process."""


def killed_at(stage: str, done: int) -> StageProgress:
    def progress(name: str, so_far: int, total: int | None) -> None:
        if (name, so_far) == (stage, done):
            raise Killed

    return progress


def begin(job: Finetune, step: int) -> None:
    """Starts a run that is killed after a step and has a checkpoint of the step before."""
    with contextlib.suppress(Killed):
        finetune(replace(job, checkpoint_s=0.0), killed_at("train", step))


def same(one: Path, other: Path) -> bool:
    """Whether two files have the same tensors."""
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(first[k].equal(second[k]) for k in first)
