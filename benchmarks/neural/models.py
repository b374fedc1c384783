"""Targets of the neural benchmark, their answers and their drafters; made once, kept in folders."""

import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.draft.tasks import open_tokenizer
from benchmarks.finetune.runs import FtRun, Workshop
from benchmarks.finetune.tasks import TASKS, FtTask
from tasc_engine import ModelSource
from tasc_engine.drafting.neural.card import CARD, Kind
from tasc_engine.drafting.neural.ranking import Origin, Ranking
from tasc_jobs.demo.tasks import ADAPTERS, MODEL
from tasc_jobs.demo.tasks import TASKS as SHIPPED
from tasc_jobs.task_inputs import GenerationSettings
from tasc_runtime.progress import silent
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer
from tasc_train.drafter.answers import TargetAnswer, make_answers
from tasc_train.drafter.hyperparameters import DrafterSettings
from tasc_train.drafter.training_run import DrafterJob, train_drafter
from tasc_train.evaluate.measured_model import Setup
from tasc_train.finetune.examples import Example, packed

# Tasks that the shipped model knows, and its adapters for them.
_SHIPPED = {task: ADAPTERS / task for task in SHIPPED} | {"clinc150": None}
_ROWS, _EPOCHS = 1100, 3  # of the fine-tunes for other tasks
_SMALL = {"layers": 2, "hidden": 128}  # the shape of an independent drafter for these targets

KINDS: tuple[Kind, ...] = get_args(Kind)
# The shape and the training of a wide target.
HIDDEN, LAYERS, HEADS = 128, 4, 4
_BATCH, _WIDE_EPOCHS, _RATE, _WARM_UP = 32, 3, 2e-3, 50
_OTHERS = 1024  # tokens of a step that do not occur in the rows
_PROMPT_WEIGHT = 0.1


@dataclass(frozen=True)
class Case:
    """A target: the shipped model, a fine-tune of it, or a wide model of 100,000 tokens.

    Attributes:
        wanted: The kinds of drafters that are measured.
    """

    task: str
    wide: bool = False
    wanted: tuple[Kind, ...] = KINDS

    @property
    def name(self) -> str:
        return f"{self.task} (V 100k)" if self.wide else self.task

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of its drafters; only one for a wide target, as they take long to train."""
        return ("eagle",) if self.wide else self.wanted

    @property
    def of(self) -> FtTask:
        return TASKS[self.task]


@dataclass(frozen=True)
class Models:
    """The folder of all models, and the data that they are made from.

    Attributes:
        wide_tokenizer: The tokenizer of wide targets.
        rows, epochs: The answers that a drafter learns, and how often.
    """

    data: Path
    work: Path
    wide_tokenizer: Path | None
    rows: int
    epochs: float

    def source(self, case: Case) -> ModelSource:
        """The target; it is made if it does not exist."""
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
        """The folder of a target's answers, drafters and measurements."""
        return self.work / f"{self._target(case)}-{self.rows}"

    def generation(self, case: Case) -> GenerationSettings:
        return GenerationSettings(case.of.prompt, case.of.max_tokens)

    def learnt(self, case: Case) -> list[CorpusRow]:
        """The rows whose answers a drafter learns and tokens are ranked by."""
        return case.of.read(self.data, "train")[: self.rows]

    def answers(self, case: Case) -> list[TargetAnswer]:
        """The answers of the target to `learnt`."""
        return self._answers(case, self.source(case), "target")

    def drafter(self, case: Case, kind: Kind) -> Path:
        """The folder of a drafter; it is trained if it does not exist."""
        folder = self.folder(case) / f"{kind}-{self.epochs:g}"
        if not (folder / CARD).is_file():
            shape: dict[str, Any] = _SMALL if kind == "independent" else {}
            settings = DrafterSettings(kind, self.epochs, token_weight=1.0, **shape)
            train_drafter(DrafterJob(
                case.name, self.source(case), self.generation(case), Setup(8, 512, 1),
                self.learnt(case), self.answers(case), settings, folder,
            ))  # fmt: skip
        return folder

    def ranking(self, case: Case, origin: Origin) -> Ranking:
        """Tokens ranked by the answers to the same rows: of the data, the target or the drafter."""
        tokenizer = TaskTokenizer.from_folder(self.source(case).folder)
        if origin == "raw":
            texts = [row.output for row in self.learnt(case)]
            found: Iterable[Any] = tokenizer.encode_outputs(texts)
            return _ranked(found, tokenizer, origin, ends=True)
        said = self.answers(case) if origin == "target" else self._drafted(case)
        return _ranked((answer.ids or () for answer in said), tokenizer, origin)

    def make(self, case: Case) -> None:
        """Make the target and its drafters on one thread."""
        torch.set_num_threads(1)
        for kind in case.kinds:
            self.drafter(case, kind)

    def _drafted(self, case: Case) -> list[TargetAnswer]:
        """The answers of the independent drafter alone."""
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

    def _answers(self, case: Case, source: ModelSource, by: str) -> list[TargetAnswer]:
        folder = self.folder(case) / f"answers-{by}"
        folder.mkdir(parents=True, exist_ok=True)
        setup = Setup(8, 512, 1)
        return make_answers(folder, self.learnt(case), source, self.generation(case), setup, silent)

    @property
    def _tokenizer(self) -> Path:
        assert self.wide_tokenizer is not None, "the command line names it"
        return self.wide_tokenizer

    def _target(self, case: Case) -> str:
        if case.wide:
            return f"{self._tokenizer.name}-{case.task}"
        return f"{case.task}-shipped" if case.task in _SHIPPED else _fine_tune(case.task).name


