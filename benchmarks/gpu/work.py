"""The work that the parts share: a model, its unseen rows, and runs of the engine.

No module of `tasc_jobs` is imported, as these need a task store.
"""

import dataclasses
import gc
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tasc_draft
from benchmarks.common import ROOT, in_turn, read_json, read_rows, write_json
from benchmarks.engine.steps import SHAPES, Ceiling
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
from tasc_engine.model.loading import Quantization, load_model
from tasc_engine.step.cost import StepCosts, measure
from tasc_text import PromptTemplate, TaskTokenizer

DEMO = ROOT / "pipelines" / "tasc_jobs" / "demo"
BASE, TASK = DEMO / "tasc-demo-7m", "massive_en"
TEMPLATE = "intent and slots: {input}\n"  # as in `tasc_jobs.demo.tasks`
LENGTH, ANSWER = 1024, 128
# The shape of models in a dry run.
TOY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 9000,
                       "num_hidden_layers": 2, "num_attention_heads": 4,
                       "num_key_value_heads": 2}  # fmt: skip
# No run drafts from the answers of another run.
DRAFTED = DraftSettings(recent_tokens=0)
PLAIN = dataclasses.replace(DRAFTED, num_speculative_tokens=0, neighbours=0)
_TRAIN_S, _TRAIN_ROWS, _IGNORED = 60, 128, -100


# The model, the prompts and the index


def prepare(found: Found, here: Here) -> None:
    """Write the prompts and the index of the train rows; train a model if none is given."""
    if here.model is None:
        found.put("trained", trained(here, model_folder(here)))
    test = prompts_of(here, [row["input"] for row in rows("test", here.data)])
    began = time.perf_counter()
    index_of_rows(here)
    found.figure("index", time.perf_counter() - began, "s")
    # Written last: its presence says that nothing has to be prepared.
    write_json(here.work / "prompts.json", {"test": test})


def model_folder(here: Here) -> Path:
    return here.model or here.work / "model"


def rows(split: str, data: Path | None = None) -> list[dict[str, str]]:
    return read_rows(
        data / f"{split}.jsonl.gz" if data else DEMO / "data" / f"{TASK}.{split}.jsonl.gz"
    )


