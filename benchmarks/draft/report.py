"""The bars of the drafts benchmark, its figures, its tables, and the record of the last line.

Protocol: the first 400 test rows in file order; outputs are cut at 512 tokens, prompts to their
last 3,000; end-of-sequence counts; the first step drafts. Corpus and neighbours come from train
outputs alone. Weights are learnt on held-out train rows and follow the answers. The answer of
another test row is not drafted from. Tokens per step are all tokens over all steps of a task.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common import Figure, digits, median_of, show_table
from benchmarks.draft.costs import BuildCosts, Costs
from benchmarks.draft.papers import METHODS, Papers
from benchmarks.draft.peers import PEERS
from benchmarks.draft.replays import REPEATS, Drafted, percentile
from tasc_draft import Replay

ROWS = 400
# The best static drafter of another project at 8 nodes, with tuned settings: measured once on 400
# rows of the same test sets.
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

Cells = Mapping[str, float | None]
By = Mapping[str, Drafted]


# Figures


def means(drafted: By, held: bool) -> list[Figure]:
    """Geometric means over nine and over seven tasks, where these are all there.

    Args:
        held: The rows are those that the bars were set for.
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
    """Each task at 8 nodes; the bar is that of the best static peer."""
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
    """Times of a step and of a start over all steps and rows of all tasks."""
    steps = pooled([[r.draft_us for r in d.repeats] for d in drafted.values()])
    starts = pooled([[r.start_us for r in d.repeats] for d in drafted.values()])
    batches = pooled(list(costs.batch_us.values()))
    return [
        Figure.of_runs(name, [percentile(us, q) for us in repeats], "us", bar, upwards=False)
        for name, repeats, q, bar in (
            ("propose + observe p50, 8 nodes", steps, 50, STEP_P50_US),
            ("propose + observe p99, 8 nodes", steps, 99, STEP_P99_US),
            ("start p50", starts, 50, START_P50_US),
            ("8 rows, 64 nodes: propose + observe p50", batches, 50, BATCH_P50_US),
        )
    ]


