"""TASC-ft, held to the paper's tables: shorter outputs, times, quality, epochs, entropy's forecast.

    python tests/benchmarks/bench_ft.py --data DIR --parts lengths
    python tests/benchmarks/bench_ft.py --data DIR                 # all of it: hours on two cores

Parts: `lengths` enriches tokenizers by six tasks' outputs, and says how much shorter test outputs
get (no model); `seeds` fine-tunes with and without new tokens, by three seeds; `epochs` for 1, 3, 5
and 10; `both` has TASC-ft and drafting alone and together on six tasks; `forecast` holds Renyi
entropy against the times of 40 distinct fine-tunes. DIR has a folder of `train.jsonl.gz` and
`test.jsonl.gz` for each task. Fine-tunes are kept under --work and not made again: a run that was
stopped goes on where it was; one that was made with other settings is refused. The shipped model is
the base; the half-size one of `forecast` is trained first. Progress goes to stderr, tables to
stdout; the last line of stdout is one JSON object.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench_command import parser_of

HERE = Path(__file__).parent
PARTS = ("lengths", "seeds", "epochs", "both", "forecast")


@dataclass(frozen=True)
class Asked:
    """The command line."""

    parts: tuple[str, ...]
    data: Path
    work: Path
    tokenizers: tuple[Path, ...]
    tasks: tuple[str, ...]
    test_rows: int
    repeats: int
    processes: int
    make_only: bool
    json: Path | None


def arguments() -> Asked:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of task data")
    add("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}; all of them")
    add("--work", type=Path, default=Path(".bench/ft"), help="folder for fine-tunes (.bench/ft)")
    add("--tokenizers", default="", help="folders for `lengths`, by commas; the shipped model's")
    add("--tasks", default="", help="of `lengths`, `seeds` and `both`, by commas; all of them")
    add("--test-rows", type=int, default=128, help="test rows that are answered (128)")
    add("--repeats", type=int, default=5, help="timed runs (5)")
    add("--processes", type=int, default=2, help="that fine-tune side by side (2)")
    add("--make-only", action="store_true", help="fine-tune, and measure another time")
    add("--json", type=Path, help="file for the JSON object as well")
    found = vars(parser.parse_args())
    parts = tuple(found.pop("parts").split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not found["data"].is_dir():
        parser.error(f"--data {found['data']} is no folder")
    tokenizers = tuple(Path(each) for each in found.pop("tokenizers").split(",") if each)
    tasks = tuple(each for each in found.pop("tasks").split(",") if each)
    return Asked(parts, tokenizers=tokenizers, tasks=tasks, **found)


def main() -> int:
    asked = arguments()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # before torch is imported
    from bench_parts import measured
    from draft_report import print_report

    print_report("ft", measured("ft", asked.parts, asked), asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
