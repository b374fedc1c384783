"""One target under one proposer after another: tokens a step, times, and what was drafted from.

Every run begins with a proposer that has seen nothing. It builds no proposer and tables nothing.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from neural_watch import WatchedVocabulary

from tasc_draft import SOURCES, DraftIndex, DraftSettings, NgramProposer, Proposer
from tasc_engine import Engine, EngineConfig, EngineTotals, GenerationRequest, ModelSource, Target
from tasc_engine.neural.proposer import DraftModel, NeuralProposer
from tasc_engine.neural.settings import NeuralSettings
from tasc_engine.neural.vocabulary import Vocabulary
from tasc_engine.stats import StepRecord
from tasc_text import PromptTemplate, TaskTokenizer

ROWS, LENGTH = 8, 512
_MEDIANS = ("efficiency", "length", "draft_ms", "verify_ms", "tokens_s")
_NONE = DraftSettings(num_speculative_tokens=0, neighbours=0, recent_tokens=0)


@dataclass(frozen=True)
class Run:
    """All prompts answered once, handed over together."""

    answers: tuple[tuple[int, ...], ...]
    efficiency: float
    length: float
    draft_ms: float
    verify_ms: float
    tokens_s: float


@dataclass(frozen=True)
class Measured:
    """Of several runs, medians.

    Attributes:
        efficiency: Tokens a target forward of a row, the bonus token counted.
        length: The same of forwards with drafts, which an EAGLE head has from an answer's second
            on: the papers' accepted length.
        draft_ms, verify_ms: Of a step with drafts. What a vocabulary does when a row begins or ends
            is in neither, but in tokens a second.
        tokens_s: Emitted by all rows; ``least`` and ``greatest`` of the runs.
        size: Tokens that might be drafted in a row, mean; None without a neural drafter.
        coverage: Of the tokens emitted behind drafts, those that might have been drafted.
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
    """A target with an engine of its own, and the prompts that it answers again and again.

    Args:
        nodes: Most draft tokens of a row, whoever drafts.
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
            GenerationRequest(str(at), tuple(ids), max_tokens)
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
        self, drafter: DraftModel, vocabulary: Vocabulary, settings: NeuralSettings
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
        alone = totals.row_steps - totals.drafts  # without a draft a forward brings one token
        return Run(
            tuple(answers[at] for at in sorted(answers)), totals.block_efficiency,
            (totals.emitted_tokens - alone) / max(1, totals.drafts),
            _mean_ms([draft for draft, _ in times]), _mean_ms([verify for _, verify in times]),
            totals.emitted_tokens / seconds,
        )  # fmt: skip

    def measure(
        self, proposer_of: Callable[[Callable[[Vocabulary], Vocabulary]], Proposer], repeats: int
    ) -> Measured:
        """A watched run, which warms up, then timed ones; without any, its times are worth nothing.

        Args:
            proposer_of: Makes a new proposer; of its vocabulary, if it has one, it takes what the
                argument makes of it.
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
