"""A tiny target and rows with answers that a drafter learns in a second or two."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tiny
from tasc_engine import ModelSource
from tasc_engine.drafting.neural.card import Kind
from tasc_jobs.task_inputs import GenerationSettings
from tasc_store import CorpusRow
from tasc_text import PromptTemplate
from tasc_train.drafter.hyperparameters import DrafterSettings
from tasc_train.drafter.training_run import DrafterJob, train_drafter
from tasc_train.evaluate.measured_model import Setup

INPUTS = ("wake me", "set an alarm", "play music", "two hours")
GENERATION = GenerationSettings(PromptTemplate("{input} ->"), max_tokens=16)
ROWS = tuple(CorpusRow(str(i), INPUTS[i % len(INPUTS)], "intent: play") for i in range(40))
LEARNS: dict[str, dict[str, Any]] = {
    "eagle": {"epochs": 40, "learning_rate": 3e-3, "token_weight": 1.0},
    "independent": {"epochs": 50, "learning_rate": 5e-3, "hidden": 32, "layers": 2},
}
SHORT = {"epochs": 2}


@dataclass(frozen=True)
class Bench:
    target: Path

    def job(self, output: Path, kind: Kind, **changes: Any) -> DrafterJob:
        settings = DrafterSettings(kind, **{"batch_rows": 8, **LEARNS[kind], **changes})
        source = ModelSource(self.target)
        return DrafterJob("calls", source, GENERATION, Setup(4, 64), ROWS, None, settings, output)


def make(folder: Path, architecture: str, **differs: Any) -> Bench:
    return Bench(tiny.make_folder(folder, architecture, dtype=torch.float32, **differs))


@dataclass(frozen=True)
class Trained:
    """A target with a drafter, and the report and messages of the training."""

    bench: Bench
    kind: Kind
    folder: Path
    found: dict[str, Any]
    messages: list[str]


def trained_by(bench: Bench, kind: Kind, output: Path, **changes: Any) -> Trained:
    messages: list[str] = []
    found = train_drafter(bench.job(output, kind, **changes), notify=messages.append)
    return Trained(bench, kind, output, found, messages)