def prompts_of(here: Here, texts: list[str]) -> list[list[int]]:
    """Prompts as the model was trained with."""
    if not here.chat:
        return encoded(TaskTokenizer.from_folder(model_folder(here)), texts)
    chat: Any = AutoTokenizer.from_pretrained(model_folder(here))
    return [
        chat.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


def index_of_rows(here: Here) -> DraftIndex:
    """The index of the train rows; each checkout of this project keeps its own."""
    folder = here.work / f"index-{zlib.crc32(str(tasc_draft.__file__).encode()):x}"
    if not folder.exists():
        train = rows("train", here.data)[: here(10**9, 300)]
        tokenizer = TaskTokenizer.from_folder(model_folder(here))
        prompts = prompts_of(here, [row["input"] for row in train])
        outputs = tokenizer.encode_outputs([row["output"] for row in train])
        write_index(index_of(tokenizer, prompts, outputs), folder)
    return read_index(folder)


def task_index(tokenizer: TaskTokenizer, train: list[dict[str, str]]) -> DraftIndex:
    """The index of rows whose prompts are made by ``TEMPLATE``."""
    prompts = encoded(tokenizer, [row["input"] for row in train])
    return index_of(tokenizer, prompts, tokenizer.encode_outputs([r["output"] for r in train]))


def encoded(tokenizer: TaskTokenizer, texts: list[str]) -> list[list[int]]:
    template = PromptTemplate(TEMPLATE)
    return [tokenizer.encode_prompt(template.render(text)) for text in texts]


def index_of(
    tokenizer: TaskTokenizer, prompts: list[list[int]], outputs: list[list[int]]
) -> DraftIndex:
    facts = tokenizer.index_facts
    return build_learnt_index(Tokens.of(outputs), Tokens.of(prompts), settings=DRAFTED, **facts)


def trained(here: Here, folder: Path) -> dict[str, Any]:
    """Train SmolLM2-135M's shape from random weights on the train rows, for a minute."""
    config = LlamaConfig(**TOY, tie_word_embeddings=True) if here.dry else SHAPES["135m"][1]
    config.bos_token_id, config.eos_token_id = None, 0
    torch.manual_seed(0)
    with torch.device(here.device):
        model: Any = LlamaForCausalLM(config).train()
    for file in BASE.glob("tokenizer*"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer, train = TaskTokenizer.from_folder(folder), rows("train", here.data)
    prompts = encoded(tokenizer, [row["input"] for row in train])
    outputs = tokenizer.encode_outputs([row["output"] for row in train])
    examples = [[*prompt, *output, 0] for prompt, output in zip(prompts, outputs, strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    random, began, steps, share = np.random.default_rng(0), time.monotonic(), 0, 0.0
    while share < 1:
        chosen = random.choice(len(examples), here(_TRAIN_ROWS, 16), replace=False)
        for group in optimizer.param_groups:
            group["lr"] = here(1, 4) * 6e-4 * min(1.0, steps / 20) * (1 - share)
        loss = _loss(model, [examples[i] for i in chosen], here)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        share = steps / 60 if here.dry else (time.monotonic() - began) / _TRAIN_S
    model.to(torch.bfloat16).save_pretrained(folder)
    return {"steps": steps, "seconds": time.monotonic() - began, "loss": loss.item()}


def _loss(model: Any, examples: list[list[int]], here: Here) -> torch.Tensor:
    longest = max(map(len, examples))
    ids = torch.tensor([[*own, *[0] * (longest - len(own))] for own in examples])
    lengths = torch.tensor([[len(own)] for own in examples])
    labels = ids.where(torch.arange(longest) < lengths, torch.tensor(_IGNORED))
    # Many processors compute bfloat16 slowly.
    with torch.autocast(here.device, torch.bfloat16, enabled=not here.dry):
        loss: torch.Tensor = model(ids.to(here.device), labels=labels.to(here.device)).loss
    return loss


# Runs


@dataclass
class Ran:
    """The answers of each row, and the times of the run."""

    answers: list[list[int]]
    seconds: float
    totals: EngineTotals

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


@dataclass
class Work:
    """A target and its prompts.

    Attributes:
        floor: The least seconds of a step, by `ceiling`.
        kinds: What requests ask for besides, in turn.
    """

    target: Target
    tokenizer: TaskTokenizer
    index: DraftIndex
    prompts: list[list[int]]
    floor: float = 0.0
    max_tokens: int = ANSWER
    kinds: Sequence[Mapping[str, Any]] = ({},)

    @classmethod
    def load(
        cls, here: Here, batch: int, dtype: str = "", quantization: Quantization | None = None
    ) -> "Work":
        """The prepared model with so many rows, and the unseen prompts."""
        free(here)
        folder = model_folder(here)
        source = ModelSource(folder, None, dtype or here.dtype, here.device, quantization)
        model = load_model(source)
        floor = ceiling(model, here, batch).step_seconds
        target = Target(model, EngineConfig(rows=batch, max_model_len=LENGTH))
        prompts = read_json(here.work / "prompts.json")["test"]
        tokenizer = TaskTokenizer.from_folder(folder)
        return cls(target, tokenizer, index_of_rows(here), prompts, floor, here(ANSWER, 24))

    def run(self, settings: DraftSettings, prompts: int, costs: StepCosts | None = None) -> Ran:
        """Answer the first prompts; without ``costs``, every step is drafted."""
        config = self.target.config
        proposer = NgramProposer(
            settings,
            rows=config.rows,
            capacity=config.max_model_len,
            vocab_size=self.target.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            index=self.index,
            **self._spare,
        )
        totals = EngineTotals(len(SOURCES), proposer.max_depth)
        engine = Engine(self.target, self.tokenizer, proposer, config, totals.add, costs)
        engine.compile_rules()
        requests = [
            Request(str(i), tuple(prompt), self.max_tokens, **self.kinds[i % len(self.kinds)])
            for i, prompt in enumerate(self.prompts[:prompts])
        ]
        began = time.perf_counter()
        results = list(engine.generate(requests))
        seconds = time.perf_counter() - began
        return Ran([list(r.tokens) for r in sorted(results, key=_number)], seconds, totals)

    def compared(
        self,
        here: Here,
        prompts: int,
        costs: StepCosts | None = None,
        settings: DraftSettings = DRAFTED,
    ) -> dict[str, list[Ran]]:
        """Runs of the first prompts, plain and drafted in turn, after one run of each."""
        kinds = {
            "plain": partial(self.run, PLAIN, prompts),
            "drafted": partial(self.run, settings, prompts, costs),
        }
        in_turn(kinds, 1)
        return in_turn(kinds, here(3, 1))

    @property
    def _spare(self) -> dict[str, int]:
        """As many spare lanes as the service takes, where this checkout's proposer has them."""
        lanes = getattr(NgramProposer, "spare_lanes", None)
        on_device = self.target.device.type != "cpu"
        return {"spare": lanes(self.target.config.rows)} if lanes and on_device else {}

    def costs(self, here: Here) -> StepCosts:
        return measure(self.target, "work", here(8, 1))

    def most(self, ran: Ran) -> float | None:
        """The ceiling of tokens/s: all tokens, in the time in which each step reads its weights."""
        steps = ran.totals.steps * self.floor
        return ran.totals.emitted_tokens / steps if steps else None


def _number(result: Any) -> int:
    return int(result.id)


def free(here: Here) -> None:
    """Give the memory of dropped models back."""
    gc.collect()
    if not here.dry:
        torch.cuda.empty_cache()


def speeds(found: Found, name: str, work: Work, runs: Mapping[str, list[Ran]]) -> None:
    """Record the speeds of `Work.compared`, and how many drafted answers equal the plain ones."""
    plain = runs["plain"][-1].answers
    for kind, own in runs.items():
        last, totals = own[-1], own[-1].totals
        found.figure(
            f"{name} {kind}", [ran.tokens_per_second for ran in own], "tokens/s", work.most(last),
            tokens_per_row_step=totals.block_efficiency, steps=totals.steps,
            drafted=int(totals.drafted.sum()), accepted=int(totals.accepted.sum()),
            same=share_of_equal(last.answers, plain),
        )  # fmt: skip


def share_of_equal(ours: list[list[int]], others: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(ours, others, strict=True)) / len(ours)


# The device


def ceiling(model: Any, here: Here, batch: int) -> Ceiling:
    """The ceiling by the fastest rate at which this device reads, copies or multiplies.

    The rates are those of reading and copying as many bytes as a step reads, and of the LM head's
    own product, which on some devices reads faster than a sum does.
    """
    embedded, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    parameters = list(model.parameters())
    size = sum(p.numel() * p.element_size() for p in parameters)
    weights = sum(p.numel() for p in parameters)
    if embedded is not head:  # a step looks up only a few of these rows
        size -= embedded.numel() * embedded.element_size()
        weights -= embedded.numel()
    device, dtype = here.device, head.dtype
    source = torch.ones(size // 4096 * 1024, dtype=torch.float32, device=device)
    target, one = torch.empty_like(source), torch.ones(8, head.shape[1], dtype=dtype, device=device)
    rates = (
        4 * source.numel() / best(source.sum, device),
        8 * source.numel() / best(lambda: target.copy_(source), device),
        head.numel() * head.element_size() / best(lambda: functional.linear(one, head), device),
    )
    side = here(8192, 128)
    a, b = (torch.randn((side, side), device=device).to(dtype) for _ in range(2))
    return Ceiling(size, weights, max(rates), 2 * side**3 / best(lambda: a @ b, device), batch)


@torch.inference_mode()
def best(work: Callable[[], Any], device: str, repeats: int = 8) -> float:
    """Seconds of one of ten calls that are submitted together; the least of several."""
    took = []
    for _ in range(repeats + 1):
        wait(device)
        began = time.perf_counter()
        for _ in range(10):
            work()
        wait(device)
        took.append((time.perf_counter() - began) / 10)
    return min(took[1:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def kernels(work: Callable[[], Any], here: Here, most: int = 12) -> dict[str, Any]:
    """Run once more under the profiler: the share of time that the GPU works, longest kernels.

    The profiler slows the run, so the share is a lower limit.
    """
    kinds = [ProfilerActivity.CPU] if here.dry else [ProfilerActivity.CUDA]
    with profile(activities=kinds) as seen:
        began = time.perf_counter()
        work()
        wait(here.device)
        wall = time.perf_counter() - began
    events = [(e.key, _seconds(e, here), e.count) for e in seen.key_averages()]
    events.sort(key=lambda event: -event[1])
    longest = [
        {"name": name[:90], "share": s / wall, "count": n} for name, s, n in events[:most] if s
    ]
    return {"busy": sum(s for _, s, _ in events) / wall, "seconds": wall, "longest": longest}


def _seconds(event: Any, here: Here) -> float:
    return 1e-6 * float(event.self_cpu_time_total if here.dry else event.self_device_time_total)
