"""The benchmark's tables for people. It computes no figure but the means it prints in passing."""

from collections.abc import Mapping, Sequence

from draft_bars import OVER_PEERS, STATIC_PEERS, Figure, geometric_mean
from draft_costs import Costs
from draft_figures import speed
from draft_papers import METHODS, Papers
from draft_peers import PEERS
from draft_replays import REPEATS, Drafted, percentile
from rich.console import Console
from rich.table import Table

Cells = Mapping[str, float | None]
COSTS = ("", "step p50 us", "step p99 us", "start p50 us", "batch p50 us", "nodes/step",
         "corpus tok/s", "all parts tok/s", "corpus B/tok", "all parts B/tok")  # fmt: skip
_MARKS = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: ""}


def show_steps(console: Console, drafted: Mapping[str, Drafted], held: bool) -> None:
    """Tokens per step at 8 nodes: ours, the peers on the same rows, the bar and the ceiling."""
    table = table_of("tokens per step, 8 nodes, same rows", ["drafter", *drafted, "mean"])
    add_means(table, "ours", {n: d.repeats[0].tokens_per_step for n, d in drafted.items()})
    add_means(table, "ours, frozen", {n: d.frozen.tokens_per_step for n, d in drafted.items()})
    for name in next(iter(drafted.values())).peers:
        add_means(table, name, {n: d.peers[name].tokens_per_step for n, d in drafted.items()})
    if any(d.peers for d in drafted.values()):
        cells = {n: over_peers(d) for n, d in drafted.items()}
        add_means(table, "ours over the best peer here", cells)
    table.add_section()
    if held:
        bars = {n: STATIC_PEERS[n] for n in drafted if n in STATIC_PEERS}
        add_means(table, "best static peer, measured once", bars)
        add_means(table, "bar", {n: OVER_PEERS * bar for n, bar in bars.items()})
    add_means(table, "ceiling: perfect-choice copy", {n: d.ceiling for n, d in drafted.items()})
    console.print(table)


def show_missing(console: Console) -> None:
    """The peers that were left out."""
    for peer in PEERS:
        if peer.version is None:
            names = ", ".join(peer.names)
            console.print(f"not installed: {peer.package} ({names}); pip install {peer.package}")


def show_figures(console: Console, figures: Sequence[Figure]) -> None:
    """Each figure with its bar and its mark; of times the median, the least and the greatest."""
    headings = ["figure", "measured", "least", "greatest", "bar", "", ""]
    table = table_of("bars", headings)
    for f in figures:
        sign = ">=" if f.upwards else "<="
        bar = f"{sign} {digits(f.bar)}" if f.bar is not None else ""
        spread = [digits(x) if x is not None else "" for x in (f.least, f.greatest)]
        table.add_row(f.name, digits(f.value), *spread, bar, f.unit, _MARKS[f.passed])
    console.print(table)


def show_costs(console: Console, drafted: Mapping[str, Drafted], costs: Costs) -> None:
    """Costs task by task, the median of the repeats."""
    table = table_of("costs by task, medians of the repeats", COSTS)
    for name, found in drafted.items():
        built, first = costs.build[name], found.repeats[0]
        steps, starts = ([getattr(r, t) for r in found.repeats] for t in ("draft_us", "start_us"))
        table.add_row(
            name,
            *(median_of([percentile(us, q) for us in steps]) for q in (50, 99)),
            median_of([percentile(us, 50) for us in starts]),
            median_of([percentile(us, 50) for us in costs.batch_us[name]]),
            digits(first.nodes / first.steps),
            *(median_of([speed([built], i, w) for i in range(REPEATS)]) for w in (False, True)),
            digits(built.corpus_bytes / built.corpus_tokens),
            digits(built.whole_bytes / built.tokens),
        )
    console.print(table)


def show_papers(console: Console, found: Papers) -> None:
    for title, by_task in (("", found.table_3), (", the shipped tasks", found.table_3_shipped)):
        if by_task:
            show_methods(console, title, by_task)
    show_acceptance(console, found.figure_4)
    show_lambdas(console, found.figure_7)
    for task, shapes in found.trie_2.items():
        show_shapes(console, task, shapes)
    show_sizes(console, found.trie_3)


def show_methods(console: Console, title: str, found: Mapping[str, Cells]) -> None:
    """TASC Table 3, tasks as columns."""
    table = table_of(f"TASC Table 3{title}: tokens per step, chains of 8", ["", *found, "mean"])
    missing = False
    for method in METHODS:
        cells = {task: by_method[method] for task, by_method in found.items()}
        missing |= None in cells.values()
        add_means(table, method, cells)
    console.print(table)
    if missing:
        console.print(
            "n-grammys need the target's own table: --bigrams FILE of `tasc model-bigrams`"
        )


def show_acceptance(console: Console, found: Mapping[str, Sequence[float]]) -> None:
    """TASC Figure 4, positions as columns."""
    deepest = max(len(rates) for rates in found.values())
    headings = ["position", *(str(i + 1) for i in range(deepest))]
    table = table_of("TASC Figure 4: acceptance of tasc chains by position", headings)
    for task, rates in found.items():
        table.add_row(task, *(f"{rate:.2f}" for rate in rates))
    console.print(table)


def show_lambdas(console: Console, found: Mapping[str, Mapping[float, float]]) -> None:
    """TASC Figure 7, tasks as columns."""
    title = "TASC Figure 7: tokens per step of tasc by lambda, rows to tune on"
    table = table_of(title, ["lambda", *found, "mean"])
    for weight in next(iter(found.values())):
        add_means(table, f"{weight:.1f}", {task: by[weight] for task, by in found.items()})
    console.print(table)


def show_shapes(console: Console, task: str, found: Mapping[int, Mapping[int, float]]) -> None:
    """N-Gram Trie Table 2, the best cell bold."""
    best = max(value for row in found.values() for value in row.values())
    prefixes = next(iter(found.values()))
    title = f"N-Gram Trie Table 2, {task}: tokens per step, num_draft 32"
    table = table_of(title, ["n", *(f"L_p {p}" for p in prefixes)])
    for n, row in found.items():
        cells = (f"[bold]{v:.3f}[/]" if v == best else f"{v:.3f}" for v in row.values())
        table.add_row(str(n), *cells)
    console.print(table)


def show_sizes(console: Console, found: Mapping[str, Mapping[int, float]]) -> None:
    """N-Gram Trie Table 3, tasks as columns."""
    title = "N-Gram Trie Table 3: tokens per step by num_draft, n 13, L_p 3"
    table = table_of(title, ["num_draft", *found])
    for n in next(iter(found.values())):
        table.add_row(str(n), *(f"{by[n]:.3f}" for by in found.values()))
    console.print(table)


def table_of(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=not i)
    return table


def over_peers(found: Drafted) -> float:
    best = max(peer.tokens_per_step for peer in found.peers.values())
    return found.repeats[0].tokens_per_step / best


def add_means(table: Table, name: str, cells: Cells) -> None:
    """A row of tokens per step, with their geometric mean behind them."""
    values = list(cells.values())
    known = [value for value in values if value is not None]
    mean = geometric_mean(known) if known and len(known) == len(values) else None
    texts = ("-" if value is None else f"{value:.2f}" for value in [*values, mean])
    table.add_row(name, *texts)


def digits(value: float) -> str:
    """Three digits where they tell something, whole numbers with commas."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def median_of(repeats: Sequence[float]) -> str:
    return digits(sorted(repeats)[len(repeats) // 2])
