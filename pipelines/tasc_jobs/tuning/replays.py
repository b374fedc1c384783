"""Replays proposers on a task's test rows. This needs no model, no Redis and no Ray.

Proposers have a name, which stands for their settings, the shape of drafts and the texts of their
index. Weights are learnt on training rows that are not in the index used for learning; then an
index of all training rows is built. This index has no test answers, but an ``online`` comparison
also drafts from the test answers replayed so far.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from tasc_draft import (
    BigramTable,
    DraftIndex,
    DraftSettings,
    Int32,
    NgramProposer,
    Replay,
    replay,
)
from tasc_draft.index.weights import Weights
from tasc_draft.labels import LabelTrie
from tasc_draft.replaying import corpus_weights
from tasc_engine.errors import GuideError
from tasc_jobs.errors import JobError
from tasc_jobs.index.publish import IndexSize
from tasc_protocol import GuideSpec
from tasc_runtime.data.local_corpus import TokenRows, index_of
from tasc_text import TaskTokenizer

if TYPE_CHECKING:
    from tasc_engine.guided import Guide


@dataclass(frozen=True)
class GuidedAnswers:
    """The labels or the tokens that a guide prescribes for some answers.

    Attributes:
        labels: The labels to which answers are limited, if the guide is a set of labels.
        forced: For each answer, a mask ``bool[n]`` of the tokens that its guide forces, or None if
            the guide does not allow the answer. None if ``labels`` determine the forced tokens.
    """

    labels: LabelTrie | None = None
    forced: Sequence[NDArray[np.bool_] | None] | None = None

    @classmethod
    def of(cls, spec: GuideSpec, answers: Sequence[Int32], tokenizer: TaskTokenizer) -> Self:
        """Find the tokens that a guide forces in answers.

        An answer that the guide does not allow counts as not guided.

        Args:
            answers: Token ids of answers, with end-of-sequence.

        Raises:
            JobError: The guide cannot be compiled.
        """
        from tasc_engine.guided import Guides  # imports torch, which other replays do not need

        guides = Guides(tokenizer, tokenizer.vocab_size)
        try:
            labels = guides.of(spec).labels
            if labels is not None:
                return cls(labels)
            return cls(forced=[_forced(guides.of(spec), answer) for answer in answers])
        except GuideError as error:
            raise JobError(f"the guide ({spec.kind}) cannot be compiled: {error}") from error


def _forced(guide: "Guide", answer: Int32) -> NDArray[np.bool_] | None:
    found, at = np.zeros(len(answer), bool), 0
    while at < len(answer):
        stretch = guide.forced(len(answer) - at)
        if len(stretch):
            if not np.array_equal(stretch, answer[at : at + len(stretch)]):
                return None
            found[at : at + len(stretch)] = True
            guide.advance(stretch)
            at += len(stretch)
        else:
            guide.advance(answer[at : at + 1])
            at += 1
        if guide.error:
            return None
    return found


class Reads(Enum):
    """The texts that a proposer's index is built from."""

    NOTHING = "nothing"
    OUTPUTS = "outputs"
    ALL = "prompts and outputs"


@dataclass(frozen=True)
class NamedProposer:
    """A proposer to compare; `compare` adds the budget and the recent tokens to its settings."""

    name: str
    settings: DraftSettings
    branching: bool
    reads: Reads

    @property
    def learns(self) -> bool:
        """Whether the proposer has weights."""
        return self.settings.mixture == "mixed"


_MIXED = DraftSettings(min_prob=0.0, recent_tokens=0)
_TASC = DraftSettings(mixture="tasc", min_prob=0.0)
_CORPUS = DraftSettings(mixture="tasc", min_prob=0.0, corpus_weight=1.0)
_BIGRAMS = DraftSettings(min_prob=0.0, recent_tokens=0, sources=("bigrams",))
PROPOSERS = {
    p.name: p
    for p in (
        NamedProposer("mixed", _MIXED, True, Reads.ALL),
        NamedProposer("mixed-chain", _MIXED, False, Reads.ALL),
        NamedProposer("tasc", _TASC, False, Reads.OUTPUTS),
        NamedProposer("tasc-tree", _TASC, True, Reads.OUTPUTS),
        NamedProposer("corpus", _CORPUS, False, Reads.OUTPUTS),
        NamedProposer("trie", DraftSettings.published("trie"), True, Reads.NOTHING),
        NamedProposer("bigrams", _BIGRAMS, True, Reads.NOTHING),
    )
}