def builds(costs: Costs, held: bool) -> list[Figure]:
    """Speed and size of indexes; a speed is that of building all tasks' indexes in sequence."""
    every, cores = list(costs.build.values()), f"two processes, {costs.cores_task}: "
    corpus = [speed(every, i, whole=False) for i in range(REPEATS)]
    whole = [speed(every, i, whole=True) for i in range(REPEATS)]
    bars = (BUILD_CORPUS, BUILD_WHOLE, TWO_CORES) if held else (None, None, None)
    return [
        Figure.of_runs("index build, corpus only", corpus, "tokens/s", bars[0]),
        Figure.of_runs("index build, all parts", whole, "tokens/s", bars[1]),
        Figure.of_runs(f"{cores}sort", costs.cores.sorting, "x", bars[2]),
        Figure.of_runs(f"{cores}sort, by processor time", costs.cores.work, "x"),
        Figure.of_runs(f"{cores}all of it", costs.cores.corpus, "x"),
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
    """Tokens per second: of the outputs for the corpus part, of all that is read for all parts."""
    if whole:
        return sum(b.tokens for b in built) / sum(b.whole_s[repeat] for b in built)
    return sum(b.corpus_tokens for b in built) / sum(b.corpus_s[repeat] for b in built)


def pooled(tasks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Times of all tasks together, by repeat, from times by task and repeat."""
    return [[us for task in tasks for us in task[i]] for i in range(REPEATS)]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 0.0


# Tables


def show_steps(drafted: By, held: bool) -> None:
    """Tokens per step at 8 nodes: ours, the peers on the same rows, the bar and the ceiling."""
    rows: list[list[str] | None] = [
        with_mean("ours", {n: d.repeats[0].tokens_per_step for n, d in drafted.items()}),
        with_mean("ours, frozen", {n: d.frozen.tokens_per_step for n, d in drafted.items()}),
    ]
    for name in next(iter(drafted.values())).peers:
        rows.append(with_mean(name, {n: d.peers[name].tokens_per_step for n, d in drafted.items()}))
    if any(d.peers for d in drafted.values()):
        over = {n: over_peers(d) for n, d in drafted.items()}
        rows.append(with_mean("ours over the best peer here", over))
    rows.append(None)
    if held:
        bars = {n: STATIC_PEERS[n] for n in drafted if n in STATIC_PEERS}
        rows.append(with_mean("best static peer, measured once", bars))
        rows.append(with_mean("bar", {n: OVER_PEERS * bar for n, bar in bars.items()}))
    rows.append(with_mean("ceiling: copy bound", {n: d.ceiling for n, d in drafted.items()}))
    show_table("tokens per step, 8 nodes, same rows", ["drafter", *drafted, "mean"], rows)


def show_missing() -> None:
    """Name the peers that are not installed."""
    for peer in PEERS:
        if peer.version is None:
            names = ", ".join(peer.names)
            print(f"not installed: {peer.package} ({names}); pip install {peer.package}")


def show_costs(drafted: By, costs: Costs) -> None:
    """Costs of each task, medians of the repeats."""
    headings = ("", "step p50 us", "step p99 us", "start p50 us", "batch p50 us", "nodes/step",
                "corpus tok/s", "all parts tok/s", "corpus B/tok", "all parts B/tok")  # fmt: skip
    rows = []
    for name, found in drafted.items():
        built, first = costs.build[name], found.repeats[0]
        steps, starts = ([getattr(r, t) for r in found.repeats] for t in ("draft_us", "start_us"))
        cells = [
            *(median_of([percentile(us, q) for us in steps]) for q in (50, 99)),
            median_of([percentile(us, 50) for us in starts]),
            median_of([percentile(us, 50) for us in costs.batch_us[name]]),
            first.nodes / first.steps,
            *(median_of([speed([built], i, w) for i in range(REPEATS)]) for w in (False, True)),
            built.corpus_bytes / built.corpus_tokens,
            built.whole_bytes / built.tokens,
        ]
        rows.append([name, *map(digits, cells)])
    show_table("costs by task, medians of the repeats", headings, rows)


def show_papers(found: Papers) -> None:
    for title, by_method in (("", found.table_3), (", the shipped tasks", found.table_3_shipped)):
        if by_method:
            show_methods(title, by_method)
    deepest = max(len(rates) for rates in found.figure_4.values())
    show_table(
        "TASC Figure 4: acceptance of tasc chains by position",
        ["position", *(str(i + 1) for i in range(deepest))],
        [[task, *(f"{rate:.2f}" for rate in rates)] for task, rates in found.figure_4.items()],
    )
    lambdas = next(iter(found.figure_7.values()))
    show_table(
        "TASC Figure 7: tokens per step of tasc by lambda, rows to tune on",
        ["lambda", *found.figure_7, "mean"],
        [
            with_mean(f"{weight:.1f}", {task: by[weight] for task, by in found.figure_7.items()})
            for weight in lambdas
        ],
    )
    for task, shapes in found.trie_2.items():
        show_shapes(task, shapes)
    sizes = next(iter(found.trie_3.values()))
    show_table(
        "N-Gram Trie Table 3: tokens per step by num_draft, n 13, L_p 3",
        ["num_draft", *found.trie_3],
        [[str(n), *(f"{by[n]:.3f}" for by in found.trie_3.values())] for n in sizes],
    )


def show_methods(title: str, found: Mapping[str, Cells]) -> None:
    """TASC Table 3; the columns are tasks."""
    by_method = {m: {task: by[m] for task, by in found.items()} for m in METHODS}
    show_table(
        f"TASC Table 3{title}: tokens per step, chains of 8",
        ["", *found, "mean"],
        [with_mean(method, cells) for method, cells in by_method.items()],
    )
    if any(None in cells.values() for cells in by_method.values()):
        print("n-grammys need the target's own table: --bigrams FILE of `tasc model-bigrams`")


def show_shapes(task: str, found: Mapping[int, Mapping[int, float]]) -> None:
    """N-Gram Trie Table 2; the best cell is bold."""
    best = max(value for row in found.values() for value in row.values())
    show_table(
        f"N-Gram Trie Table 2, {task}: tokens per step, num_draft 32",
        ["n", *(f"L_p {p}" for p in next(iter(found.values())))],
        [
            [str(n), *(f"[bold]{v:.3f}[/]" if v == best else f"{v:.3f}" for v in row.values())]
            for n, row in found.items()
        ],
    )


def over_peers(found: Drafted) -> float:
    best = max(peer.tokens_per_step for peer in found.peers.values())
    return found.repeats[0].tokens_per_step / best


def with_mean(name: str, cells: Cells) -> list[str]:
    """A row of tokens per step, with their geometric mean at the end."""
    values = list(cells.values())
    known = [value for value in values if value is not None]
    mean = geometric_mean(known) if known and len(known) == len(values) else None
    return [name, *("-" if value is None else f"{value:.2f}" for value in [*values, mean])]


# The record


def tasks_record(drafted: By) -> dict[str, Any]:
    """Counts and tokens per step of each task; times are in `costs_record`."""
    return {
        name: {
            **replay_record(found.repeats[0]),
            "frozen": found.frozen.tokens_per_step,
            "by_nodes": found.sizes,
            "ceiling": found.ceiling,
            "peers": {peer: replay_record(r) for peer, r in found.peers.items()},
        }
        for name, found in drafted.items()
    }


def replay_record(found: Replay) -> dict[str, Any]:
    return {
        "tokens_per_step": found.tokens_per_step,
        "rows": found.rows,
        "steps": found.steps,
        "tokens": found.tokens,
        "draft_tokens": found.nodes,
        "drafted_steps": found.drafted_steps,
        "step_us": [percentile(found.draft_us, q) for q in (50, 99)],
        "start_us": [percentile(found.start_us, q) for q in (50, 99)],
    }


def costs_record(drafted: By, costs: Costs) -> dict[str, Any]:
    """Percentiles 50 and 99 of the times of each repeat, and the costs of building."""
    return {
        "tasks": {
            name: {
                "step_us": _percentiles([r.draft_us for r in found.repeats]),
                "start_us": _percentiles([r.start_us for r in found.repeats]),
                "batch_us": _percentiles(costs.batch_us[name]),
                "build": asdict(costs.build[name]),
            }
            for name, found in drafted.items()
        },
        "two_processes": {"task": costs.cores_task, **asdict(costs.cores)},
    }


def _percentiles(repeats: list[list[float]]) -> list[list[float]]:
    return [[percentile(us, q) for q in (50, 99)] for us in repeats]
