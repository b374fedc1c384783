"""Replay drafts: tokens per step and costs beside their bars, peers, and the papers' tables.

    python tests/benchmarks/bench_drafts.py --data DIR --tokenizer PATH
    python tests/benchmarks/bench_drafts.py

DIR holds a folder a task with ``train.jsonl.gz`` and ``test.jsonl.gz`` (fields input and output).
Without it the two tasks that ship with the demo are measured, in their model's tokens; they have
no bars on tokens per step. Protocol and bars: `draft_bars`. Peers, and which of them install:
`draft_peers`. The papers' tables, and how ours differ: `draft_papers`. No model runs but for the
shipped one's bigram table. Progress goes to stderr; the last line of stdout is one JSON object.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draft_bars import NINE, ROWS
from draft_costs import costs, parts_of
from draft_figures import builds, by_task, means, times
from draft_papers import papers, papers_of
from draft_replays import learnt_index, of_task, replays_of
from draft_report import costs_record, figures_record, rounded, settings_of, tasks_record
from draft_rows import BenchTask, of_demo, of_folder
from draft_tables import show_costs, show_figures, show_missing, show_papers, show_steps
from rich.console import Console

from tasc_draft.index.bigrams import read_bigrams
from tasc_jobs.demo.tasks import TASKS
from tasc_jobs.progress import Progress, note

TABLES = ("bar", "peers", "papers")
WIDTH = 150  # of tables that go to no terminal


def main() -> None:
    asked = arguments()
    tasks = load(asked)
    held = asked.data is not None and asked.limit == ROWS
    out = Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH)
    data = asked.data.name if asked.data else "shipped"
    found = settings_of(asked.limit, data, tasks[0].facts["fingerprint"])
    if {"bar", "peers"} & set(asked.tables):
        found |= measured(tasks, asked.tables, held, out)
    if "papers" in asked.tables:
        found["papers"] = repeated(tasks, asked, out)
    found["machine"]["load_at_end"] = os.getloadavg()
    out.file.flush()
    line = json.dumps(rounded(found))
    if asked.json:
        asked.json.write_text(line + "\n", encoding="utf-8")
    print(line)


def measured(tasks: list[BenchTask], tables: list[str], held: bool, out: Console) -> dict[str, Any]:
    """The bar table and the peers."""
    with Progress("index", len(tasks), "tasks") as bar:
        indexes = {}
        for task in tasks:
            indexes[task.name] = learnt_index(task)
            bar.advance()
    peers = "peers" in tables
    with Progress("replay", replays_of(peers) * len(tasks), "replays") as bar:
        drafted = {t.name: of_task(t, indexes[t.name], peers, bar.advance) for t in tasks}
    show_steps(out, drafted, held)
    if peers:
        show_missing(out)
    figures = means(drafted, held) + by_task(drafted, held)
    found: dict[str, Any] = {"tasks": tasks_record(drafted)}
    if "bar" in tables:
        with Progress("costs", parts_of(tasks), "runs") as bar:
            cost = costs(tasks, indexes, bar.advance)
        show_costs(out, drafted, cost)
        figures += times(drafted, cost) + builds(cost, held)
        found["costs"] = costs_record(drafted, cost)
    show_figures(out, figures)
    return found | {"figures": figures_record(figures)}


def repeated(tasks: list[BenchTask], asked: argparse.Namespace, out: Console) -> dict[str, Any]:
    """The papers' tables; the shipped tasks are there in any case, for their model is at hand."""
    of_data = tasks if asked.data else []
    shipped = [of_demo(name, asked.limit) for name in TASKS] if asked.data else tasks
    bigrams = None
    if asked.bigrams and of_data:
        bigrams = read_bigrams(asked.bigrams, of_data[0].facts["fingerprint"])
    with Progress("papers' tables", papers_of(of_data, shipped), "parts") as bar:
        found = papers(of_data, shipped, bigrams, bar.advance)
    show_papers(out, found)
    return asdict(found)


def load(asked: argparse.Namespace) -> list[BenchTask]:
    """The tasks; of the nine, those that are not there are named and left out."""
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
    """Whether a task can be measured; a message says what is missing."""
    missing = [s for s in ("train", "test") if not (folder / f"{s}.jsonl.gz").is_file()]
    if missing:
        note(f"{folder.name} left out: {folder} has no {' and no '.join(missing)}.jsonl.gz")
    return not missing


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of data sets; without it, the shipped")
    parser.add_argument("--tokenizer", type=Path, help="of the tokens that --data is measured in")
    parser.add_argument("--tasks", type=listed, help="names with commas between them")
    parser.add_argument("--limit", type=positive, default=ROWS, help="test rows of a task")
    parser.add_argument("--tables", type=tables, default=list(TABLES), help=", ".join(TABLES))
    parser.add_argument("--bigrams", type=Path, help="from `tasc model-bigrams`, for n-grammys")
    parser.add_argument("--json", type=Path, help="file for the JSON object as well")
    asked = parser.parse_args()
    if asked.data is None and (unknown := set(asked.tasks or ()) - set(TASKS)):
        parser.error(f"{', '.join(sorted(unknown))}: only {', '.join(TASKS)} ship; give --data")
    return asked


def listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def tables(text: str) -> list[str]:
    names = listed(text)
    if unknown := set(names) - set(TABLES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {TABLES}")
    return names


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} rows; at least 1 is needed")
    return value


if __name__ == "__main__":
    main()
