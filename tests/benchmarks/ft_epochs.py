"""What more epochs bring (the paper's Table 7): one task with new tokens, 1 to 10 epochs."""

from typing import Any

from bench_ft import Asked
from draft_bars import Figure
from draft_tables import table_of
from ft_crew import make_all, measure_all
from ft_runs import FtRun, Workshop
from rich.console import Console

TASK = "clinc150"
EPOCHS = (1, 3, 5, 10)


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    workshop = Workshop(asked.data, asked.work, asked.test_rows, asked.repeats)
    runs = [FtRun(TASK, epochs=epochs) for epochs in EPOCHS]
    make_all(workshop, runs[::-1], asked.processes)
    if asked.make_only:
        return [], {}
    found = measure_all(workshop, runs, drafts=False)
    names = list(next(iter(found.values()))["quality"])
    title = f"{TASK}, new tokens, by epochs of {runs[0].of.rows:,} rows; seed 0 alone"
    table = table_of(title, ["epochs", *names, "steps", "ms an answer"])
    for run, each in found.items():
        table.add_row(
            f"{run.epochs:g}", *(f"{each['quality'][name]:.3f}" for name in names),
            f"{each['steps_per_answer']:.2f}", f"{each['ms_per_answer']:.2f}",
        )  # fmt: skip
    console.print(table)
    return [], {run.name: found[run] for run in runs}
