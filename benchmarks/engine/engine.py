"""Time the engine and its peers: same weights, same rows, same precision, same threads.

    python benchmarks/engine/engine.py
    python benchmarks/engine/engine.py --demo
    python benchmarks/engine/engine.py --model DIR
    python benchmarks/engine/engine.py --shape 135m

The shipped tasks are answered by the bench model (`make bench-model`) if it exists. Otherwise, or
with --demo, the shipped model answers them, with the adapter of each task merged. With --model the
model of the folder answers the same prompts up to a fixed number of tokens, and drafts come from
the same train outputs. With --shape only steps of random weights are timed. Each engine is a
process of its own that waits while another one runs. `sides` describes the peers; `make bench-env`
makes their environments. `report` has the bars, `equal` compares the answers, and `steps` measures
the ceiling. Progress goes to stderr; the last line of stdout is one JSON object.
"""

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import add_json, add_repeats, at_least, finish, names_of, parser_of

TASKS = ("massive_en", "pos_ewt")
PEERS = ("transformers", "openvino", "ctranslate2")
DTYPES = ("bfloat16", "float32", "float16")
SHAPES = ("135m", "0.5b")


def main() -> None:
    options = arguments()
    set_threads(options.threads)  # torch reads this when it is imported
    from benchmarks.engine.report import Options
    from benchmarks.engine.run import measured, stepped

    run = stepped if options.shape else measured
    finish(run(Options(**vars(options))), options.json)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=at_least(1), default=256, help="test rows of a task (256)")
    add_repeats(parser, 3)
    add("--threads", type=at_least(1), default=1, help="threads of each engine (1)")
    add(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="dtype of the weights (bfloat16)",
    )
    add("--tasks", type=names_of(*TASKS), default=TASKS, help=f"tasks ({','.join(TASKS)})")
    peers = f"peers ({','.join(PEERS)}); those that are not installed are left out"
    add("--peers", type=names_of(*PEERS), default=PEERS, help=peers)
    add("--max-tokens", type=at_least(1), default=64, help="tokens of an answer, with --model (64)")
    add("--model", type=Path, help="local folder of another model")
    add("--demo", action="store_true", help="use the shipped model even if the bench model exists")
    add("--shape", choices=SHAPES, help="time only steps of random weights of this shape")
    add_json(parser)
    return parser.parse_args()


def set_threads(threads: int) -> None:
    """Set the threads of this process and of child processes; idle threads do not spin."""
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    os.environ.update(THP_MEM_ALLOC_ENABLE="1")  # as in replicas
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


if __name__ == "__main__":
    main()
