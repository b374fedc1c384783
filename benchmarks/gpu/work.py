"""The stages that prepare the shipped task and time drafted answers to it against plain ones.

The second one also projects the effect of the same drafts on the 0.5B shape, from the measured
steps of that shape and from the tokens that the demo model accepted with drafts by those costs. No
module of `tasc_jobs` is imported, as these need a task store.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.common import ROOT, facts_of, read_rows
from benchmarks.gpu.gpu import Found, Here
from tasc_draft import (
    SOURCES,
    DraftIndex,
    DraftSettings,
    NgramProposer,
    Tokens,
    build_learnt_index,
    read_index,
    write_index,
)
from tasc_engine import Engine, EngineConfig, EngineTotals, ModelSource, Request, Target
from tasc_engine.model.loading import load_model
from tasc_engine.stats import StepRecord
from tasc_engine.step.cost import StepCosts, measure
from tasc_text import PromptTemplate, TaskTokenizer

DEMO = ROOT / "pipelines" / "tasc_jobs" / "demo"
BASE, TASK = DEMO / "tasc-demo-7m", "massive_en"
TEMPLATE = "intent and slots: {input}\n"  # as in `tasc_jobs.demo.tasks`
ROWS, LENGTH, ANSWER = 8, 1024, 256
BATCHES = (1, ROWS)
# No run drafts from the answers of another run.
SETTINGS = DraftSettings(recent_tokens=0)
PLAIN = dataclasses.replace(SETTINGS, num_speculative_tokens=0, neighbours=0)


def prepare(found: Found, here: Here) -> None:
    """Write the model with its adapter merged in float32, and the index of its train split."""
    folder = model_folder(here)
    merged(load_model(ModelSource(BASE)), DEMO / "adapters" / TASK).save_pretrained(folder)
    for file in BASE.glob("tokenizer*"):
        shutil.copy(file, folder)
    began = time.perf_counter()
    index = task_index(TaskTokenizer.from_folder(folder), rows("train")[: here(10**9, 300)])
    write_index(index, here.folder / "index")
    found.put("index_seconds", round(time.perf_counter() - began, 2))


@torch.no_grad()
def merged(model: Any, adapter: Path) -> Any:
    """Add a LoRA adapter to the weights of a model (Hu et al. 2021, arXiv 2106.09685).

    peft is not used, as another release of it may not read the settings of the adapter.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, down in parts.items():
        if name.endswith(".lora_A.weight"):
            up = parts[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scale = settings["lora_alpha"] / settings["r"]
            model.get_submodule(layer).weight += scale * (up.float() @ down.float())
    return model


def rows(split: str) -> list[dict[str, str]]:
    return read_rows(DEMO / "data" / f"{TASK}.{split}.jsonl.gz")


def model_folder(here: Here) -> Path:
    return here.folder / "model"


def task_index(tokenizer: TaskTokenizer, train: list[dict[str, str]]) -> DraftIndex:
    template = PromptTemplate(TEMPLATE)
    prompts = [tokenizer.encode_prompt(template.render(r["input"])) for r in train]
    return index_of(tokenizer, prompts, tokenizer.encode_outputs([r["output"] for r in train]))


def index_of(
    tokenizer: TaskTokenizer, prompts: list[list[int]], outputs: list[list[int]]
) -> DraftIndex:
    facts = facts_of(tokenizer)
    return build_learnt_index(Tokens.of(outputs), Tokens.of(prompts), settings=SETTINGS, **facts)


@dataclass
class Ran:
    """The answers of each row, and the times of the run."""

    answers: list[list[int]]
    seconds: float
    totals: EngineTotals
    records: list[StepRecord]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


@dataclass
class Work:
    """A target and its prompts.

    Attributes:
        kinds: What requests ask for besides, in turn.
    """

    target: Target
    tokenizer: TaskTokenizer
    index: DraftIndex
    prompts: list[list[int]]
    max_tokens: int = ANSWER
    kinds: Sequence[Mapping[str, Any]] = ({},)

    @classmethod
    def of_demo(cls, here: Here, dtype: str, prompts: int, merged: bool = True) -> "Work":
        """The work that `prepare` has written; or every other row uses an adapter of the base."""
        folder = model_folder(here)
        config = EngineConfig(rows=ROWS, max_model_len=LENGTH)
        source = ModelSource(folder, dtype=dtype, device=here.device)
        if not merged:
            adapters = ((TASK, DEMO / "adapters" / TASK),)
            source = dataclasses.replace(source, folder=BASE, adapters=adapters)
        target = Target.load(source, config)
        tokenizer, template = TaskTokenizer.from_folder(folder), PromptTemplate(TEMPLATE)
        encoded = [tokenizer.encode_prompt(template.render(r["input"])) for r in rows("test")]
        kinds = ({},) if merged else ({"adapter": TASK}, {})
        index = read_index(here.folder / "index")
        return cls(target, tokenizer, index, encoded[:prompts], kinds=kinds)

    def run(self, drafted: bool, batch: int, prompts: int, costs: StepCosts | None = None) -> Ran:
        """Answer the first prompts, ``batch`` together; without ``costs`` every step is drafted."""
        proposer = NgramProposer(
            SETTINGS if drafted else PLAIN,
            rows=batch,
            capacity=self.target.config.max_model_len,
            vocab_size=self.target.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            index=self.index,
        )
        totals, records = EngineTotals(len(SOURCES), proposer.max_depth), list[StepRecord]()

        def on_step(record: StepRecord) -> None:
            totals.add(record)
            records.append(record)

        config = dataclasses.replace(self.target.config, rows=batch)
        engine = Engine(self.target, self.tokenizer, proposer, config, on_step, costs)
        requests = [
            Request(str(i), tuple(prompt), self.max_tokens, **self.kinds[i % len(self.kinds)])
            for i, prompt in enumerate(self.prompts[:prompts])
        ]
        began = time.perf_counter()
        results = list(engine.generate(requests))
        seconds = time.perf_counter() - began
        ordered = sorted(results, key=lambda r: int(r.id))
        return Ran([list(r.tokens) for r in ordered], seconds, totals, records)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# Speed


def speed(found: Found, here: Here) -> None:
    """Time drafted and plain answers to the shipped task."""
    work = Work.of_demo(here, here.dtype, here(384, 9))
    costs = measure(work.target, "demo", here(20, 1))
    found.put("costs", costs.as_json())
    rates: dict[str, dict[str, Any]] = {}
    for batch in BATCHES:
        rates[str(batch)] = repeated(work, batch, costs, here)
        found.put("runs", rates)
        found.put("drafted_over_plain", {b: over(r, "drafted") for b, r in rates.items()})
        found.put("always_over_plain", {b: over(r, "always") for b, r in rates.items()})
    larger = costs_of_steps(here)
    if larger is not None:
        rows = here(128, 3)
        found.put("projected_0.5b_drafted_over_plain", {
            str(batch): projected(work, batch, rows, larger) for batch in BATCHES
        })  # fmt: skip


def over(runs: dict[str, Any], kind: str) -> float:
    return float(runs[kind]["tokens_per_second"] / runs["plain"]["tokens_per_second"])


def repeated(work: Work, batch: int, costs: StepCosts, here: Here) -> dict[str, Any]:
    """Run each kind in turn, several rounds after one that warms up; medians."""
    rows = here(48 * batch, batch + 1)
    kinds: dict[str, tuple[bool, StepCosts | None]] = {
        "plain": (False, None), "drafted": (True, costs), "always": (True, None)
    }  # fmt: skip
    ran: dict[str, list[Ran]] = {kind: [] for kind in kinds}
    for _ in range(here(4, 2)):
        for kind, (drafted, spent_by) in kinds.items():
            ran[kind].append(work.run(drafted, batch, rows, spent_by))
    return {kind: summed(runs[1:]) for kind, runs in ran.items()}


def summed(runs: list[Ran]) -> dict[str, Any]:
    last, seconds = runs[-1].totals, median(r.seconds for r in runs)
    drafting = median(r.totals.draft_seconds for r in runs)
    verifying = median(r.totals.verify_seconds for r in runs)
    return {
        "tokens_per_second": median(r.tokens_per_second for r in runs),
        "spread": [r.tokens_per_second for r in runs],
        "steps": last.steps,
        "tokens_a_row_step": last.block_efficiency,
        "drafted": int(last.drafted.sum()),
        "accepted": int(last.accepted.sum()),
        "draft_share": drafting / seconds,
        "verify_share": verifying / seconds,
        "rest_share": 1 - (drafting + verifying) / seconds,
        "step_us": 1e6 * seconds / last.steps,
    }


def costs_of_steps(here: Here) -> StepCosts | None:
    """The costs of the 0.5B shape; None if the stage `steps` has not measured them."""
    found = Found.read(here, "steps")
    return StepCosts.from_json(found["costs"]) if "costs" in found else None


def projected(work: Work, batch: int, rows: int, costs: StepCosts) -> float:
    """Plain over drafted seconds of the same answers if each step had these costs."""
    return taken(work.run(False, batch, rows), costs) / taken(
        work.run(True, batch, rows, costs), costs
    )


def taken(ran: Ran, costs: StepCosts) -> float:
    seconds = 0.0
    for record in ran.records:
        rows = max(record.row_steps, 1)
        tokens = record.row_steps + int(record.drafted.sum()) + record.prompt_tokens
        context = record.cached_tokens / rows
        step = costs.seconds(rows, np.array([tokens], np.float64), context)
        seconds += float(step[0]) + record.draft_seconds
    return seconds
