"""Neural proposers for the models of the lossless tests, and what shows that they drafted."""

from collections.abc import Callable

from lossless_cases import Answered, Case

from neural_drafters import drafter_of, proposer_of, ranked_by, vocabulary_of
from tasc_draft import SOURCES, Proposer
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.tree import NeuralSettings

TREE = NeuralSettings(depth=4, width=4, nodes=16)
CAPACITY = 160


def neural(
    case: Case, kind: str, policy: str = "full", settings: NeuralSettings = TREE, rows: int = 4
) -> NeuralProposer:
    drafter, head = drafter_of(kind, case.folder, rows, CAPACITY)
    vocabulary = vocabulary_of(policy, head, rows, ranked_by(case.answers, len(head)))
    return proposer_of(
        drafter, vocabulary, settings, rows=rows, capacity=CAPACITY, eos_ids=case.tokenizer.eos_ids
    )


def by(proposer: NeuralProposer) -> Callable[[Proposer], Proposer]:
    """What puts a proposer in the place of the n-gram one."""
    return lambda ngram: proposer


def assert_some_accepted_and_some_rejected(found: Answered, least: int = 20) -> None:
    accepted = int(found.totals.accepted[SOURCES.index("neural")].sum())
    assert accepted == found.totals.accepted.sum()
    assert accepted > least
    assert found.totals.drafted.sum() - accepted > 20
