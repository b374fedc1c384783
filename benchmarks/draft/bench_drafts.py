"""Replay drafts: tokens per step and costs with their bars, peers, and the papers' tables.

    python benchmarks/draft/bench_drafts.py --data DIR --tokenizer PATH
    python benchmarks/draft/bench_drafts.py

DIR has a folder for each task with ``train.jsonl.gz`` and ``test.jsonl.gz`` (fields input and
output). Without it the two tasks that ship with the demo are measured, in the tokens of their
model; they have no bars on tokens per step. `report` describes the protocol and the bars, `peers`
the peers, and `papers` the papers' tables. No model runs, except for the bigram table of the
shipped one. Progress goes to stderr; the last line of stdout is one JSON object.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    add_json,
    at_least,
    finish,
    git_revision,
    listed,
    names_of,
    parser_of,
    processor,
    show_figures,
    versions,
)
from benchmarks.draft.costs import costs, parts_of
from benchmarks.draft.papers import papers, papers_of
from benchmarks.draft.peers import PEERS
from benchmarks.draft.replays import NODES, learnt_index, of_task, replays_of
from benchmarks.draft.report import (
    NINE,
    ROWS,
    builds,
    by_task,
    costs_record,
    means,
    show_costs,
    show_missing,
    show_papers,
    show_steps,
    tasks_record,
    times,
)
from benchmarks.draft.tasks import Task, missing_splits, of_demo, of_folder
from tasc_draft.index.bigrams import read_bigrams
from tasc_jobs.demo.tasks import TASKS
from tasc_runtime.progress import note, show_progress

TABLES = ("bar", "peers", "papers")


def main() -> None:
    options = arguments()
    tasks = load(options)
    held = options.data is not None and options.limit == ROWS
    machine = {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()}
    found = {
        "benchmark": "drafts",
        "git": git_revision(),
        "versions": {
            **versions("numpy", "numba", "tokenizers", "transformers", "torch"),
            **{peer.package: peer.version for peer in PEERS},
        },
        "machine": machine,
        "rows": options.limit,
        "nodes": NODES,
        "data": options.data.name if options.data else "shipped",
        "tokenizer": tasks[0].facts["fingerprint"],
    }
    if {"bar", "peers"} & set(options.tables):
        found |= replayed(tasks, options.tables, held)
    if "papers" in options.tables:
        found["papers"] = repeated(tasks, options)
    machine["load_at_end"] = os.getloadavg()
    finish(found, options.json)


def replayed(tasks: list[Task], tables: list[str], held: bool) -> dict[str, Any]:
    """The table of the bars, and the peers."""
    indexes = {}
    with show_progress("index", len(tasks), "tasks") as bar:
        for task in tasks:
            indexes[task.name] = learnt_index(task)
            bar.advance()
    peers = "peers" in tables
    with show_progress("replay", replays_of(peers) * len(tasks), "replays") as bar:
        drafted = {t.name: of_task(t, indexes[t.name], peers, bar.advance) for t in tasks}
    show_steps(drafted, held)
    if peers:
        show_missing()
    figures = means(drafted, held) + by_task(drafted, held)
    found: dict[str, Any] = {"tasks": tasks_record(drafted)}
    if "bar" in tables:
        with show_progress("costs", parts_of(tasks), "runs") as bar:
            cost = costs(tasks, indexes, bar.advance)
        show_costs(drafted, cost)
        figures += times(drafted, cost) + builds(cost, held)
        found["costs"] = costs_record(drafted, cost)
    show_figures(figures)
    return found | {"figures": [figure.record for figure in figures]}


def repeated(tasks: list[Task], options: argparse.Namespace) -> dict[str, Any]:
    """The papers' tables; the shipped tasks are always among them, as their model is available."""
    of_data = tasks if options.data else []
    shipped = [of_demo(name, options.limit) for name in TASKS] if options.data else tasks
    bigrams = None
    if options.bigrams and of_data:
        bigrams = read_bigrams(options.bigrams, of_data[0].facts["fingerprint"])
    with show_progress("papers' tables", papers_of(of_data, shipped), "parts") as bar:
        found = papers(of_data, shipped, bigrams, bar.advance)
    show_papers(found)
    return asdict(found)


def load(options: argparse.Namespace) -> list[Task]:
    """The tasks; those of the nine that are missing are named and left out."""
    if options.data is None:
        return [of_demo(name, options.limit) for name in options.tasks or TASKS]
    if options.tokenizer is None:
        raise SystemExit("--data needs --tokenizer: a tokenizer.json or the folder it is in")
    names = options.tasks or [n for n in NINE if there(options.data / n)]
    if not names:
        raise SystemExit(f"{options.data} has none of {', '.join(NINE)}; name others by --tasks")
    with show_progress("tokenise", len(names), "tasks") as bar:
        tasks = []
        for name in names:
            tasks.append(of_folder(options.data, name, options.tokenizer, options.limit))
            bar.advance()
    return tasks


def there(folder: Path) -> bool:
    """Whether a task can be measured; if not, a message names what is missing."""
    if missing := missing_splits(folder):
        note(f"{folder.name} left out: {folder} has no {' and no '.join(missing)}.jsonl.gz")
    return not missing


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="folder of data sets; unset: the shipped tasks")
    add("--tokenizer", type=Path, help="tokenizer of the tokens that --data is measured in")
    add("--tasks", type=listed, help="names of tasks, with commas between")
    add("--limit", type=at_least(1), default=ROWS, help=f"test rows of a task ({ROWS})")
    add("--tables", type=names_of(*TABLES), default=TABLES, help=f"tables ({', '.join(TABLES)})")
    add("--bigrams", type=Path, help="file of `tasc model-bigrams`, for n-grammys")
    add_json(parser)
    options = parser.parse_args()
    if options.data is None and (unknown := set(options.tasks or ()) - set(TASKS)):
        parser.error(f"{', '.join(sorted(unknown))}: only {', '.join(TASKS)} ship; give --data")
    return options


if __name__ == "__main__":
    main()
