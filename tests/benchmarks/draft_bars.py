"""The figures a release is held to, each with its bar. It measures nothing and prints nothing.

Protocol: the first 400 test rows in file order, outputs cut at 512 tokens, the prompts' last 3,000,
end-of-sequence counts, the first step drafts; corpus and neighbours from train outputs only,
weights learnt on held-out train rows and following the answers; no answer of another test row is
drafted from. Tokens per step are all tokens over all steps of a task.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ROWS = 400
NODES = 8

# The best static drafter of another project at 8 nodes, whichever it was, its settings tuned:
# measured once on 400 rows of the same test sets.
STATIC_PEERS = {
    "clinc150": 2.65,
    "massive_en": 3.66,
    "nq_rag": 1.52,
    "pos_ewt": 2.65,
    "wikisql": 2.49,
    "sgd_calls": 3.23,
    "eurlex_labels": 2.32,
    "medquad": 2.30,
    "eurlex_summaries": 1.61,
}
OVER_PEERS = 1.05
NINE = tuple(STATIC_PEERS)
SEVEN = NINE[:7]

MEAN_NINE_8 = 3.05
MEAN_SEVEN = {4: 2.75, 32: 4.2}
STEP_P50_US, STEP_P99_US = 25.0, 80.0
START_P50_US = 500.0
BATCH_P50_US = 120.0
BUILD_CORPUS, BUILD_WHOLE = 5e6, 1.5e6
TWO_CORES = 1.7
CORPUS_BYTES, WHOLE_BYTES = 16.0, 45.0


@dataclass(frozen=True)
class Figure:
    """One measured figure beside its bar.

    Attributes:
        value: Of repeats, the median.
        least, greatest: Of repeats; None where the figure is no time.
        bar: None where nothing is asked.
        upwards: The figure must be at least the bar, else at most.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None
    upwards: bool = True
    least: float | None = None
    greatest: float | None = None

    @property
    def passed(self) -> bool | None:
        if self.bar is None:
            return None
        return bool(self.value >= self.bar if self.upwards else self.value <= self.bar)

    @property
    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "passed": self.passed}


def timed(
    name: str, repeats: Sequence[float], unit: str, bar: float | None, upwards: bool
) -> Figure:
    """A figure of repeats: their median, with the least and the greatest."""
    ordered = sorted(repeats)
    return Figure(name, ordered[len(ordered) // 2], unit, bar, upwards, ordered[0], ordered[-1])


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 0.0
