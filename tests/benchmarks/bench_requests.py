"""What requests may ask for, held to its bars: exact sampling, guides, adapters, NF4.

    python tests/benchmarks/bench_requests.py
    python tests/benchmarks/bench_requests.py --data DIR --parts choices,schemas
    python tests/benchmarks/bench_requests.py --rows 64 --requests 100

Parts: `grid` answers random requests with and without drafts, alone and eight together; `sampling`
tests sampled tokens against the exact distribution; `choices` answers from label sets; `schemas`
answers by random JSON schemas of calls; `adapters` has two adapters in one batch; `nf4` quantises.
Models are tiny random ones and the shipped one. DIR has `clinc150` and `eurlex_labels` as folders
of `train.jsonl.gz` and `test.jsonl.gz`; without it their label sets are left out. Progress goes to
stderr, tables to stdout; the last line of stdout is one JSON object.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench_command import parser_of

HERE = Path(__file__).parent
PARTS = ("grid", "sampling", "choices", "schemas", "adapters", "nf4")


@dataclass(frozen=True)
class Asked:
    """The command line."""

    parts: tuple[str, ...]
    data: Path | None
    rows: int
    requests: int
    schemas: int
    repeats: int
    json: Path | None


def arguments() -> Asked:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}; all of them")
    add("--data", type=Path, help="folder of task data")
    add("--rows", type=int, default=256, help="test rows of a label set or adapter (256)")
    add("--requests", type=int, default=500, help="random requests of the grid (500)")
    add("--schemas", type=int, default=200, help="random JSON schemas (200)")
    add("--repeats", type=int, default=3, help="timed runs (3)")
    add("--json", type=Path, help="file for the JSON object as well")
    found = vars(parser.parse_args())
    parts = tuple(found.pop("parts").split(","))
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if found["data"] and not found["data"].is_dir():
        parser.error(f"--data {found['data']} is no folder")
    return Asked(parts, **found)


def main() -> int:
    asked = arguments()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # before torch is imported
    tests = HERE.parent
    sys.path[:0] = [
        str(folder) for folder in (tests / "lossless", tests / "unit" / "tasc_engine", tests, HERE)
    ]
    from draft_report import print_report
    from draft_tables import show_figures
    from rich.console import Console

    figures, found = [], dict[str, Any]()
    for part in asked.parts:
        print(f"{part} ...", file=sys.stderr)
        measure: Callable[[Asked], tuple[list[Any], dict[str, Any]]]
        measure = import_module(f"requests_{part}").measure
        own, found[part] = measure(asked)
        figures += own
    show_figures(Console(width=160), figures)
    record = {"figures": [figure.record for figure in figures], **found}
    print_report("requests", record, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
