"""Measurements of a target with several proposers: tokens per step, times, and coverage.

Every run begins with a new proposer. A measurement is kept in a file. A file with other settings is
measured again; a file of another commit is used, and the record names its commit.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import about, read_json, write_json
from benchmarks.neural.models import Case, Models
from tasc_draft import SOURCES, DraftIndex, DraftSettings, NgramProposer, Proposer
from tasc_draft.drafts import Int32
from tasc_engine import Engine, EngineConfig, EngineTotals, ModelSource, Request, Target
from tasc_engine.drafting.neural.card import Kind
from tasc_engine.drafting.neural.drafters import Eagle, Independent
from tasc_engine.drafting.neural.files import load_drafter
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.ranking import Origin, Ranking
from tasc_engine.drafting.neural.recent import RecentVocabulary
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.drafting.neural.vocabulary import FullVocabulary, RankedVocabulary, Vocabulary
from tasc_engine.model.linears import Linear
from tasc_engine.stats import StepRecord
from tasc_text import PromptTemplate, TaskTokenizer

ROWS, LENGTH = 8, 512
MICROSPEC, FR_SPEC = NeuralSettings(5, 10, 60), NeuralSettings(6, 10, 60)
# The paper calls four levels depth 3: its answers have up to 4.8 tokens per step.
VOCABTRIM = NeuralSettings(4, 8, 32)
MOST = 60  # nodes of these
_MEDIANS = ("efficiency", "length", "draft_ms", "verify_ms", "tokens_s")
_NONE = DraftSettings(num_speculative_tokens=0, neighbours=0, recent_tokens=0)


@dataclass(frozen=True)
class Run:
    """One run over all prompts, which are submitted together."""

    answers: tuple[tuple[int, ...], ...]
    efficiency: float
    length: float
    draft_ms: float
    verify_ms: float
    tokens_s: float


@dataclass(frozen=True)
class Measured:
    """Medians of several runs.

    Attributes:
        efficiency: Tokens per target forward of a row, the bonus token included.
        length: The same for forwards with drafts, which an EAGLE head has from the second forward
            of an answer on: the papers' accepted length.
        draft_ms, verify_ms: Times of a step with drafts. The work of a vocabulary when a row
            begins or ends is in neither, but affects tokens per second.
        tokens_s: Tokens per second of all rows; ``least`` and ``greatest`` of the runs.
        size: The mean number of tokens that can be drafted in a row; None without a neural drafter.
        coverage: The share of tokens emitted after drafts that could have been drafted.
    """

    efficiency: float
    length: float
    draft_ms: float
    verify_ms: float
    tokens_s: float
    least: float
    greatest: float
    size: float | None
    coverage: float | None


class Side:
    """A target with its engine, and the prompts that it answers in every run.

    Args:
        nodes: The greatest number of draft tokens of a row.
    """

    def __init__(
        self, source: ModelSource, template: PromptTemplate, inputs: Sequence[str], max_tokens: int,
        nodes: int,
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        self.source, self.tokenizer = source, TaskTokenizer.from_folder(source.folder)
        self.config = EngineConfig(ROWS, LENGTH, prefix_cache_bytes=0, max_draft_tokens=nodes)
        self.target = Target.load(source, self.config)
        self._requests = [
            Request(str(at), tuple(ids), max_tokens)
            for at, text in enumerate(inputs)
            if len(ids := self.tokenizer.encode_prompt(template.render(text)))
            <= LENGTH - max_tokens
        ]
        self._totals, self._times = EngineTotals(len(SOURCES), 1), list[tuple[float, float]]()
        plain = self.ngrams(None, _NONE)
        self._engine = Engine(self.target, self.tokenizer, plain, self.config, self._on_step)
        self.plain = self.run(plain)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(e for e in self.tokenizer.eos_ids if e < self.target.vocab_size)

    def ngrams(self, index: DraftIndex | None, settings: DraftSettings) -> NgramProposer:
        empty = DraftIndex.empty(self.tokenizer.fingerprint, self.tokenizer.vocab_size)
        return NgramProposer(
            settings, rows=ROWS, capacity=LENGTH, vocab_size=self.target.vocab_size,
            eos_ids=self.tokenizer.eos_ids, index=index or empty,
        )  # fmt: skip

    def neural(
        self, drafter: Eagle | Independent, vocabulary: Vocabulary, settings: NeuralSettings
    ) -> NeuralProposer:
        return NeuralProposer(
            drafter, vocabulary, settings, rows=ROWS, capacity=LENGTH,
            vocab_size=self.target.vocab_size, eos_ids=self.ends,
        )  # fmt: skip

    def run(self, proposer: Proposer) -> Run:
        self._totals, self._times = EngineTotals(len(SOURCES), proposer.max_depth), []
        self._engine.draft_by(proposer)
        began, answers = time.perf_counter(), dict[int, tuple[int, ...]]()
        for result in self._engine.generate(iter(self._requests)):
            assert result.finish_reason != "error", result.error
            answers[int(result.id)] = tuple(result.tokens)
        seconds, totals, times = time.perf_counter() - began, self._totals, self._times
        alone = totals.row_steps - totals.drafts  # a forward without a draft emits one token
        return Run(
            tuple(answers[at] for at in sorted(answers)), totals.block_efficiency,
            (totals.emitted_tokens - alone) / max(1, totals.drafts),
            _mean_ms([draft for draft, _ in times]), _mean_ms([verify for _, verify in times]),
            totals.emitted_tokens / seconds,
        )  # fmt: skip

    def measure(
        self, proposer_of: Callable[[Callable[[Vocabulary], Vocabulary]], Proposer], repeats: int
    ) -> Measured:
        """One watched run, which warms up, then timed runs; without any, the times mean nothing.

        Args:
            proposer_of: Makes a new proposer; its argument wraps the vocabulary of the proposer, if
                it has one.
        """
        watched: list[WatchedVocabulary] = []

        def watch(vocabulary: Vocabulary) -> Vocabulary:
            watched.append(WatchedVocabulary(vocabulary, self.target.vocab_size))
            return watched[-1]

        proposer = proposer_of(watch)
        for each in watched:
            each.forget()
        first = self.run(proposer)
        timed = [self.run(proposer_of(lambda vocabulary: vocabulary)) for _ in range(repeats)]
        for run in (first, *timed):
            changed = sum(map(tuple.__ne__, run.answers, self.plain.answers))
            assert not changed, f"{changed} of {len(run.answers)} answers are not the plain ones"
        runs = timed or [first]
        rates = [run.tokens_s for run in runs]
        watch_of = watched[-1] if watched else None
        return Measured(
            **{name: statistics.median(getattr(run, name) for run in runs) for name in _MEDIANS},
            least=min(rates), greatest=max(rates), size=watch_of and watch_of.size,
            coverage=watch_of and watch_of.coverage,
        )  # fmt: skip

    def _on_step(self, record: StepRecord) -> None:
        assert not record.draft_failures, "a proposer failed; the log says how"
        self._totals.add(record)
        if record.drafts:
            self._times.append((record.draft_seconds, record.verify_seconds))


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.fmean(seconds) if seconds else 0.0


# Vocabularies


class WatchedVocabulary:
    """A vocabulary that counts the tokens it allows, and those of them that are emitted.

    Counting takes time, so no run with it is timed.
    """

    def __init__(self, inner: Vocabulary, vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size
        self._active: dict[int, Tensor] = {}
        self._sizes: list[int] = []
        self._tokens = self._covered = 0

    @property
    def needs_top(self) -> int:
        return self._inner.needs_top

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    @property
    def size(self) -> float:
        """The mean number of allowed tokens over all rows of all drafts."""
        return sum(self._sizes) / max(1, len(self._sizes))

    @property
    def coverage(self) -> float:
        """The share of tokens emitted after drafts that were allowed."""
        return self._covered / max(1, self._tokens)

    def forget(self) -> None:
        """Reset the counts: a proposer drafts once before its first request."""
        self._sizes.clear()
        self._tokens = self._covered = 0

    def start(self, row: int, prompt: Int32, labels: Any = None) -> None:
        self._inner.start(row, prompt)

    def observe(self, row: int, tokens: Int32, top: Tensor | None) -> None:
        if (active := self._active.pop(row, None)) is not None:
            self._tokens += len(tokens)
            self._covered += int(active[torch.from_numpy(tokens.astype("int64"))].sum())
        self._inner.observe(row, tokens, top)

    def drafted(self, rows: Tensor, ids: Tensor) -> None:
        self._inner.drafted(rows, ids)

    def prepare(self) -> None:
        self._inner.prepare()

    def finish(self, row: int) -> None:
        self._active.pop(row, None)
        self._inner.finish(row)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        found = self._inner.logits(hidden, rows)
        for at, row in enumerate(rows.tolist()):
            if row not in self._active:  # the first level of the draft
                self._active[row] = self._allowed(found[at, 0], rows[at : at + 1])
                self._sizes.append(int(self._inner.sizes(rows[at : at + 1])))
        return found

    def ids_of(self, slots: Tensor, rows: Tensor) -> Tensor:
        return self._inner.ids_of(slots, rows)

    def sizes(self, rows: Tensor) -> Tensor:
        return self._inner.sizes(rows)

    def _allowed(self, logits: Tensor, row: Tensor) -> Tensor:
        slots = (~torch.isneginf(logits)).nonzero()[:, 0]
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[self._inner.ids_of(slots[None], row)[0]] = True
        return allowed


# Cases


@dataclass(frozen=True)
class Policy:
    """The tokens that can be drafted.

    Attributes:
        ranked: This many of the most frequent tokens; None for all, or with a window for none.
        recent: A window over the candidates of each row (MicroSpec).
    """

    ranked: int | None = None
    origin: Origin = "target"
    recent: bool = False
    context: bool = True
    extension: bool = True
    gathered: bool = True

    @property
    def name(self) -> str:
        parts = ["recent"] if self.recent else []
        parts += [f"ranked {self.ranked} by {self.origin}"] if self.ranked else []
        for is_on, without in (
            (self.extension, "context only"), (self.context, "extension only"),
            (self.gathered, "indexed"),
        ):  # fmt: skip
            parts += [] if is_on else [without]
        return ", ".join(parts) or "full"


FULL, RECENT = Policy(), Policy(recent=True)


class Bench:
    """One case; targets and drafters are loaded when they are needed.

    Args:
        rows: The number of test rows that are answered.
        nodes: The greatest number of draft tokens of a row in a step.
    """

    def __init__(
        self, models: Models, case: Case, rows: int, repeats: int, nodes: int = MOST
    ) -> None:
        self.models, self.case, self.repeats = models, case, repeats
        self.rows, self._nodes, self._drafter = rows, nodes, cache(self._loaded)
        self.ranking = cache(lambda origin: models.ranking(case, origin))

    @cached_property
    def side(self) -> Side:
        test = self.case.of.read(self.models.data, "test")[: self.rows]
        return Side(
            self.models.source(self.case), self.case.of.prompt, [row.input for row in test],
            self.case.of.max_tokens, self._nodes,
        )  # fmt: skip

    @cached_property
    def vocab_size(self) -> int:
        return self.side.target.vocab_size

    def tokens(self, k: int, origin: Origin = "target") -> int:
        """How many of the k most frequent tokens occur."""
        return len(self.ranking(origin).top(k))

    def sizes(self, *wanted: int) -> list[int]:
        """The distinct numbers of tokens in rankings of these sizes, in descending order."""
        return sorted({self.tokens(k) for k in wanted}, reverse=True)

    def neural(self, kind: Kind, policy: Policy, tree: NeuralSettings, repeats: int) -> Measured:
        """Measure a drafter alone, which drafts from the tokens of a policy."""
        shape = f"{tree.depth}x{tree.width}x{tree.nodes}"
        return self.measured(
            f"{kind}, {policy.name}, {shape}", repeats,
            lambda watch: self.proposer(kind, policy, tree, watch),
        )  # fmt: skip

    def measured(
        self, name: str, repeats: int,
        proposer_of: Callable[[Callable[[Vocabulary], Vocabulary]], Proposer],
    ) -> Measured:  # fmt: skip
        settings = (
            f"{name}; {self.rows} rows, {repeats} repeats, {self._nodes} nodes, b = {ROWS}; learnt "
            f"in {self.models.epochs:g} epochs"
        )
        file = self.models.folder(self.case) / "measured" / f"{name}.json"
        found = kept(file, settings, lambda: asdict(self.side.measure(proposer_of, repeats)))
        return Measured(**found)

    def proposer(
        self, kind: Kind, policy: Policy, tree: NeuralSettings,
        watch: Callable[[Vocabulary], Vocabulary] = lambda vocabulary: vocabulary,
    ) -> Proposer:  # fmt: skip
        drafter, head = self._drafter(kind)
        vocabulary = vocabulary_of(policy, head, self.ranking)
        return self.side.neural(drafter, watch(vocabulary), tree)

    def _loaded(self, kind: Kind) -> tuple[Eagle | Independent, Tensor]:
        side, folder = self.side, self.models.drafter(self.case, kind)
        fingerprint = side.tokenizer.fingerprint
        return load_drafter(folder, side.target, side.source, fingerprint, ROWS, LENGTH)


def vocabulary_of(policy: Policy, head: Tensor, of: Callable[[Origin], Ranking]) -> Vocabulary:
    """A new vocabulary by a policy; ``of`` is the ranking of an origin."""
    base = of(policy.origin).top(policy.ranked) if policy.ranked else None
    if policy.recent:
        return RecentVocabulary(
            head, ROWS, base=base, gathered=policy.gathered, context=policy.context,
            extension=policy.extension,
        )  # fmt: skip
    return FullVocabulary(Linear(head)) if base is None else RankedVocabulary(head, base)


# Files


_used: dict[str, Any] = {}


def kept(file: Path, settings: str, measure: Callable[[], Any]) -> Any:
    """The measurement in a file if it has these settings; otherwise a new one, which is kept."""
    found = read_json(file)
    if found.get("settings") != settings:
        by = {"settings": settings, **about()}
        found = {**by, "found": measure()}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, found)
    by = {name: found[name] for name in ("git", "processor")}
    _used[json.dumps(by, sort_keys=True)] = by
    return found["found"]


def measured_by() -> list[dict[str, Any]]:
    """The commits and processors of all measurements that were used."""
    return list(_used.values())