def _fine_tune(task: str) -> FtRun:
    """A fine-tune of the shipped model without new tokens."""
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


# Wide targets


@dataclass(frozen=True)
class _Columns:
    """The tokens whose logits are computed in training."""

    seen: Tensor
    place: Tensor  # the place of each token among the seen ones
    unseen: Tensor

    @classmethod
    def of(cls, examples: Sequence[Example], vocab_size: int) -> "_Columns":
        is_seen = torch.zeros(vocab_size, dtype=torch.bool)
        for example in examples:
            is_seen[list(example.ids)] = True
        seen, unseen = is_seen.nonzero()[:, 0], (~is_seen).nonzero()[:, 0]
        place = torch.zeros(vocab_size, dtype=torch.long)
        place[seen] = torch.arange(len(seen))
        return cls(seen, place, unseen)

    def loss(self, model: LlamaForCausalLM, hidden: Tensor, ids: Tensor) -> Tensor:
        """``float32[n]``: the loss of each place, whose token should be that of ``ids``."""
        others = self.unseen[torch.randint(len(self.unseen), (_OTHERS,))]
        weight = model.lm_head.weight[torch.cat((self.seen, others))]
        logits = hidden @ weight.T
        # Each of the others represents as many tokens.
        share = math.log(len(self.unseen) / _OTHERS)
        logits = torch.cat((logits[:, : len(self.seen)], logits[:, len(self.seen) :] + share), 1)
        return torch.nn.functional.cross_entropy(logits, self.place[ids], reduction="none")


def make_wide(task: FtTask, rows: Sequence[CorpusRow], tokenizer: Path, folder: Path) -> None:
    """Train a target of 100,000 tokens whose head dominates, and write it with its tokenizer.

    It is trained from scratch on the rows of one task by sampled softmax (Jean et al. 2015, arXiv
    1412.2007): of the tokens of the task and, in each step, a sample of all others.
    """
    torch.manual_seed(0)
    tokens = open_tokenizer(tokenizer)
    examples = _examples(task, rows, tokens)
    model = _wide(tokens)
    columns = _Columns.of(examples, model.config.vocab_size)
    epoch = max(1, len(examples) // _BATCH)
    steps = epoch * _WIDE_EPOCHS
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), fused=True)
    order, rng = list(range(len(examples))), random.Random(0)
    for step in range(steps):
        if (at := step % epoch * _BATCH) == 0:
            rng.shuffle(order)
        rate = _RATE * min((step + 1) / _WARM_UP, 1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, weights = packed([examples[i] for i in order[at : at + _BATCH]], _PROMPT_WEIGHT)
        chosen = weights > 0
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[chosen]
        each = columns.loss(model, hidden, ids[:, 1:][chosen]) * weights[chosen]
        (each.sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)


def _wide(tokens: TaskTokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=tokens.vocab_size, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokens.eos_id, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _examples(task: FtTask, rows: Sequence[CorpusRow], tokens: TaskTokenizer) -> list[Example]:
    outputs = tokens.encode_outputs([row.output for row in rows])
    prompts = [tokens.encode_prompt(task.prompt.render(row.input)) for row in rows]
    return [
        Example((*prompt, *output, tokens.eos_id), len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
