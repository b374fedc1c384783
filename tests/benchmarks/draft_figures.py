"""From what was measured to the figures that have bars. It measures nothing, prints nothing."""

from collections.abc import Mapping, Sequence

from draft_bars import (
    BATCH_P50_US,
    BUILD_CORPUS,
    BUILD_WHOLE,
    CORPUS_BYTES,
    MEAN_NINE_8,
    MEAN_SEVEN,
    NINE,
    OVER_PEERS,
    SEVEN,
    START_P50_US,
    STATIC_PEERS,
    STEP_P50_US,
    STEP_P99_US,
    TWO_CORES,
    WHOLE_BYTES,
    Figure,
    geometric_mean,
    timed,
)
from draft_costs import BuildCosts, Costs
from draft_replays import REPEATS, Drafted, percentile

By = Mapping[str, Drafted]


def means(drafted: By, held: bool) -> list[Figure]:
    """Geometric means over the tasks that the bars are for, as far as they are all there.

    Args:
        held: The rows are those that the bars are for.
    """
    found = []
    if set(drafted) >= set(NINE):
        nine, bar = [drafted[name] for name in NINE], MEAN_NINE_8 if held else None
        values = [d.repeats[0].tokens_per_step for d in nine]
        frozen = [d.frozen.tokens_per_step for d in nine]
        found += [
            Figure("nine tasks, 8 nodes", geometric_mean(values), "tokens/step", bar),
            Figure("nine tasks, 8 nodes, frozen", geometric_mean(frozen), "tokens/step"),
        ]
    if set(drafted) >= set(SEVEN):
        for nodes, bar in MEAN_SEVEN.items():
            value = geometric_mean(drafted[name].sizes[nodes] for name in SEVEN)
            name = f"seven tasks, {nodes} nodes"
            found.append(Figure(name, value, "tokens/step", bar if held else None))
    return found


def by_task(drafted: By, held: bool) -> list[Figure]:
    """Each task at 8 nodes, against the best static peer."""
    return [
        Figure(
            f"{name}, 8 nodes",
            found.repeats[0].tokens_per_step,
            "tokens/step",
            OVER_PEERS * STATIC_PEERS[name] if held and name in STATIC_PEERS else None,
        )
        for name, found in drafted.items()
    ]


def times(drafted: By, costs: Costs) -> list[Figure]:
    """A step and a start, over all steps and rows of all tasks; long answers have most steps."""
    steps = pooled([[r.draft_us for r in d.repeats] for d in drafted.values()])
    starts = pooled([[r.start_us for r in d.repeats] for d in drafted.values()])
    batches = pooled(list(costs.batch_us.values()))
    return [
        timed(name, [percentile(us, q) for us in repeats], "us", bar, False)
        for name, repeats, q, bar in (
            ("propose + observe p50, 8 nodes", steps, 50, STEP_P50_US),
            ("propose + observe p99, 8 nodes", steps, 99, STEP_P99_US),
            ("start p50", starts, 50, START_P50_US),
            ("8 rows, 64 nodes: propose + observe p50", batches, 50, BATCH_P50_US),
        )
    ]


def builds(costs: Costs, held: bool) -> list[Figure]:
    """Speed and size of indexes; the speeds of all tasks' indexes, one behind the other."""
    every = list(costs.build.values())
    corpus = [speed(every, i, whole=False) for i in range(REPEATS)]
    whole = [speed(every, i, whole=True) for i in range(REPEATS)]
    cores = f"two processes, {costs.cores_task}: "
    return [
        timed("index build, corpus only", corpus, "tokens/s", BUILD_CORPUS if held else None, True),
        timed("index build, all parts", whole, "tokens/s", BUILD_WHOLE if held else None, True),
        timed(f"{cores}sort", costs.cores.sorting, "x", TWO_CORES if held else None, True),
        timed(f"{cores}sort, by processor time", costs.cores.work, "x", None, True),
        timed(f"{cores}all of it", costs.cores.corpus, "x", None, True),
        Figure(
            "index size, corpus only, worst task",
            max(b.corpus_bytes / b.corpus_tokens for b in every),
            "bytes/token", CORPUS_BYTES, False,
        ),
        Figure(
            "index size, all parts, worst task",
            max(b.whole_bytes / b.tokens for b in every),
            "bytes/token", WHOLE_BYTES, False,
        ),
    ]  # fmt: skip


def speed(built: Sequence[BuildCosts], repeat: int, whole: bool) -> float:
    """Tokens per second: of the outputs for the corpus part, of all that is read for the whole."""
    if whole:
        return sum(b.tokens for b in built) / sum(b.whole_s[repeat] for b in built)
    return sum(b.corpus_tokens for b in built) / sum(b.corpus_s[repeat] for b in built)


def pooled(tasks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Times of all tasks together, by repeat, from times by task and repeat."""
    return [[us for task in tasks for us in task[i]] for i in range(REPEATS)]
