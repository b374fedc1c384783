"""The engine's figures beside their bars. It measures nothing and prints nothing.

A ratio is taken repeat by repeat, of runs of the same turn, so that a machine that gets slower
slows both; told are the median, the least and the greatest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from draft_bars import Figure, timed
from engine_ceiling import Ceiling
from engine_equal import Equality
from engine_loop import Ran
from engine_sides import Measured

DRAFTED_8, DRAFTED_1 = 2.5, 4.0  # asked of massive_en
OVER_TRANSFORMERS, OVER_OPENVINO, OVER_BEST_PEER = 1.5, 0.9, 1.5
OVERHEAD, UNPREDICTABLE = 0.10, 0.98


@dataclass(frozen=True)
class Found:
    """All that was measured of one task."""

    task: str
    measured: tuple[Measured, ...]
    ceiling: Ceiling
    exact: Equality
    rounded: Equality | None

    def of(self, side: str, setting: str) -> Measured | None:
        for found in self.measured:
            if (found.side, found.setting) == (side, setting):
                return found
        return None

    @property
    def best_peer(self) -> Measured | None:
        """The peer's setting with the most tokens a second."""
        peers = [m for m in self.measured if m.side != "ours"]
        return max(peers, key=lambda m: median(speeds(m)), default=None)


def speeds(found: Measured) -> list[float]:
    """Tokens a second of each run, end-of-sequence included."""
    return [ran.tokens / ran.seconds for ran in found.runs]


def shares(ran: Ran) -> tuple[float | None, float | None, float | None]:
    """Of a run's time: draft, verify, rest; None where a side does not tell."""
    if ran.verify is None:
        return None, None, None
    draft = (ran.draft or 0.0) / ran.seconds
    verify = ran.verify / ran.seconds
    return draft, verify, 1 - draft - verify


def milliseconds(found: Measured, what: str, percent: float) -> float | None:
    """Of ``latency`` or ``first`` over the requests, the median of the runs."""
    runs = [getattr(ran, what) for ran in found.runs]
    if not all(runs):
        return None
    return 1000 * median(float(np.percentile(seconds, percent)) for seconds in runs)


def step_ms(found: Measured) -> float | None:
    if not all(ran.steps for ran in found.runs):
        return None
    return 1000 * median(ran.seconds / ran.steps for ran in found.runs)


def block_efficiency(found: Measured) -> float | None:
    ran = found.runs[0]
    return ran.tokens / ran.row_steps if ran.row_steps else None


def figures(found: Found) -> list[Figure]:
    """One task's, those that have a bar; a peer that did not run has none."""
    bars = (DRAFTED_8, DRAFTED_1) if found.task == "massive_en" else (None, None)
    pairs = [
        ("plain / transformers", "plain 8", found.of("transformers", "plain 8"), OVER_TRANSFORMERS),
        ("plain / openvino", "plain 8", found.of("openvino", "plain 8"), OVER_OPENVINO),
        ("drafted / plain, b=8", "drafted 8", found.of("ours", "plain 8"), bars[0]),
        ("drafted / plain, b=1", "drafted 1", found.of("ours", "plain 1"), bars[1]),
        ("drafted / best peer", "drafted 8", found.best_peer, OVER_BEST_PEER),
        ("unpredictable / plain", "random 8", found.of("ours", "plain 8"), UNPREDICTABLE),
    ]
    made = [
        ratio(found, name, setting, other, bar)
        for name, setting, other, bar in pairs
        if other is not None
    ]
    return [*made, overhead(found)]


def ratio(found: Found, name: str, setting: str, other: Measured, bar: float | None) -> Figure:
    ours = found.of("ours", setting)
    assert ours is not None, f"ours {setting} always runs"
    ratios = [a / b for a, b in zip(speeds(ours), speeds(other), strict=True)]
    return timed(f"{found.task}: {name}", ratios, "x", bar, upwards=True)


def overhead(found: Found) -> Figure:
    """Share of a drafted run that is neither drafting nor verifying."""
    ours = found.of("ours", "drafted 8")
    assert ours is not None, "drafted 8 always runs"
    rest = [share for ran in ours.runs if (share := shares(ran)[2]) is not None]
    return timed(f"{found.task}: overhead share", rest, "", OVERHEAD, upwards=False)


def worst(all_figures: Sequence[Figure], name: str) -> float | None:
    """Over tasks, the value farthest on the wrong side; None where nothing was measured."""
    own = [f for f in all_figures if f.name.endswith(f": {name}")]
    if not own:
        return None
    return min(f.value for f in own) if own[0].upwards else max(f.value for f in own)