def named_proposers(names: Sequence[str], bigrams: bool) -> list[NamedProposer]:
    """Returns the proposers of these names, each once, in this order.

    Args:
        bigrams: Whether there is a table of the target's own bigrams.

    Raises:
        JobError: A name is unknown, or the proposer ``bigrams`` is named without a table.
    """
    for name in names:
        if name not in PROPOSERS:
            raise JobError(f"proposer {name!r} is unknown; choose from {', '.join(PROPOSERS)}")
        if name == "bigrams" and not bigrams:
            raise JobError("proposer bigrams needs --bigrams FILE; `tasc model-bigrams` makes one")
    return [PROPOSERS[name] for name in dict.fromkeys(names)]


ONLINE_TOKENS = DraftSettings().recent_tokens
_WARM_UP_ROWS = 500


@dataclass(frozen=True)
class Comparison:
    """The proposers to compare, and the rows of the comparison.

    Attributes:
        budgets: Maximum draft tokens per step.
        bigrams: The target's own table, a source of every proposer with weights.
        online: Whether drafts also come from the answers replayed so far.
        guided: The guide of the test answers, if they have one.
    """

    train: TokenRows
    test: TokenRows
    tokenizer: TaskTokenizer
    proposers: Sequence[NamedProposer]
    budgets: Sequence[int]
    bigrams: BigramTable | None = None
    online: bool = False
    guided: GuidedAnswers | None = None

    @property
    def replayed_rows(self) -> int:
        """Total number of replays of rows."""
        passes = sum(2 if p.learns else 1 for p in self.proposers)
        return passes * len(self.budgets) * len(self.test)


@dataclass(frozen=True)
class IndexCost:
    """The size of an index, and the cost of building it.

    Attributes:
        tokens_read: Number of tokens of the outputs, and of the prompts if they are read; without
            SEP and EOS.
        seconds: Time to build the index, without compilation.
    """

    tokens_read: int
    size: IndexSize
    seconds: float

    @property
    def tokens_read_per_s(self) -> float | None:
        """Tokens read per second; None if nothing is read."""
        return self.tokens_read / self.seconds if self.tokens_read else None


@dataclass(frozen=True)
class Measured:
    """One proposer at one budget.

    Attributes:
        replay: The replay with weights that learn from each answer after its replay.
        tokens_per_step_frozen: Tokens per step with weights learnt only on the training rows.
    """

    proposer: str
    budget: int
    replay: Replay
    tokens_per_step_frozen: float
    index: IndexCost

    def figures(self) -> dict[str, Any]:
        """Returns the figures as JSON values, with the numerator and denominator of each mean."""
        cost, size = self.index, self.index.size
        return {
            "proposer": self.proposer,
            "budget": self.budget,
            **replay_figures(self.replay),
            "tokens_per_step_frozen": self.tokens_per_step_frozen,
            "index_output_tokens": size.output_tokens,
            "index_bytes": size.bytes,
            "index_corpus_bytes_per_token": size.corpus_bytes_per_token,
            "index_bytes_per_token": size.bytes_per_token,
            "index_tokens_read": cost.tokens_read,
            "index_tokens_read_per_s": cost.tokens_read_per_s,
        }


def rates(found: Replay) -> list[float]:
    """Returns, by position, accepted drafts divided by drafts that reach the position."""
    return [a / r for a, r in zip(found.accepted, found.reached, strict=True)]


def replay_figures(found: Replay) -> dict[str, Any]:
    """Returns a replay's counts and means as JSON values; times are medians and p99."""
    figures = asdict(found) | {
        "tokens_per_step": found.tokens_per_step,
        "coverage": found.drafted_steps / found.steps,
        "nodes_per_step": found.nodes / found.steps,
        "acceptance": rates(found),
    }
    for name in ("draft_us", "start_us"):
        times = figures.pop(name)
        figures |= {f"{name}_p{p}": round(float(np.percentile(times, p)), 2) for p in (50, 99)}
    return figures


