"""Neural drafters with pruned vocabularies, held to the papers' tables, and the hybrid none has.

    python tests/benchmarks/bench_neural.py --data DIR --parts vocabtrim --tasks massive_en
    python tests/benchmarks/bench_neural.py --data DIR --wide TOKENIZER       # all of it: hours

Parts: `vocabtrim` trims the head by whose answers rank the tokens best, priced as for Llama 3.2;
`frspec` by how much of it is left; `microspec` compares a window over each row's candidates, a
ranked vocabulary and both, with sizes, coverage, times and the ceiling; `hybrid` has n-grams and
drafter in one tree; `latency` times a draft of a larger shape, random weights. DIR has a folder of
`train.jsonl.gz` and `test.jsonl.gz` for each task; --wide names the folder of a tokenizer of
100,000 tokens, and adds targets of that vocabulary. Targets, answers and drafters are made once and
kept under --work, and so is what was measured: a run that was stopped goes on. Every answer is
compared with plain decoding. Progress goes to stderr, tables to stdout; the last line of stdout is
one JSON object.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_command import parser_of, to_stderr

if TYPE_CHECKING:
    from draft_bars import Figure
    from neural_bench import Bench
    from neural_models import Case, Models

TASK_NAMES = ("massive_en", "pos_ewt", "clinc150", "wikisql", "sgd_calls", "eurlex_labels")
PARTS = ("vocabtrim", "frspec", "microspec", "hybrid", "latency")


@dataclass(frozen=True)
class Asked:
    """The command line, and the benches of the targets that it names."""

    parts: tuple[str, ...]
    benches: "tuple[Bench, ...]"
    work: Path
    json: Path | None


def arguments() -> dict[str, Any]:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of task data")
    add("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}; all of them")
    add("--tasks", default=",".join(TASK_NAMES), help="whose targets have the shipped tokenizer")
    add("--wide", type=Path, help="folder of a tokenizer of 100,000 tokens; without it, no such")
    add("--wide-tasks", default="massive_en", help="whose targets have it (massive_en)")
    add("--work", type=Path, default=Path(".bench/neural"), help="folder (.bench/neural)")
    add("--rows", type=int, default=2000, help="answers that a drafter learns (2000)")
    add("--epochs", type=float, default=6, help="of them (6)")
    add("--test-rows", type=int, default=48, help="test rows that are answered (48)")
    add("--repeats", type=int, default=3, help="timed runs (3)")
    add("--processes", type=int, default=2, help="that train side by side (2)")
    add("--make-only", action="store_true", help="train, and measure another time")
    add("--json", type=Path, help="file for the JSON object as well")
    found = vars(parser.parse_args())
    found["parts"] = tuple(found["parts"].split(","))
    if unknown := set(found["parts"]) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if unknown := {task for task in found["tasks"].split(",") if task} - set(TASK_NAMES):
        parser.error(f"no task {', '.join(sorted(unknown))}; there are {', '.join(TASK_NAMES)}")
    for name in ("data", "wide"):
        if (folder := found[name]) and not folder.is_dir():
            parser.error(f"--{name} {folder} is no folder")
    return found


def main() -> int:
    found = arguments()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # before torch is imported
    from draft_report import print_report
    from draft_tables import show_figures
    from neural_bench import Bench
    from neural_kept import measured_by
    from neural_models import Models
    from rich.console import Console

    models = Models(
        found["data"], found["work"], found["wide"], found["rows"], found["epochs"]
    )  # fmt: skip
    cases = _cases(found)
    if found["parts"] != ("latency",):  # which needs none of them
        _make(models, cases, found["processes"])
    if found["make_only"]:
        return 0
    benches = tuple(Bench(models, each, found["test_rows"], found["repeats"]) for each in cases)
    asked = Asked(found["parts"], benches, found["work"], found["json"])
    console, figures, told = Console(width=160), list[Any](), dict[str, Any]()
    for part in asked.parts:
        to_stderr(f"{part} ...")
        measure: Callable[[Asked, Console], tuple[list[Figure], dict[str, Any]]]
        measure = import_module(f"neural_{part}").measure
        own, told[part] = measure(asked, console)
        figures += own
    show_figures(console, figures)
    record = {"figures": [f.record for f in figures], **told, "measured_by": measured_by()}
    print_report("neural", record, asked.json)
    return 0


def _cases(found: dict[str, Any]) -> "list[Case]":
    from neural_models import Case

    tasks = [task for task in found["tasks"].split(",") if task]
    wide = found["wide_tasks"].split(",") if found["wide"] else []
    return [*(Case(task, wide=True) for task in wide), *(Case(task) for task in tasks)]


def _make(models: "Models", cases: "list[Case]", processes: int) -> None:
    """Targets, answers and drafters, several cases at a time."""
    from ft_crew import in_processes

    jobs = {case.name: (models.make, case) for case in cases}
    for name in in_processes(jobs, processes):
        to_stderr(f"{name}: target and drafters are there")


if __name__ == "__main__":
    sys.exit(main())
