"""Guests' trees, and what both say mixed in plain Python: no code of the kernels."""

import math
from collections.abc import Sequence

import numpy as np
from draft_cases import (
    begun,
    ids,
    make_index,
    make_proposer,
)
from draft_reference import Path
from hypothesis import strategies as st

from tasc_draft import SOURCES, Drafts, DraftSettings, NgramProposer
from tasc_draft.mixture.guests import LEAST, SURE, UNNAMED

Guests = dict[Path, float]  # the chance of each path's last token behind the others


@st.composite
def guests(draw: st.DrawFn) -> Guests:
    paths: list[Path] = [()]
    found: Guests = {}
    for _ in range(draw(st.integers(0, 8))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 8)))
        if path not in found:
            left = 1 - sum(said_by(found, path[:-1]).values())
            found[path] = left * draw(st.integers(1, 99)) / 100  # sure ones, too
            paths.append(path)
    return found


def drafts_of(rows: Sequence[Guests]) -> Drafts:
    tokens, parents, depths, logp, offsets = [], [], [], [], [0]
    for row in rows:
        places: dict[Path, int] = {(): -1}
        for path in sorted(row, key=len):
            places[path] = len(places) - 1
            tokens.append(path[-1])
            parents.append(places[path[:-1]])
            depths.append(len(path))
            logp.append(sum(math.log(row[path[: i + 1]]) for i in range(len(path))))
        offsets.append(len(tokens))
    return Drafts(
        ids(tokens), ids(parents), np.array(depths, np.int16), ids(offsets),
        np.array(logp, np.float32), np.full(len(tokens), SOURCES.index("neural"), np.int8),
    )  # fmt: skip


def said_by(guest: Guests, path: Path) -> dict[int, float]:
    return {p[-1]: chance for p, chance in guest.items() if p[:-1] == path}


def both(
    own: dict[int, float], others: dict[int, float], numbers: Sequence[float]
) -> tuple[dict[int, float], float]:
    """The chance of each token, and of none of them.

    Args:
        numbers: Two exponents, what is added for tokens each did not name, and for all others.
    """
    if not own:
        return others, 1 - sum(others.values())
    raw, none = dict.fromkeys(own | others, 1.0), math.exp(numbers[4])
    for side, by, added in zip((own, others), numbers, numbers[2:], strict=False):
        left, unnamed = 1 - sum(side.values()), len(raw) - len(side)
        shared = UNNAMED * left if unnamed else 0.0
        for token in raw:
            named = side.get(token)
            raw[token] *= max(named or shared / unnamed, LEAST) ** by
            raw[token] *= 1.0 if named else math.exp(added)
        none *= max(left - shared, LEAST) ** by
    whole = sum(raw.values()) + none
    return {token: chance / whole for token, chance in raw.items()}, none / whole


def cell(own: dict[int, float], depth: int) -> int:
    """Of the numbers that a node has besides those of all nodes."""
    return 1 + 3 * (depth > 0) + sum(max(own.values()) > sure for sure in SURE)


def numbers_at(trust: np.ndarray, own: dict[int, float], depth: int) -> list[float]:
    found = trust[0] + trust[cell(own, depth)]
    return [*np.maximum(found[:2], 0.0).tolist(), *found[2:].tolist()]


def ngrams(mixture: str = "mixed") -> NgramProposer:
    setting = DraftSettings(
        mixture=mixture, min_prob=0.0, recent_tokens=0, num_speculative_tokens=12
    )
    return make_proposer(make_index([[1, 2, 3], [4, 5, 1]] * 9), setting)


def with_guest(proposer: NgramProposer, *rows: Guests) -> Drafts:
    return proposer.propose(ids(range(len(rows))), ids([12] * len(rows)), None, drafts_of(rows))


def trust(proposer: NgramProposer) -> np.ndarray:
    return proposer._learnt.trust.copy()


def set_trust(proposer: NgramProposer, trust: np.ndarray) -> None:
    proposer._learnt.trust[:] = trust


def told(proposer: NgramProposer, guest: Guests, *said: int) -> None:
    """One answer, drafted for once."""
    begun(proposer, 0, [], [])
    with_guest(proposer, guest)
    proposer.observe(0, ids(said))
    proposer.finish(0)
