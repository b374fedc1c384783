"""Time the engine and its peers: same weights, same rows, same precision, same threads.

    python benchmarks/engine/engine.py
    python benchmarks/engine/engine.py --model DIR
    python benchmarks/engine/engine.py --shape 135m
    python benchmarks/engine/engine.py --smollm2 --data DIR --peers vllm,vllm-tasc

The shipped model answers the shipped tasks, with the adapter of each task merged. With --model the
model of the folder answers the same prompts up to a fixed number of tokens, and drafts come from
the same train outputs. With --shape only steps of random weights are timed. With --smollm2 the
models of `make bench-model` are measured, in vLLM, OpenVINO, llama.cpp and others, over rows that
no side has answered; see `fresh`. DIR has a folder per task with ``train.jsonl.gz`` and
``test.jsonl.gz``. Each engine is a process of its own that waits while another one runs. `sides`
describes the peers; their environments come from `make bench-env`. `report` has the bars, `equal`
compares the answers, and `steps` measures the ceiling. Progress goes to stderr; the last line of
stdout is one JSON object.
"""

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    add_data,
    add_json,
    add_repeats,
    at_least,
    finish,
    listed,
    names_of,
    parser_of,
)

TASKS = ("massive_en", "pos_ewt")
CASES = (*TASKS, "unpredicted", "sampled", "choices")  # with --smollm2
PEERS = ("transformers", "openvino", "ctranslate2")
VLLM_PEERS = ("vllm", "vllm-ngram", "vllm-suffix", "vllm-tasc")
OTHER_PEERS = (
    "transformers", "openvino", "openvino-int8", "ctranslate2-int8", "llama-cpp", "onnx-genai",
    "ours", "ours-int8",
)  # fmt: skip
DTYPES = ("bfloat16", "float32", "float16")
SHAPES = ("135m", "0.5b")


def main() -> None:
    options = arguments()
    set_threads(options.threads)  # torch reads this when it is imported
    from benchmarks.engine.fresh import fresh
    from benchmarks.engine.report import Options
    from benchmarks.engine.run import measured, stepped

    run = fresh if options.smollm2 else stepped if options.shape else measured
    finish(run(Options(**vars(options))), options.json)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", type=at_least(1), help="test rows of a task (256), or of each run (96)")
    add_repeats(parser, 3)
    add("--threads", type=at_least(1), default=1, help="threads of each engine (1)")
    add(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="dtype of the weights (bfloat16)",
    )
    add("--quantization", choices=("int8-dynamic",), help="of this project's engine (none)")
    tasks = f"tasks ({','.join(TASKS)}; with --smollm2 {','.join(CASES)})"
    add("--tasks", type=names_of(*CASES), help=tasks)
    fresh = f"{','.join(VLLM_PEERS)}; also {','.join(OTHER_PEERS)}"
    known = names_of(*dict.fromkeys((*PEERS, *VLLM_PEERS, *OTHER_PEERS)))
    add("--peers", type=known, help=f"peers ({','.join(PEERS)}; with --smollm2 {fresh})")
    add("--max-tokens", type=at_least(1), default=64, help="tokens of an answer, with --model (64)")
    add("--model", type=Path, help="local folder of another model")
    add("--shape", choices=SHAPES, help="time only steps of random weights of this shape")
    add("--smollm2", action="store_true", help="measure the models of `make bench-model`")
    add_data(parser)
    add("--sequences", type=numbers, default=(8,), help="rows together, as in 1,8,32 (8)")
    add_json(parser)
    return complete(parser)


def complete(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments; tasks, peers and rows that are not given depend on the kind of run."""
    options = parser.parse_args()
    fresh = options.smollm2
    tasks, peers = (CASES, (*VLLM_PEERS, *OTHER_PEERS)) if fresh else (TASKS, PEERS)
    if fresh and options.data is None:
        parser.error("--smollm2 needs --data")
    options.rows = options.rows or (96 if fresh else 256)
    options.tasks = options.tasks or TASKS
    options.peers = options.peers or (VLLM_PEERS if fresh else PEERS)
    if other := [name for name in (*options.tasks, *options.peers) if name not in (*tasks, *peers)]:
        needs = "does not have" if fresh else "is needed for"
        parser.error(f"--smollm2 {needs} {', '.join(other)}")
    return options


def numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(map(at_least(1), listed(text))))


def set_threads(threads: int) -> None:
    """Set the threads of this process and of child processes; idle threads do not spin."""
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    os.environ.update(THP_MEM_ALLOC_ENABLE="1")  # as in replicas
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


if __name__ == "__main__":
    main()
