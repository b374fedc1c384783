"""Our engine as a side: plain, drafted, and drafted from an index of random outputs.

All settings share one target. Each run has its own proposer, so that no run drafts with what
another run has learnt. The times of steps come from the records of the engine. An index that the
job names comes with rows that are answered once, so a run learns from its own answers then.
"""

import dataclasses
import time
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loop import Job, Other, Ran, Run, no_other, serve

from tasc_draft import (
    SOURCES,
    DraftIndex,
    DraftSettings,
    NgramProposer,
    Tokens,
    build_learnt_index,
    read_index,
)
from tasc_engine import Engine, EngineConfig, EngineTotals, ModelSource, Request, Target
from tasc_engine.step.cost import StepCosts, measure
from tasc_jobs.demo.tasks import TEMPLATES, read_split
from tasc_text import PromptTemplate, TaskTokenizer

# No run drafts from the answers of another run.
SETTINGS = DraftSettings(recent_tokens=0)
PLAIN = dataclasses.replace(SETTINGS, num_speculative_tokens=0, neighbours=0)
LENGTH = 1024
COST_SECONDS = 60.0  # enough for all batch sizes, so that b=1 has its own costs


class Ours:
    """A target and the indexes of a task.

    A setting is a kind and a batch. The kinds are ``plain``; ``drafted``, where the costs of a step
    justify it; ``always``, drafted in every step; ``random``, as ``drafted`` but from an index of
    random outputs.
    """

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.job = job
        self.config = EngineConfig(rows=job.batch, max_model_len=LENGTH)
        kind: Any = job.quantization or None
        source = ModelSource(
            Path(job.folder), dtype="float32" if kind else job.dtype, quantization=kind
        )
        self.target = Target.load(source, self.config)
        self.tokenizer = TaskTokenizer.from_folder(Path(job.folder))
        self.index = cache(self._index)
        self.settings = DraftSettings() if job.index else SETTINGS

    @cached_property
    def costs(self) -> StepCosts:
        return measure(self.target, self.job.task, COST_SECONDS)

    def run(self, setting: str, prompts: Sequence[list[int]]) -> Ran:
        kind, batch = setting.split()
        engine, totals = self.engine(kind, int(batch))
        requests = [Request(str(i), tuple(p), self.job.max_tokens) for i, p in enumerate(prompts)]
        began = time.perf_counter()
        results = list(engine.generate(requests))
        seconds = time.perf_counter() - began
        ordered = sorted(results, key=lambda r: int(r.id))
        return Ran(
            [list(r.tokens) for r in ordered],
            seconds,
            [r.timings.total - r.timings.queued for r in ordered],
            [r.timings.first_token - r.timings.queued for r in ordered],
            totals.steps,
            totals.row_steps,
            int(totals.accepted.sum()),
            totals.draft_seconds,
            totals.verify_seconds,
        )

    def engine(self, kind: str, batch: int) -> tuple[Engine, EngineTotals]:
        config = dataclasses.replace(self.config, rows=batch)
        proposer = NgramProposer(
            PLAIN if kind == "plain" else self.settings,
            rows=batch,
            capacity=LENGTH,
            vocab_size=self.target.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            index=self.index(kind == "random"),
        )
        totals = EngineTotals(len(SOURCES), proposer.max_depth)
        costs = self.costs if kind in ("drafted", "random") else None
        return Engine(self.target, self.tokenizer, proposer, config, totals.add, costs), totals

    def _index(self, random: bool) -> DraftIndex:
        """The index of the train split; with ``random``, of random ids of the same lengths."""
        if self.job.index:
            return read_index(Path(self.job.index) / "index.tasc")
        rows, template = (
            read_split(self.job.task, "train"),
            PromptTemplate(TEMPLATES[self.job.task]),
        )
        outputs = Tokens.of(self.tokenizer.encode_outputs([r["output"] for r in rows]))
        if random:
            ids = np.random.default_rng(0).integers(
                0, self.tokenizer.vocab_size, len(outputs.ids), np.int32
            )
            outputs = dataclasses.replace(outputs, ids=ids)
        inputs = (template.render(r["input"]) for r in rows)
        return build_learnt_index(
            outputs,
            Tokens.of([self.tokenizer.encode_prompt(text) for text in inputs]),
            **self.tokenizer.index_facts,
            settings=SETTINGS,
        )


def load(job: Job) -> tuple[Run, Other]:
    return Ours(job).run, no_other


if __name__ == "__main__":
    serve(load)
