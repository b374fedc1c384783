"""Targets of the neural benchmark, their answers and their drafters; made once, kept in folders.

It measures nothing.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_neural import KINDS
from ft_runs import FtRun, Workshop
from ft_tasks import TASKS, FtTask
from neural_wide import make_wide

from tasc_engine import ModelSource
from tasc_engine.neural.card import CARD, Kind
from tasc_engine.neural.ranking import Origin, Ranking
from tasc_jobs.demo.tasks import HERE, MODEL
from tasc_jobs.demo.tasks import TASKS as SHIPPED
from tasc_jobs.drafter.answers import Answer, make_answers
from tasc_jobs.drafter.job import DrafterJob, train_drafter
from tasc_jobs.drafter.settings import DrafterSettings
from tasc_jobs.evaluate.subject import Asking, Setup
from tasc_jobs.stages import silent
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer

# The shipped model knows these tasks, two of them by an adapter.
_SHIPPED = {task: HERE / "adapters" / task for task in SHIPPED} | {"clinc150": None}
_ROWS, _EPOCHS = 1100, 3  # that it learns of others
_SMALL = {"layers": 2, "hidden": 128}  # of an independent drafter, for the targets here


@dataclass(frozen=True)
class Case:
    """A target: the shipped model, which knows the task or learnt it, or one of 100,000 tokens.

    Attributes:
        wanted: Kinds of drafters that it is measured with.
    """

    task: str
    wide: bool = False
    wanted: tuple[Kind, ...] = KINDS

    @property
    def name(self) -> str:
        return f"{self.task} (V 100k)" if self.wide else self.task

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of its drafters; with a head of 100,000 rows each takes long to train."""
        return ("eagle",) if self.wide else self.wanted

    @property
    def of(self) -> FtTask:
        return TASKS[self.task]


@dataclass(frozen=True)
class Models:
    """Where they are kept.

    Attributes:
        wide_tokenizer: Of the targets of 100,000 tokens.
        rows, epochs: What a drafter learns.
    """

    data: Path
    work: Path
    wide_tokenizer: Path | None
    rows: int
    epochs: float

    def source(self, case: Case) -> ModelSource:
        """The target, made if it is not there."""
        if not case.wide and case.task in _SHIPPED:
            return ModelSource(MODEL, _SHIPPED[case.task])
        if not case.wide:
            workshop, run = Workshop(self.data, self.work / "targets", 0, 0), _fine_tune(case.task)
            if not workshop.is_made(run):
                workshop.make(run)
            return ModelSource(workshop.work / run.name / "model")
        folder = self.work / "targets" / self._target(case)
        if not folder.is_dir():
            rows = case.of.read(self.data, "train")
            making = folder.with_name(f"{folder.name}.{os.getpid()}")
            make_wide(case.of, rows, self._tokenizer, making)
            making.rename(folder)
        return ModelSource(folder)

    def folder(self, case: Case) -> Path:
        """Of what is a target's alone: its answers, its drafters, and what is found of them."""
        return self.work / f"{self._target(case)}-{self.rows}"

    def asking(self, case: Case) -> Asking:
        return Asking(case.of.prompt, case.of.max_tokens)

    def learnt(self, case: Case) -> list[CorpusRow]:
        """The rows whose answers a drafter learns, and tokens are ranked by."""
        return case.of.read(self.data, "train")[: self.rows]

    def answers(self, case: Case) -> list[Answer]:
        """The target's own to `learnt`."""
        return self._answers(case, self.source(case), "target")

    def drafter(self, case: Case, kind: Kind) -> Path:
        """A drafter's folder; trained on one thread if it is not there."""
        folder = self.folder(case) / f"{kind}-{self.epochs:g}"
        if not (folder / CARD).is_file():
            shape: dict[str, Any] = _SMALL if kind == "independent" else {}
            settings = DrafterSettings(kind, self.epochs, token_weight=1.0, **shape)
            train_drafter(DrafterJob(
                case.name, self.source(case), self.asking(case), Setup(8, 512, 1),
                self.learnt(case), self.answers(case), settings, folder,
            ))  # fmt: skip
        return folder

    def ranking(self, case: Case, origin: Origin) -> Ranking:
        """Tokens of the same rows' answers, by who gave them."""
        tokenizer = TaskTokenizer.from_folder(self.source(case).folder)
        if origin == "raw":
            texts = [row.output for row in self.learnt(case)]
            found: Iterable[Any] = tokenizer.encode_outputs(texts)
            return _ranked(found, tokenizer, origin, ends=True)
        said = self.answers(case) if origin == "target" else self._drafted(case)
        return _ranked((answer.ids or () for answer in said), tokenizer, origin)

    def make(self, case: Case) -> None:
        torch.set_num_threads(1)
        for kind in case.kinds:
            self.drafter(case, kind)

    def _drafted(self, case: Case) -> list[Answer]:
        """What the independent drafter would answer by itself."""
        drafter, folder = self.drafter(case, "independent"), self.folder(case) / "alone"
        if not folder.is_dir():
            making = folder.with_name(f"{folder.name}.{os.getpid()}")
            making.mkdir(parents=True)
            for file in (*drafter.glob("config.json"), *drafter.glob("*.safetensors")):
                shutil.copy(file, making)
            for file in self.source(case).folder.glob("*token*"):
                shutil.copy(file, making)
            making.rename(folder)
        return self._answers(case, ModelSource(folder), "draft")

    def _answers(self, case: Case, source: ModelSource, by: str) -> list[Answer]:
        folder = self.folder(case) / f"answers-{by}"
        folder.mkdir(parents=True, exist_ok=True)
        setup = Setup(8, 512, 1)
        return make_answers(folder, self.learnt(case), source, self.asking(case), setup, silent)

    @property
    def _tokenizer(self) -> Path:
        assert self.wide_tokenizer is not None, "the command line names it"
        return self.wide_tokenizer

    def _target(self, case: Case) -> str:
        if case.wide:
            return f"{self._tokenizer.name}-{case.task}"
        return f"{case.task}-shipped" if case.task in _SHIPPED else _fine_tune(case.task).name


def _fine_tune(task: str) -> FtRun:
    """Of the shipped model without new tokens."""
    return FtRun(task, budget=0, rows=_ROWS, epochs=_EPOCHS)


def _ranked(
    rows: Iterable[Any], tokenizer: TaskTokenizer, origin: Origin, ends: bool = False
) -> Ranking:
    counts, answers = np.zeros(tokenizer.vocab_size, np.int64), 0
    for ids in rows:
        for id_, times in Counter(ids).items():
            counts[id_] += times
        answers += 1
    if ends or not counts[tokenizer.eos_id]:
        counts[tokenizer.eos_id] += answers
    return Ranking.of(
        counts, eos_id=tokenizer.eos_id, fingerprint=tokenizer.fingerprint, origin=origin,
        rows=answers,
    )  # fmt: skip
