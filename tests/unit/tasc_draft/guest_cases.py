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
from tasc_draft.mixture.guests import LEAST, UNNAMED

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
    own: dict[int, float], others: dict[int, float], trust: tuple[float, float]
) -> tuple[dict[int, float], float]:
    """The chance of each token, and of none of them."""
    if not own:
        return others, 1 - sum(others.values())
    raw, none = dict.fromkeys(own | others, 1.0), 1.0
    for side, by in zip((own, others), trust, strict=True):
        left, unnamed = 1 - sum(side.values()), len(raw) - len(side)
        shared = UNNAMED * left if unnamed else 0.0
        for token in raw:
            named = side.get(token) or shared / unnamed
            raw[token] *= max(named, LEAST) ** by
        none *= max(left - shared, LEAST) ** by
    whole = sum(raw.values()) + none
    return {token: chance / whole for token, chance in raw.items()}, none / whole


def ngrams(mixture: str = "mixed") -> NgramProposer:
    setting = DraftSettings(
        mixture=mixture, min_prob=0.0, recent_tokens=0, num_speculative_tokens=12
    )
    return make_proposer(make_index([[1, 2, 3], [4, 5, 1]] * 9), setting)


def with_guest(proposer: NgramProposer, *rows: Guests) -> Drafts:
    return proposer.propose(ids(range(len(rows))), ids([12] * len(rows)), None, drafts_of(rows))


def trust(proposer: NgramProposer) -> np.ndarray:
    return proposer._learnt.trust.copy()


def told(proposer: NgramProposer, guest: Guests, *said: int) -> None:
    """One answer, drafted for once."""
    begun(proposer, 0, [], [])
    with_guest(proposer, guest)
    proposer.observe(0, ids(said))
    proposer.finish(0)
