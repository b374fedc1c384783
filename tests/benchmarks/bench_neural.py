"""Neural proposers held to their papers' tables: acceptance kept, MBSU, vocabulary, hybrid.

    python tests/benchmarks/bench_neural.py --data DIR --tasks massive_en
    python tests/benchmarks/bench_neural.py --data DIR              # six tasks: hours on two cores

Targets are the plain fine-tunes of `bench_ft.py` (made where they are missing, and kept under
--work); an EAGLE head and an independent drafter are trained on each one's own answers to train
rows. Then test rows are answered in float32 at b = 8 with every proposer and vocabulary, all with
the same draft nodes, and each answer is held against the one without drafts. DIR has a folder of
`train.jsonl.gz` and `test.jsonl.gz` for each task. Progress goes to stderr, tables to stdout; the
last line of stdout is one JSON object.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench_command import parser_of, to_stderr


@dataclass(frozen=True)
class Asked:
    """The command line."""

    data: Path
    work: Path
    tasks: tuple[str, ...]
    train_rows: int
    test_rows: int
    epochs: float
    json: Path | None


def arguments() -> Asked:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of task data")
    add("--work", type=Path, default=Path(".bench/ft"), help="folder for models (.bench/ft)")
    add("--tasks", default="", help="by commas; all six")
    add("--train-rows", type=int, default=1500, help="whose answers drafters learn (1500)")
    add("--test-rows", type=int, default=96, help="test rows that are answered (96)")
    add("--epochs", type=float, default=8, help="of the drafters (8)")
    add("--json", type=Path, help="file for the JSON object as well")
    found = vars(parser.parse_args())
    if not found["data"].is_dir():
        parser.error(f"--data {found['data']} is no folder")
    tasks = tuple(each for each in found.pop("tasks").split(",") if each)
    return Asked(tasks=tasks, **found)


def main() -> int:
    asked = arguments()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # before torch is imported
    from draft_report import git_revision, processor, rounded
    from draft_tables import show_figures
    from ft_tasks import TASKS
    from neural_tables import figures_of, show
    from neural_task import measured
    from rich.console import Console

    console = Console(width=160)
    found = {}
    for task in asked.tasks or tuple(TASKS):
        to_stderr(f"{task} ...")
        found[task] = measured(asked, task)
        show(console, found[task])
    figures = figures_of(found.values())
    show_figures(console, figures)
    report = {
        "benchmark": "neural",
        "figures": [figure.record for figure in figures],
        "tasks": {task: own.record for task, own in found.items()},
        "git": git_revision(),
        "processor": processor(),
    }
    line = json.dumps(rounded(report))
    if asked.json:
        asked.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
