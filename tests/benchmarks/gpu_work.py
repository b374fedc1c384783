"""The shipped task, its model and its index, made once for the stages that use them.

Nothing of `tasc_jobs` is imported: it needs a task store.
"""

import dataclasses
import gzip
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_found import Found, Here
from safetensors.torch import load_file

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
from tasc_engine import Engine, EngineConfig, EngineTotals, GenerationRequest, ModelSource, Target
from tasc_engine.cost import StepCosts
from tasc_engine.loading import load_model
from tasc_engine.stats import StepRecord
from tasc_text import PromptTemplate, TaskTokenizer

DEMO = Path(__file__).resolve().parents[2] / "pipelines" / "tasc_jobs" / "demo"
BASE, TASK = DEMO / "tasc-demo-7m", "massive_en"
TEMPLATE = "intent and slots: {input}\n"  # that of `tasc_jobs.demo.tasks`
ROWS, LENGTH, ANSWER = 8, 1024, 256
# Answers of another run must not be drafted from.
SETTINGS = DraftSettings(recent_tokens=0)
PLAIN = dataclasses.replace(SETTINGS, num_speculative_tokens=0, neighbours=0)


def prepare(found: Found, here: Here) -> None:
    """The model with its adapter merged in float32, and the index of its train split."""
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
    """The model with a LoRA adapter in its weights (Hu et al. 2021, arXiv 2106.09685).

    By hand: another release of peft may not read the settings that this one wrote.
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
    with gzip.open(DEMO / "data" / f"{TASK}.{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def model_folder(here: Here) -> Path:
    return here.folder / "model"


def task_index(tokenizer: TaskTokenizer, train: list[dict[str, str]]) -> DraftIndex:
    template = PromptTemplate(TEMPLATE)
    prompts = [tokenizer.encode_prompt(template.render(r["input"])) for r in train]
    return index_of(tokenizer, prompts, tokenizer.encode_outputs([r["output"] for r in train]))


def index_of(
    tokenizer: TaskTokenizer, prompts: list[list[int]], outputs: list[list[int]]
) -> DraftIndex:
    return build_learnt_index(
        Tokens.of(outputs),
        Tokens.of(prompts),
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        word_starts=tokenizer.word_starts,
        canonical=tokenizer.canonical,
        settings=SETTINGS,
    )


@dataclass
class Ran:
    """Answers by row, and what the run took."""

    answers: list[list[int]]
    seconds: float
    totals: EngineTotals
    records: list[StepRecord]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


@dataclass
class Work:
    """A target and what is asked of it."""

    target: Target
    tokenizer: TaskTokenizer
    index: DraftIndex
    prompts: list[list[int]]
    max_tokens: int = ANSWER

    @classmethod
    def of_demo(cls, here: Here, dtype: str, prompts: int) -> "Work":
        """What `prepare` left."""
        folder = model_folder(here)
        config = EngineConfig(rows=ROWS, max_model_len=LENGTH)
        target = Target.load(ModelSource(folder, dtype=dtype, device=here.device), config)
        tokenizer, template = TaskTokenizer.from_folder(folder), PromptTemplate(TEMPLATE)
        asked = [tokenizer.encode_prompt(template.render(r["input"])) for r in rows("test")]
        return cls(target, tokenizer, read_index(here.folder / "index"), asked[:prompts])

    def run(self, drafted: bool, batch: int, prompts: int, costs: StepCosts | None = None) -> Ran:
        """Answer the first prompts, ``batch`` at a time; without ``costs`` drafts always are."""
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
            GenerationRequest(str(i), tuple(prompt), self.max_tokens)
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
