"""A benchmark's task in memory: what drafts are made from, and the rows that are replayed.

Of a folder of data sets (`draft_tasks`) or of the tasks that ship with the demo. It builds nothing
and measures nothing.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from draft_tasks import PROMPT_TOKENS, Task, load_task

from tasc_draft import Int32, Tokens
from tasc_draft.learning import answers, held_out
from tasc_jobs.demo.tasks import MODEL, TEMPLATES, data_file
from tasc_text import PromptTemplate, TaskTokenizer

DEV_ROWS = 150

Answers = list[tuple[Int32, Int32]]
Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class BenchTask:
    """One task.

    Attributes:
        prompts, outputs: The train split.
        test: Prompt and answer of the test rows, the answer with its end-of-sequence.
        dev: The same of the dev split's first rows; None where the data set has none.
        facts: What `build_index` takes of the tokenizer.
    """

    name: str
    prompts: Tokens
    outputs: Tokens
    test: Answers
    dev: Answers | None
    facts: dict[str, Any]

    @property
    def eos_id(self) -> int:
        return int(self.facts["eos_id"])

    @property
    def vocab_size(self) -> int:
        return int(self.facts["vocab_size"])

    @property
    def corpus_facts(self) -> dict[str, Any]:
        """What `build_corpus` takes."""
        return {name: self.facts[name] for name in ("fingerprint", "vocab_size", "eos_id")}

    def tuning(self) -> tuple[Tokens, Answers]:
        """Outputs to draft from, and rows to tune on that are not among them."""
        if self.dev is not None:
            return self.outputs, self.dev
        out = held_out(len(self.outputs))[1][:DEV_ROWS]
        kept = np.setdiff1d(np.arange(len(self.outputs)), out)
        rows = answers(self.prompts.take(out), self.outputs.take(out), self.eos_id)
        return self.outputs.take(kept), rows


def of_folder(data: Path, name: str, tokenizer: Path, limit: int) -> BenchTask:
    """The task in ``data/name``; where a split is missing, a message ends the program."""
    task = load_task(data, name, tokenizer)
    file, eos, dev = data / name / "dev.jsonl.gz", task.tokenizer.eos_id, None
    if file.is_file():
        encode = task.tokenizer.encode_outputs
        dev = answers(*_columns(file, encode, encode, DEV_ROWS), eos)
    test = answers(*task.test(limit), eos)
    return BenchTask(name, task.prompts, task.outputs, test, dev, task.facts)


def of_demo(name: str, limit: int) -> BenchTask:
    """A task that ships with the demo, in its model's tokens and behind its template."""
    tokenizer, template = TaskTokenizer.from_folder(MODEL), PromptTemplate(TEMPLATES[name])

    def prompts(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer.encode_prompt(template.render(text)) for text in texts]

    encode = tokenizer.encode_outputs
    train = _columns(data_file(name, "train"), prompts, encode)
    test = _columns(data_file(name, "test"), prompts, encode, limit)
    facts = Task(name, MODEL, tokenizer).facts
    return BenchTask(name, *train, answers(*test, tokenizer.eos_id), None, facts)


def _columns(
    file: Path, prompts: Encode, outputs: Encode, limit: int | None = None
) -> tuple[Tokens, Tokens]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:limit]
    heads = [ids[-PROMPT_TOKENS:] for ids in prompts([row["input"] for row in rows])]
    return Tokens.of(heads), Tokens.of(outputs([row["output"] for row in rows]))