@dataclass(frozen=True)
class Prepared:
    """A proposer with its index, which has weights if the proposer uses them."""

    proposer: NamedProposer
    index: DraftIndex
    cost: IndexCost


def prepare(comparison: Comparison) -> list[Prepared]:
    """Learn weights and build indexes, one for each kind of texts that proposers read.

    Raises:
        DraftError: The rows cannot be indexed.
    """
    built, learnt = cache(partial(_built, comparison)), cache(partial(_learnt, comparison))
    prepared = []
    for each in comparison.proposers:
        weights = learnt(each.settings, each.reads) if each.learns else None
        index, cost = built(each.reads)
        prepared.append(Prepared(each, replace(index, weights=weights), cost))
    return prepared


def compare(
    comparison: Comparison,
    prepared: Sequence[Prepared],
    progress: Callable[[], None] = lambda: None,
) -> Iterator[Measured]:
    """Replay every proposer at every budget.

    Args:
        progress: Called after each row.
    """
    rows = comparison.test.answers(comparison.tokenizer.eos_id)
    for each in prepared:
        proposer, index = each.proposer, each.index
        for budget in comparison.budgets:
            settings = replace(
                proposer.settings,
                num_speculative_tokens=budget,
                recent_tokens=ONLINE_TOKENS if comparison.online and proposer.learns else 0,
            )
            replayed = partial(
                run,
                index,
                rows,
                branching=proposer.branching,
                tokenizer=comparison.tokenizer,
                progress=progress,
                guided=comparison.guided,
            )
            found = replayed(settings)
            still = replayed(replace(settings, learning_rate=0.0)) if proposer.learns else found
            yield Measured(proposer.name, budget, found, still.tokens_per_step, each.cost)


def run(
    index: DraftIndex,
    rows: Sequence[tuple[Int32, Int32]],
    settings: DraftSettings,
    *,
    branching: bool,
    tokenizer: TaskTokenizer,
    progress: Callable[[], None] = lambda: None,
    guided: GuidedAnswers | None = None,
) -> Replay:
    """Replay rows with a proposer of these settings, including their number of draft tokens.

    Args:
        guided: The guide of the task's answers, if they have one.
    """
    proposer = NgramProposer(
        settings,
        rows=1,
        capacity=max(len(prompt) + len(answer) for prompt, answer in rows) + 1,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
        index=index,
        branching=branching,
    )
    guided = guided or GuidedAnswers()
    return replay(
        proposer, rows, settings.num_speculative_tokens, progress,
        labels=guided.labels, forced=guided.forced,
    )  # fmt: skip


def _built(comparison: Comparison, reads: Reads) -> tuple[DraftIndex, IndexCost]:
    train = comparison.train
    _index(comparison, reads, train.take(np.arange(min(_WARM_UP_ROWS, len(train)))))
    began = time.perf_counter()
    index = _index(comparison, reads, train)
    seconds = time.perf_counter() - began
    read = {Reads.NOTHING: 0, Reads.OUTPUTS: len(train.outputs.ids), Reads.ALL: train.tokens}
    return index, IndexCost(read[reads], IndexSize.of(index), seconds)


def _learnt(comparison: Comparison, settings: DraftSettings, reads: Reads) -> Weights | None:
    return corpus_weights(
        lambda outputs, prompts: _index(comparison, reads, TokenRows(prompts, outputs)),
        comparison.train.outputs,
        comparison.train.prompts,
        eos_id=comparison.tokenizer.eos_id,
        settings=settings,
    )


def _index(comparison: Comparison, reads: Reads, rows: TokenRows) -> DraftIndex:
    tokenizer = comparison.tokenizer
    if reads is Reads.NOTHING:
        index = DraftIndex.empty(tokenizer.fingerprint, tokenizer.vocab_size)
    else:
        index = index_of(rows, tokenizer, prompts=reads is Reads.ALL)
    return replace(index, bigrams=comparison.bigrams)
