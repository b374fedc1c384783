"""Hold TASC-ft to the paper's tables: lengths of outputs, times, quality, epochs, the forecast.

    python benchmarks/finetune/bench_ft.py --data DIR --parts lengths
    python benchmarks/finetune/bench_ft.py --data DIR        # all parts: hours on two cores

Parts: `lengths` adds tokens to tokenizers from the outputs of six tasks, and measures how much
shorter test outputs become (no model); `seeds` fine-tunes with and without new tokens, with three
seeds; `epochs` fine-tunes for 1, 3, 5 and 10 epochs; `both` compares TASC-ft and drafting, alone
and together, on six tasks; `forecast` compares Renyi entropy with the times of 40 distinct
fine-tunes. DIR has a folder with `train.jsonl.gz` and `test.jsonl.gz` for each task. Fine-tunes are
kept under --work and are not made again: a run that was stopped continues; a fine-tune that was
made with other settings is refused. The base is the shipped model; `forecast` first trains a base
of half its size. Progress goes to stderr, tables to stdout; the last line of stdout is one JSON
object.
"""

import argparse
import sys
from pathlib import Path

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
    listed,
    measured,
    parser_of,
    use_one_thread,
)

PARTS = ("lengths", "seeds", "epochs", "both", "forecast")


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_data(parser, required=True)
    add_parts(parser, PARTS)
    add("--work", type=Path, default=Path(".bench/ft"), help="folder for fine-tunes (.bench/ft)")
    folders = "folders of tokenizers for `lengths`, with commas between (the shipped model's)"
    add("--tokenizers", type=paths, default=(), help=folders)
    names = "tasks of `lengths`, `seeds` and `both`, with commas between (all)"
    add("--tasks", type=listed, default=(), help=names)
    add("--test-rows", type=at_least(1), default=128, help="test rows that are answered (128)")
    add_repeats(parser, 5)
    add("--processes", type=at_least(1), default=2, help="fine-tunes at the same time (2)")
    add("--make-only", action="store_true", help="fine-tune without measuring")
    add_json(parser)
    return parser.parse_args()


def paths(text: str) -> tuple[Path, ...]:
    return tuple(map(Path, listed(text)))


def main() -> None:
    options = arguments()
    use_one_thread()
    from benchmarks.finetune import parts

    measures = {name: getattr(parts, name) for name in PARTS}
    found = measured(measures, options.parts, parts.Options(**vars(options)))
    finish({"benchmark": "ft", **found, **about()}, options.json)


if __name__ == "__main__":
    main()
