"""Reads the benchmarks' tasks: token ids of train and test rows, and what the tokenizer tells."""

import gzip
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tasc_draft import Tokens
from tasc_text import TaskTokenizer

PROMPT_TOKENS = 3000
ANSWER_TOKENS = 512


@dataclass(frozen=True)
class Task:
    """Rows of one task as token ids; ``facts`` are the arguments that `build_index` takes."""

    name: str
    folder: Path
    tokenizer: TaskTokenizer

    @cached_property
    def prompts(self) -> Tokens:
        return self._column("train", "input")

    @cached_property
    def outputs(self) -> Tokens:
        return self._column("train", "output")

    def test(self, limit: int) -> tuple[Tokens, Tokens]:
        """Prompts and outputs of the first rows in file order."""
        return self._column("test", "input", limit), self._column("test", "output", limit)

    @cached_property
    def facts(self) -> dict[str, Any]:
        return {
            "fingerprint": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "word_starts": self.tokenizer.word_starts,
            "canonical": self.tokenizer.canonical,
        }

    def _column(self, split: str, field: str, limit: int | None = None) -> Tokens:
        with gzip.open(self.folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            texts = [json.loads(line)[field] for line in lines][:limit]
        ids = self.tokenizer.encode_outputs(texts)
        if field == "input":
            ids = [i[-PROMPT_TOKENS:] for i in ids]
        elif split == "test":
            ids = [i[:ANSWER_TOKENS] for i in ids]
        return Tokens.of(ids)


def names_of(data: Path) -> list[str]:
    """Tasks of a folder that have both splits."""
    found = sorted(p.parent.name for p in data.glob("*/train.jsonl.gz"))
    names = [n for n in found if (data / n / "test.jsonl.gz").is_file()]
    if not names:
        raise SystemExit(
            f"{data} has no TASK/train.jsonl.gz with a test.jsonl.gz beside it; give --data a "
            "folder that has"
        )
    return names


def load_task(data: Path, name: str, tokenizer: Path) -> Task:
    folder = data / name
    for split in ("train", "test"):
        if not (folder / f"{split}.jsonl.gz").is_file():
            raise SystemExit(f"{folder} has no {split}.jsonl.gz; get the data set or leave it out")
    return Task(name, folder, open_tokenizer(tokenizer))


def open_tokenizer(path: Path) -> TaskTokenizer:
    """A folder with a tokenizer.json, or the file; without a model's config, ``<|endoftext|>``."""
    file = path if path.is_file() else path / "tokenizer.json"
    special = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
    ends = [t["id"] for t in special if t["content"] in ("<|endoftext|>", "</s>")]
    return TaskTokenizer(file, ends)
