"""Replays known answers to a proposer: to count what its drafts would save, and to learn weights.

Lossless verification makes the output independent of the drafts, so (prompt, answer) pairs measure
a proposer exactly: each step keeps the longest correct path of the draft and one bonus token of the
answer. End-of-sequence counts as a token. The first step has a draft, too.

Tokens that a guide forces need no forward, with drafts or without. They follow the preceding token
in the same step, and count neither as drafted nor as accepted. As in the engine, drafts of guided
answers lose the nodes that the guide forbids and the nodes that save no forward. Without labels,
only the answer shows which tokens its guide forces, so draft tokens after a wrong one all stay.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing, compiled
from tasc_draft.drafts import Drafts, Int32, Tokens
from tasc_draft.index.draft_index import DraftIndex, build_index
from tasc_draft.index.weights import Weights
from tasc_draft.labels import LabelTrie, child
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.settings import DraftSettings

POSITIONS = 64  # maximum number of depths that are counted
EPOCHS = 6
RATE = 0.1
MIN_ROWS = 200  # smaller corpora get no learnt weights
ANSWER_TOKENS = 512  # maximum number of used tokens of one answer
_SHARE, _MIN_HELD_OUT, _MAX_HELD_OUT = 12, 100, 600


@dataclass(frozen=True)
class Replay:
    """Counts of one replay.

    Attributes:
        rows, steps, tokens: Number of answers, target forwards, and emitted tokens.
        plain_steps: Number of target forwards that decoding without drafts would need: one for each
            token that no guide forces.
        nodes: Number of verified draft tokens, including forced tokens within drafts.
        carried: Number of forced tokens within drafts that were accepted.
        forced: Number of forced tokens that precede the last unforced token of their answer. A
            forward writes them to the cache, with drafts or without.
        drafted_steps: Number of steps with a draft.
        reached: ``[positions]`` number of steps whose draft reaches depth i + 1.
        accepted: ``[positions]`` number of steps that accept a token at depth i + 1.
        draft_us: ``[steps]`` microseconds of ``propose`` and ``observe``, called from Python.
        start_us: ``[rows]`` microseconds of ``start`` and of the analysis of the prompt.
    """

    rows: int
    steps: int
    tokens: int
    nodes: int
    drafted_steps: int
    reached: list[int]
    accepted: list[int]
    draft_us: list[float]
    start_us: list[float]
    plain_steps: int
    carried: int = 0
    forced: int = 0

    @property
    def charged(self) -> int:
        """Number of nodes that count as a cost of drafting: all but accepted forced tokens."""
        return self.nodes - self.carried

    @property
    def tokens_per_step(self) -> float:
        """The block efficiency: total tokens / total steps."""
        return self.tokens / self.steps if self.steps else 0.0


def replay(
    proposer: NgramProposer,
    rows: Iterable[tuple[Int32, Int32]],
    budget: int,
    progress: Callable[[], None] = lambda: None,
    *,
    labels: LabelTrie | None = None,
    forced: Sequence[NDArray[np.bool_] | None] | None = None,
) -> Replay:
    """Replay rows on the proposer's row 0, in order.

    Args:
        rows: Prompt and answer ids, ``int32``, the answer with its end-of-sequence.
        budget: Maximum number of draft tokens of a step.
        progress: Called after each row.
        labels: Labels that the answers are limited to. An answer that is not a label is not
            limited.
        forced: For each answer, ``bool[n]``, whether its guide forces each token, or None for an
            answer without a guide. By default, the tokens that ``labels`` force.
    """
    tokens, nodes, start_us, draft_us = 0, 0, list[float](), list[float]()
    plain_steps = carried = all_forced = 0
    deepest, accepted = list[int](), list[int]()  # one entry per step
    batch, limit = np.zeros(1, np.int32), np.array([budget], np.int32)
    min_probs, impossible = np.zeros(budget, np.float32), np.full(budget, 2.0, np.float32)
    for n, (prompt, answer) in enumerate(rows):
        own = labels if labels and labels.after(0, answer) >= 0 else None
        needless = own.forced_in(answer) if own else None
        if forced is not None:
            needless = forced[n]
        guided = needless is not None
        if needless is None:
            needless = np.zeros(len(answer), bool)
        decided = np.flatnonzero(~needless)
        plain_steps += max(len(decided), 1)
        all_forced += int(decided.max(initial=-1)) + 1 - len(decided)
        began = time.perf_counter()
        proposer.start(0, prompt, own)
        proposer.propose(batch, limit, impossible)  # the first call analyses the prompt
        start_us.append((time.perf_counter() - began) * 1e6)
        at = min(_forced_end(needless, 0), len(answer) - 1)
        proposer.observe(0, answer[:at])
        tokens += at
        while at < len(answer):
            began = time.perf_counter()
            drafts = proposer.propose(batch, limit, min_probs)
            drafted = time.perf_counter()
            verified_nodes, kept, depth = _outcome(
                drafts.tokens, drafts.parents, answer, at, needless, guided
            )
            nodes += verified_nodes
            deepest.append(
                depth if own is None else _deepest(drafts, own, own.after(0, answer[:at]))
            )
            free = int(np.count_nonzero(needless[at : at + kept]))
            carried += free
            accepted.append(kept - free)
            end = _forced_end(needless, min(at + kept + 1, len(answer)))
            verified = time.perf_counter()
            proposer.observe(0, answer[at:end])
            seconds = drafted - began + time.perf_counter() - verified
            draft_us.append(seconds * 1e6)
            tokens += end - at
            at = end
        proposer.finish(0)
        progress()
    positions = min(max(deepest, default=0), POSITIONS)
    return Replay(
        rows=len(start_us),
        steps=len(draft_us),
        tokens=tokens,
        nodes=nodes,
        drafted_steps=int(np.count_nonzero(deepest)),
        reached=_beyond(np.array(deepest), positions),
        accepted=_beyond(np.array(accepted), positions),
        draft_us=draft_us,
        start_us=start_us,
        plain_steps=plain_steps,
        carried=carried,
        forced=all_forced,
    )


def _beyond(steps: NDArray[Any], positions: int) -> list[int]:
    """The number of steps with a value above 0, the number above 1, and so on."""
    return [int(np.count_nonzero(steps > at)) for at in range(positions)]


def _deepest(drafts: Drafts, labels: LabelTrie, state: int) -> int:
    """Maximum number of drafted tokens on a path, without tokens that labels force."""
    states, positions = np.empty((2, len(drafts.tokens)), np.int32)
    return int(
        _fill_positions(
            labels.token, labels.first, state, drafts.tokens, drafts.parents, states, positions
        )
    )


@borrowing
def _fill_positions(
    token: Any, first: Any, root: int, tokens: Any, parents: Any, states: Any, positions: Any
) -> int:
    deepest = 0
    for x in range(len(tokens)):
        above, at = parents[x], root
        positions[x] = 0
        if above >= 0:
            at, positions[x] = states[above], positions[above]
        positions[x] += first[at + 1] - first[at] > 1
        states[x] = child(token, first, at, tokens[x])
        deepest = max(deepest, positions[x])
    return deepest


@borrowing
def _forced_end(forced: Any, at: int) -> int:
    """The end of the forced tokens that begin at a place of an answer."""
    while at < len(forced) and forced[at]:
        at += 1
    return at


@compiled
def _outcome(
    tokens: Any, parents: Any, answer: Any, at: int, forced: Any, guided: bool
) -> tuple[int, int, int]:
    """Returns a draft's numbers of verified and of accepted nodes, and its deepest position.

    Args:
        at: Place in the answer where the draft begins.
        guided: Whether to leave out nodes that the answer's guide forbids, and nodes that save no
            forward because all later tokens are forced. Off the answer's path, each node counts as
            saving a forward.
    """
    n = len(tokens)
    place, position = np.empty(n, np.int32), np.empty(n, np.int32)
    kept, saves = np.ones(n, np.bool_), np.ones(n, np.bool_)
    for x in range(n):
        above = parents[x]
        here = at  # the answer's place of this node; -1 if its parent is off the answer's path
        if above >= 0:
            here = place[above] + 1 if place[above] >= 0 else -1
        on_path = 0 <= here < len(answer) and tokens[x] == answer[here]
        place[x] = here if on_path else -1
        position[x] = (position[above] if above >= 0 else 0) + 1
        if guided:
            is_forced = 0 <= here < len(answer) and forced[here]
            position[x] -= is_forced
            forbidden = (is_forced and not on_path) or here == len(answer)
            kept[x] = not forbidden and (above < 0 or kept[above])
            saves[x] = not on_path or (here + 1 < len(answer) and not forced[here + 1])
    verified = followed = deepest = 0
    for x in range(n - 1, -1, -1):
        kept[x] &= saves[x]
        if kept[x]:
            if parents[x] >= 0:
                saves[parents[x]] = True
            verified += 1
            followed += place[x] >= 0
            deepest = max(deepest, position[x])
    return verified, followed, deepest


def held_out(rows: int, seed: int = 1) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split row numbers into rows to index and rows to learn from.

    A twelfth of the rows is held out to learn from, but at least 100 rows, at most 600 rows, and
    never more than half.
    """
    count = min(max(rows // _SHARE, _MIN_HELD_OUT), _MAX_HELD_OUT, rows // 2)
    out = np.zeros(rows, bool)
    out[np.random.default_rng(seed).choice(rows, count, replace=False)] = True
    return np.flatnonzero(~out), np.flatnonzero(out)


def taught(
    index: DraftIndex,
    prompts: Tokens,
    outputs: Tokens,
    *,
    eos_id: int,
    settings: DraftSettings,
    epochs: int = EPOCHS,
    rate: float = RATE,
    progress: Callable[[], None] = lambda: None,
) -> NgramProposer:
    """A proposer whose weights maximise the likelihood of held-out answers, by gradient ascent.

    Args:
        index: An index without the held-out rows.
        prompts, outputs: The held-out rows; outputs without end-of-sequence.
        settings: Settings of the proposer that will use the weights. Recent answers are turned
            off, because from the second epoch on they would contain the held-out answers.
        progress: Called after each epoch.
    """
    rows = list(answers(prompts, outputs, eos_id))
    proposer = NgramProposer(
        dataclasses.replace(settings, mixture="mixed", recent_tokens=0),
        rows=1,
        capacity=max((len(p) + len(a) for p, a in rows), default=0) + 1,
        vocab_size=index.vocab_size,
        eos_ids=[eos_id],
        index=index,
        nodes=1,
    )
    for _ in range(epochs):
        for prompt, answer in rows:
            proposer.teach(prompt, answer, rate)
        progress()
    return proposer


def learn_weights(index: DraftIndex, prompts: Tokens, outputs: Tokens, **how: Any) -> Weights:
    """The weights of a `taught` proposer."""
    return taught(index, prompts, outputs, **how).weights


def corpus_weights(
    build: Callable[[Tokens, Tokens], DraftIndex], outputs: Tokens, prompts: Tokens, **how: Any
) -> Weights | None:
    """Weights learnt on some rows of a corpus with an index of the other rows.

    Returns None for a corpus of fewer than MIN_ROWS rows.

    Args:
        build: Builds an index from the outputs and the prompts of some rows.
        how: Arguments of `taught`.
    """
    if len(outputs) < MIN_ROWS:
        return None
    kept, held = held_out(len(outputs))
    index = build(outputs.take(kept), prompts.take(kept))
    return learn_weights(index, prompts.take(held), outputs.take(held), **how)


def build_learnt_index(
    outputs: Tokens,
    prompts: Tokens,
    *,
    eos_id: int,
    settings: DraftSettings = DraftSettings(),
    **facts: Any,
) -> DraftIndex:
    """Build an index with its `corpus_weights`; ``facts`` are other arguments of `build_index`.

    Args:
        settings: Settings of the proposer that will draft from the index.
    """

    def build(outputs: Tokens, prompts: Tokens) -> DraftIndex:
        return build_index(outputs, prompts, eos_id=eos_id, **facts)

    weights = corpus_weights(build, outputs, prompts, eos_id=eos_id, settings=settings)
    return dataclasses.replace(build(outputs, prompts), weights=weights)


def answers(prompts: Tokens, outputs: Tokens, eos_id: int) -> list[tuple[Int32, Int32]]:
    """Each row's prompt and answer: the first ANSWER_TOKENS of the output and end-of-sequence."""
    eos = np.array([eos_id], np.int32)
    p, o = prompts.offsets, outputs.offsets
    return [
        (
            np.asarray(prompts.ids[p[i] : p[i + 1]], np.int32),
            np.concatenate([outputs.ids[o[i] : o[i + 1]][:ANSWER_TOKENS], eos]).astype(np.int32),
        )
        for i in range(len(prompts))
    ]
