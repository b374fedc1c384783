"""Tasks that drafts are replayed on: token ids of a folder's data sets or of the shipped tasks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import read_rows
from tasc_draft import Int32, Tokens
from tasc_draft.replaying import answers, held_out
from tasc_jobs.demo.tasks import MODEL, TEMPLATES, data_file
from tasc_text import PromptTemplate, TaskTokenizer
from tasc_text.tokenizer import IndexFacts

PROMPT_TOKENS = 3000
ANSWER_TOKENS = 512
DEV_ROWS = 150

Answers = list[tuple[Int32, Int32]]
Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class Task:
    """The rows of one task.

    Attributes:
        prompts, outputs: The train split.
        test: Prompt and answer of the test rows; the answer has its end-of-sequence.
        dev: The same of the first rows of the dev split; None where there is no such split.
        facts: The arguments of `build_index` that the tokenizer determines.
    """

    name: str
    prompts: Tokens
    outputs: Tokens
    test: Answers
    dev: Answers | None
    facts: IndexFacts

    @property
    def eos_id(self) -> int:
        return int(self.facts["eos_id"])

    @property
    def vocab_size(self) -> int:
        return int(self.facts["vocab_size"])

    @property
    def corpus_facts(self) -> dict[str, Any]:
        """Those for an index of outputs alone that the tokenizer determines."""
        return {name: self.facts[name] for name in ("fingerprint", "vocab_size", "eos_id")}

    def tuning(self) -> tuple[Tokens, Answers]:
        """Outputs to draft from, and rows to tune on that are not among them."""
        if self.dev is not None:
            return self.outputs, self.dev
        out = held_out(len(self.outputs))[1][:DEV_ROWS]
        kept = np.setdiff1d(np.arange(len(self.outputs)), out)
        rows = answers(self.prompts.take(out), self.outputs.take(out), self.eos_id)
        return self.outputs.take(kept), rows


def of_folder(data: Path, name: str, tokenizer: Path, limit: int) -> Task:
    """The task in ``data/name`` with the first ``limit`` test rows.

    Raises:
        SystemExit: A split is missing.
    """
    known, folder = open_tokenizer(tokenizer), data / name
    if missing := missing_splits(folder):
        raise SystemExit(f"{folder} has no {missing[0]}.jsonl.gz; get the data set or leave it out")

    def columns(split: str, rows: int | None = None) -> tuple[Tokens, Tokens]:
        cut = ANSWER_TOKENS if split == "test" else None
        encode = known.encode_outputs
        return _columns(folder / f"{split}.jsonl.gz", encode, encode, rows, cut)

    eos, dev = known.eos_id, None
    if (folder / "dev.jsonl.gz").is_file():
        dev = answers(*columns("dev", DEV_ROWS), eos)
    test = answers(*columns("test", limit), eos)
    return Task(name, *columns("train"), test, dev, known.index_facts)


def of_demo(name: str, limit: int) -> Task:
    """A shipped task, in the tokens of the shipped model and with the task's template."""
    known, template = TaskTokenizer.from_folder(MODEL), PromptTemplate(TEMPLATES[name])

    def prompts(texts: Sequence[str]) -> list[list[int]]:
        return [known.encode_prompt(template.render(text)) for text in texts]

    encode = known.encode_outputs
    train = _columns(data_file(name, "train"), prompts, encode)
    test = _columns(data_file(name, "test"), prompts, encode, limit)
    return Task(name, *train, answers(*test, known.eos_id), None, known.index_facts)


def missing_splits(folder: Path) -> list[str]:
    return [s for s in ("train", "test") if not (folder / f"{s}.jsonl.gz").is_file()]


def open_tokenizer(path: Path) -> TaskTokenizer:
    """The tokenizer of a tokenizer.json, or of the folder that it is in.

    Its end-of-sequence is ``<|endoftext|>`` or ``</s>``: a model's config is not read.
    """
    file = path if path.is_file() else path / "tokenizer.json"
    special = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
    ends = [t["id"] for t in special if t["content"] in ("<|endoftext|>", "</s>")]
    return TaskTokenizer(file, ends)


def _columns(
    file: Path, prompts: Encode, outputs: Encode, rows: int | None = None, cut: int | None = None
) -> tuple[Tokens, Tokens]:
    """Prompts and outputs of the first rows, outputs cut to so many tokens."""
    read = read_rows(file)[:rows]
    heads = [ids[-PROMPT_TOKENS:] for ids in prompts([row["input"] for row in read])]
    tails = [ids[:cut] for ids in outputs([row["output"] for row in read])]
    return Tokens.of(heads), Tokens.of(tails)
