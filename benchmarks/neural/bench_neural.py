"""Hold neural drafters with pruned vocabularies to the papers' tables, and measure the hybrid.

    python benchmarks/neural/bench_neural.py --data DIR --parts vocabtrim --tasks massive_en
    python benchmarks/neural/bench_neural.py --data DIR --wide TOKENIZER       # all parts: hours

Parts: `vocabtrim` trims the head by tokens ranked on several kinds of answers, priced as for Llama
3.2; `frspec` trims it to several sizes; `microspec` compares a window over the candidates of each
row, a ranked vocabulary and both by size, coverage, times and ceiling; `hybrid` has n-grams and
drafter in one tree; `latency` times drafts of a larger shape with random weights. DIR has a folder
with `train.jsonl.gz` and `test.jsonl.gz` for each task. --wide names the folder of a tokenizer of
100,000 tokens, and adds targets with that vocabulary. Targets, answers, drafters and measurements
are made once and kept under --work, so that a run that was stopped continues. Every answer is
compared with plain decoding. Progress goes to stderr, tables to stdout; the last line of stdout is
one JSON object.
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    about,
    add_data,
    add_json,
    add_parts,
    add_repeats,
    at_least,
    finish,
    folder,
    measured,
    names_of,
    parser_of,
    to_stderr,
    use_one_thread,
)
from benchmarks.finetune.tasks import TASKS
from tasc_engine.drafting.neural.card import Kind

PARTS = ("vocabtrim", "frspec", "microspec", "hybrid", "latency")


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add, tasks = parser.add_argument, names_of(*TASKS)
    add_data(parser, required=True)
    add_parts(parser, PARTS)
    add(
        "--tasks",
        type=tasks,
        default=tuple(TASKS),
        help="tasks with the shipped tokenizer",
    )
    add(
        "--wide",
        type=folder,
        help="folder of a tokenizer of 100,000 tokens (none)",
    )
    wide = "tasks with that tokenizer (massive_en)"
    add("--wide-tasks", type=tasks, default=("massive_en",), help=wide)
    add(
        "--work",
        type=Path,
        default=Path(".bench/neural"),
        help="folder of results (.bench/neural)",
    )
    add("--rows", type=at_least(1), default=1500, help="answers that a drafter learns (1500)")
    add("--epochs", type=float, default=12, help="epochs over these answers (12)")
    add("--test-rows", type=at_least(1), default=40, help="test rows that are answered (40)")
    add_repeats(parser, 3, least=0)
    add("--processes", type=at_least(1), default=2, help="drafters that train at the same time (2)")
    kinds = "kinds of drafters in vocabtrim and hybrid (both)"
    add("--kinds", type=names_of(*get_args(Kind)), default=get_args(Kind), help=kinds)
    add("--make-only", action="store_true", help="train without measuring")
    add_json(parser)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    use_one_thread()
    from benchmarks.finetune.runs import in_processes
    from benchmarks.neural import parts
    from benchmarks.neural.models import Case, Models
    from benchmarks.neural.side import Bench, measured_by

    models = Models(options.data, options.work, options.wide, options.rows, options.epochs)
    cases = [Case(task, True) for task in options.wide_tasks if options.wide]
    cases += [Case(task, wanted=options.kinds) for task in options.tasks]
    if options.parts != ("latency",):  # this part needs no models
        for name in in_processes({c.name: (models.make, c) for c in cases}, options.processes):
            to_stderr(f"{name}: target and drafters are there")
    if options.make_only:
        return
    benches = tuple(Bench(models, case, options.test_rows, options.repeats) for case in cases)
    measures = {name: getattr(parts, name) for name in PARTS}
    found = measured(measures, options.parts, parts.Options(benches, options.work))
    finish({"benchmark": "neural", **found, "measured_by": measured_by(), **about()}, options.json)


if __name__ == "__main__":
    main()
