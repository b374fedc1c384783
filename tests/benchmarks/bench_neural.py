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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_command import parser_of, to_stderr
from ft_tasks import TASKS

if TYPE_CHECKING:
    from neural_bench import Bench
    from neural_models import Case, Models

    from tasc_engine.neural.card import Kind

PARTS = ("vocabtrim", "frspec", "microspec", "hybrid", "latency")
KINDS: "tuple[Kind, ...]" = ("eagle", "independent")


@dataclass(frozen=True)
class Asked:
    """The benches of the targets that the command line names, and the folder of what is kept."""

    benches: "tuple[Bench, ...]"
    work: Path


def arguments() -> dict[str, Any]:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of task data")
    add("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}; all of them")
    add("--tasks", default=",".join(TASKS), help="whose targets have the shipped tokenizer")
    add("--wide", type=Path, help="folder of a tokenizer of 100,000 tokens; without it, no such")
    add("--wide-tasks", default="massive_en", help="whose targets have it (massive_en)")
    add("--work", type=Path, default=Path(".bench/neural"), help="folder (.bench/neural)")
    add("--rows", type=int, default=1500, help="answers that a drafter learns (1500)")
    add("--epochs", type=float, default=12, help="of them (12)")
    add("--test-rows", type=int, default=40, help="test rows that are answered (40)")
    add("--repeats", type=int, default=3, help="timed runs (3)")
    add("--processes", type=int, default=2, help="that train side by side (2)")
    add("--kinds", default=",".join(KINDS), help="of drafters, in vocabtrim and hybrid; both")
    add("--make-only", action="store_true", help="train, and measure another time")
    add("--json", type=Path, help="file for the JSON object as well")
    found = vars(parser.parse_args())
    for name, known in (("parts", PARTS), ("kinds", KINDS)):
        found[name] = tuple(found[name].split(","))
        if unknown := set(found[name]) - set(known):
            parser.error(f"no {name} {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in ("tasks", "wide_tasks"):
        found[name] = [task for task in found[name].split(",") if task]
    if unknown := {*found["tasks"], *found["wide_tasks"]} - set(TASKS):
        parser.error(f"no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    for name in ("data", "wide"):
        if (folder := found[name]) and not folder.is_dir():
            parser.error(f"--{name} {folder} is no folder")
    return found


def main() -> int:
    found = arguments()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # before torch is imported
    from bench_parts import measured
    from draft_report import print_report
    from neural_bench import Bench
    from neural_kept import measured_by
    from neural_models import Models

    models = Models(found["data"], found["work"], found["wide"], found["rows"], found["epochs"])
    cases = _cases(found)
    if found["parts"] != ("latency",):  # which needs none of them
        _make(models, cases, found["processes"])
    if found["make_only"]:
        return 0
    benches = tuple(Bench(models, each, found["test_rows"], found["repeats"]) for each in cases)
    asked = Asked(benches, found["work"])
    record = measured("neural", found["parts"], asked)
    print_report("neural", {**record, "measured_by": measured_by()}, found["json"])
    return 0


def _cases(found: dict[str, Any]) -> "list[Case]":
    from neural_models import Case

    wide, kinds = found["wide_tasks"] if found["wide"] else [], found["kinds"]
    return [Case(task, True) for task in wide] + [
        Case(task, wanted=kinds) for task in found["tasks"]
    ]


def _make(models: "Models", cases: "list[Case]", processes: int) -> None:
    """Targets, answers and drafters, several cases at a time."""
    from ft_crew import in_processes

    jobs = {case.name: (models.make, case) for case in cases}
    for name in in_processes(jobs, processes):
        to_stderr(f"{name}: target and drafters are there")


if __name__ == "__main__":
    sys.exit(main())
