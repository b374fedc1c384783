"""A task's target, drafters and rankings, made where they are missing, and all proposers' sides."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_command import to_stderr
from bench_neural import Asked
from ft_runs import FtRun, Workshop
from ft_tasks import TASKS
from neural_side import Make, Side, Wrap, answer

from tasc_draft import DraftSettings, Int32, NgramProposer, Proposer, build_learnt_index
from tasc_engine import EngineConfig, GenerationRequest, ModelSource, Target
from tasc_engine.neural.files import CARD, load_drafter
from tasc_engine.neural.hybrid import HybridProposer
from tasc_engine.neural.proposer import NeuralProposer
from tasc_engine.neural.ranking import Ranking
from tasc_engine.neural.recent_policy import RecentVocabulary
from tasc_engine.neural.settings import NeuralSettings
from tasc_engine.neural.vocabulary import FullVocabulary, RankedVocabulary, Vocabulary
from tasc_jobs.drafter.answers import ANSWERS, read_answers
from tasc_jobs.drafter.job import DrafterJob, train_drafter
from tasc_jobs.drafter.settings import DrafterSettings
from tasc_jobs.evaluate.subject import Asking, Setup
from tasc_jobs.tuning.task_rows import encode
from tasc_store import CorpusRow
from tasc_text import TaskTokenizer

ROWS, LONGEST, NODES = 8, 512, 16
TREE = NeuralSettings(depth=5, width=8, nodes=NODES)
KINDS = ("eagle", "independent")
SMALL = 512  # tokens of the ranking below `recent`


@dataclass(frozen=True)
class Measured:
    """A task's sides, the plain one first.

    Attributes:
        cut: Tokens of a quarter of the vocabulary.
    """

    task: str
    sides: tuple[Side, ...]
    cut: int
    rows: int

    def side(self, name: str) -> Side:
        return next(side for side in self.sides if side.name == name)

    @property
    def record(self) -> dict[str, Any]:
        same = {s.name: s.answers == self.sides[0].answers for s in self.sides}
        return {
            "rows": self.rows,
            "cut": self.cut,
            "sides": [{**side.record, "identical": same[side.name]} for side in self.sides],
        }


class Bench:
    """Everything that a task's proposers are made of."""

    def __init__(self, asked: Asked, task: str) -> None:
        self.task = TASKS[task]
        workshop = Workshop(asked.data, asked.work, asked.test_rows, 1)
        run = FtRun(task, budget=0)
        if not workshop.is_made(run):
            workshop.make(run)
        self.source = ModelSource(asked.work / run.name / "model")
        self.train = self.task.read(asked.data, "train")
        self.test = self.task.read(asked.data, "test")[: asked.test_rows]
        self.tokenizer = TaskTokenizer.from_folder(self.source.folder)
        torch.set_num_threads(1)
        self.folders = {kind: self._drafter(asked, kind) for kind in KINDS}
        self.config = EngineConfig(ROWS, LONGEST, max_draft_tokens=NODES, prefix_cache_bytes=0)
        self.target = Target.load(self.source, self.config)
        outputs = self.tokenizer.encode_outputs([row.output for row in self.train])
        answers = read_answers(self.folders["eagle"] / ANSWERS)
        self.rankings = {
            "raw": self._ranking(outputs),
            "target": self._ranking([a.ids or () for a in answers]),
        }

    def requests(self) -> list[GenerationRequest]:
        found = []
        for row in self.test:
            prompt = tuple(self.tokenizer.encode_prompt(self.task.prompt.render(row.input)))
            room = min(self.task.max_tokens, LONGEST - len(prompt))
            if room > 0:
                found.append(GenerationRequest(row.key, prompt, room))
        return found

    def ngram(self, nodes: int) -> Make:
        settings = DraftSettings(num_speculative_tokens=nodes, neighbours=32 if nodes else 0)
        found = encode(self.train, self.tokenizer, self.task.prompt)
        index = build_learnt_index(
            found.outputs, found.prompts, fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size, eos_id=self.tokenizer.eos_id, settings=settings,
            word_starts=self.tokenizer.word_starts, canonical=self.tokenizer.canonical,
        )  # fmt: skip
        return lambda wrap: NgramProposer(
            settings, rows=ROWS, capacity=LONGEST, vocab_size=self.target.vocab_size,
            eos_ids=self.tokenizer.eos_ids, index=index,
        )  # fmt: skip

    def neural(self, kind: str, vocabulary: str) -> Make:
        def make(wrap: Wrap) -> Proposer:
            drafter, head = load_drafter(
                self.folders[kind], self.target, self.source, self.tokenizer.fingerprint, ROWS,
                LONGEST,
            )  # fmt: skip
            return NeuralProposer(
                drafter, wrap(self._vocabulary(vocabulary, head)), TREE, rows=ROWS,
                capacity=LONGEST, vocab_size=self.target.vocab_size,
                eos_ids=tuple(self.tokenizer.eos_ids),
            )  # fmt: skip

        return make

    def answer(self, name: str, make: Make) -> Side:
        to_stderr(f"  {name}")
        return answer(name, self.target, self.tokenizer, self.config, make, self.requests())

    @property
    def cut(self) -> int:
        return self.target.vocab_size // 4

    def _vocabulary(self, name: str, head: torch.Tensor) -> Vocabulary:
        origin, _, size = name.partition(":")
        if name == "full":
            return FullVocabulary(head)
        if origin in self.rankings:
            return RankedVocabulary(head, self.rankings[origin].top(int(size)))
        base: Int32 | None = self.rankings["target"].top(int(size)) if size else None
        return RecentVocabulary(head, ROWS, base=base)

    def _ranking(self, outputs: Sequence[Sequence[int]]) -> Ranking:
        ids = np.concatenate([np.array(each, np.int64) for each in outputs])
        counts = np.bincount(ids, minlength=self.tokenizer.vocab_size)
        counts[self.tokenizer.eos_id] = max(counts[self.tokenizer.eos_id], len(outputs))
        return Ranking.of(
            counts, eos_id=self.tokenizer.eos_id, fingerprint=self.tokenizer.fingerprint,
            origin="raw", rows=len(outputs), corpus_rows=len(outputs),
        )  # fmt: skip

    def _drafter(self, asked: Asked, kind: Any) -> Path:
        rows, folder = self._learnt(asked), asked.work / "drafters" / self.task.name / kind
        if not (folder / CARD).is_file():
            to_stderr(f"  training {kind}")
            settings = DrafterSettings(
                kind, epochs=asked.epochs, token_weight=1.0, hidden=128, layers=2
            )
            asking = Asking(self.task.prompt, self.task.max_tokens)
            answers = asked.work / "drafters" / self.task.name / "eagle" / ANSWERS
            known = read_answers(answers) if kind != "eagle" else None
            train_drafter(
                DrafterJob(
                    self.task.name,
                    self.source,
                    asking,
                    Setup(ROWS, LONGEST, 1),
                    rows,
                    known,
                    settings,
                    folder,
                )
            )
        return folder

    def _learnt(self, asked: Asked) -> list[CorpusRow]:
        return self.train[: asked.train_rows]


def measured(asked: Asked, task: str) -> Measured:
    bench = Bench(asked, task)
    ngram, cut = bench.ngram(NODES), bench.cut
    makes: dict[str, Make] = {
        "plain": bench.ngram(0),
        "n-grams": ngram,
    }
    for kind in KINDS:
        makes[f"{kind} full"] = bench.neural(kind, "full")
    for name in (f"target:{cut}", f"target:{SMALL}", f"raw:{SMALL}", "recent", f"recent:{SMALL}"):
        makes[f"eagle {name}"] = bench.neural("eagle", name)
    for kind in KINDS:
        head = bench.neural(kind, "full")
        makes[f"hybrid {kind}"] = lambda wrap, head=head: HybridProposer(
            ngram(wrap), head(wrap), sure=1.0
        )
    sides = tuple(bench.answer(name, make) for name, make in makes.items())
    return Measured(task, sides, cut, len(bench.requests()))
