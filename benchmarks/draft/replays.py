"""Replays of drafts over the test rows of one task: ours, learnt and frozen, and the peers'."""

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np

from benchmarks.common import ticked
from benchmarks.draft.ceiling import copy_bound
from benchmarks.draft.peers import PEERS
from benchmarks.draft.tasks import Answers, Task
from tasc_draft import DraftIndex, DraftSettings, NgramProposer, Replay, build_learnt_index, replay
from tasc_draft.drafts import Proposer

NODES = 8
SIZES = (4, 32)
REPEATS = 3
# Every requested node is drafted. No row drafts from the answer of another test row.
SETTINGS = DraftSettings(num_speculative_tokens=NODES, min_prob=0.0, recent_tokens=0)

Tick = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Drafted:
    """The replays of one task.

    Attributes:
        repeats: Replays at 8 nodes, one after the other; each starts from the learnt weights.
        frozen: The same without learning from the answers.
        sizes: Tokens per step at other numbers of nodes.
        peers: Replays of other projects' drafters at 8 nodes, by name.
        ceiling: Tokens per step of the copy bound (`copy_bound`).
    """

    repeats: list[Replay]
    frozen: Replay
    sizes: dict[int, float]
    peers: dict[str, Replay]
    ceiling: float


def learnt_index(task: Task) -> DraftIndex:
    return build_learnt_index(task.outputs, task.prompts, settings=SETTINGS, **task.facts)


def of_task(task: Task, index: DraftIndex, peers: bool, tick: Tick) -> Drafted:
    """Replay a task's test rows; ``tick`` is called after each of `replays_of` parts."""
    frozen = dataclasses.replace(SETTINGS, learning_rate=0.0)
    return Drafted(
        repeats=[ticked(ours(task, index, SETTINGS, task.test), tick) for _ in range(REPEATS)],
        frozen=ticked(ours(task, index, frozen, task.test), tick),
        sizes={n: ticked(of_size(task, index, n), tick) for n in SIZES},
        peers=_peers(task, tick) if peers else {},
        ceiling=ticked(copy_bound(index.corpus, task.test), tick),
    )


def replays_of(peers: bool) -> int:
    """How many parts `of_task` has."""
    return REPEATS + 2 + len(SIZES) + peers * sum(len(p.names) for p in PEERS if p.version)


def of_size(task: Task, index: DraftIndex, nodes: int) -> float:
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=nodes)
    return ours(task, index, settings, task.test).tokens_per_step


def ours(
    task: Task,
    index: DraftIndex,
    settings: DraftSettings,
    rows: Answers,
    branching: bool = True,
) -> Replay:
    """Replay rows with our proposer, which drafts as many nodes as the settings have."""
    proposer = NgramProposer(
        settings,
        rows=1,
        capacity=capacity(rows),
        vocab_size=task.vocab_size,
        eos_ids=[task.eos_id],
        index=index,
        branching=branching,
    )
    return replay(proposer, rows, settings.num_speculative_tokens)


def capacity(rows: Answers) -> int:
    return max(len(prompt) + len(answer) for prompt, answer in rows) + 1


def percentile(times: list[float], q: float) -> float:
    return float(np.percentile(times, q)) if times else 0.0


def _peers(task: Task, tick: Tick) -> dict[str, Replay]:
    installed = [peer for peer in PEERS if peer.version]
    return {
        name: ticked(_replayed(proposer, task.test), tick)
        for peer in installed
        for name, proposer in zip(peer.names, peer.make(task, NODES), strict=True)
    }


def _replayed(proposer: Proposer, rows: Answers) -> Replay:
    # A replay calls only those methods of a proposer that the contract has.
    return replay(cast(NgramProposer, proposer), rows, NODES)
