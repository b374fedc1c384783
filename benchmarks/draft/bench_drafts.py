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
from tasc_runtime.progress import Progress, note

TABLES = ("bar", "peers", "papers")


def main() -> None:
    asked = arguments()
    tasks = load(asked)
    held = asked.data is not None and asked.limit == ROWS
    machine = {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()}
    found = {
        "benchmark": "drafts",
        "git": git_revision(),
        "versions": {
            **versions("numpy", "numba", "tokenizers", "transformers", "torch"),
            **{peer.package: peer.version for peer in PEERS},
        },
        "machine": machine,
        "rows": asked.limit,
        "nodes": NODES,
        "data": asked.data.name if asked.data else "shipped",
        "tokenizer": tasks[0].facts["fingerprint"],
    }
    if {"bar", "peers"} & set(asked.tables):
        found |= replayed(tasks, asked.tables, held)
    if "papers" in asked.tables:
        found["papers"] = repeated(tasks, asked)
    machine["load_at_end"] = os.getloadavg()
    finish(found, asked.json)


def replayed(tasks: list[Task], tables: list[str], held: bool) -> dict[str, Any]:
    """The table of the bars, and the peers."""
    indexes = {}
    with Progress("index", len(tasks), "tasks") as bar:
        for task in tasks:
            indexes[task.name] = learnt_index(task)
            bar.advance()
    peers = "peers" in tables
    with Progress("replay", replays_of(peers) * len(tasks), "replays") as bar:
        drafted = {t.name: of_task(t, indexes[t.name], peers, bar.advance) for t in tasks}
    show_steps(drafted, held)
    if peers:
        show_missing()
    figures = means(drafted, held) + by_task(drafted, held)
    found: dict[str, Any] = {"tasks": tasks_record(drafted)}
    if "bar" in tables:
        with Progress("costs", parts_of(tasks), "runs") as bar:
            cost = costs(tasks, indexes, bar.advance)
        show_costs(drafted, cost)
        figures += times(drafted, cost) + builds(cost, held)
        found["costs"] = costs_record(drafted, cost)
    show_figures(figures)
    return found | {"figures": [figure.record for figure in figures]}


def repeated(tasks: list[Task], asked: argparse.Namespace) -> dict[str, Any]:
    """The papers' tables; the shipped tasks are always among them, as their model is available."""
    of_data = tasks if asked.data else []
    shipped = [of_demo(name, asked.limit) for name in TASKS] if asked.data else tasks
    bigrams = None
    if asked.bigrams and of_data:
        bigrams = read_bigrams(asked.bigrams, of_data[0].facts["fingerprint"])
    with Progress("papers' tables", papers_of(of_data, shipped), "parts") as bar:
        found = papers(of_data, shipped, bigrams, bar.advance)
    show_papers(found)
    return asdict(found)


def load(asked: argparse.Namespace) -> list[Task]:
    """The tasks; those of the nine that are missing are named and left out."""
    if asked.data is None:
        return [of_demo(name, asked.limit) for name in asked.tasks or TASKS]
    if asked.tokenizer is None:
        raise SystemExit("--data needs --tokenizer: a tokenizer.json or the folder it is in")
    names = asked.tasks or [n for n in NINE if there(asked.data / n)]
    if not names:
        raise SystemExit(f"{asked.data} has none of {', '.join(NINE)}; name others by --tasks")
    with Progress("tokenise", len(names), "tasks") as bar:
        tasks = []
        for name in names:
            tasks.append(of_folder(asked.data, name, asked.tokenizer, asked.limit))
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
    add("--data", type=Path, help="folder of data sets; without it, the shipped")
    add("--tokenizer", type=Path, help="tokenizer of the tokens that --data is measured in")
    add("--tasks", type=listed, help="names with commas between them")
    add("--limit", type=at_least(1), default=ROWS, help=f"test rows of a task ({ROWS})")
    add("--tables", type=names_of(*TABLES), default=TABLES, help=", ".join(TABLES))
    add("--bigrams", type=Path, help="file of `tasc model-bigrams`, for n-grammys")
    add_json(parser)
    asked = parser.parse_args()
    if asked.data is None and (unknown := set(asked.tasks or ()) - set(TASKS)):
        parser.error(f"{', '.join(sorted(unknown))}: only {', '.join(TASKS)} ship; give --data")
    return asked


if __name__ == "__main__":
    main()
