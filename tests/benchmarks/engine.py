"""Time the engine beside its peers: same weights, same rows, same precision, same threads.

    python tests/benchmarks/engine.py
    python tests/benchmarks/engine.py --demo
    python tests/benchmarks/engine.py --model DIR
    python tests/benchmarks/engine.py --shape 135m

The shipped tasks are answered by the bench model (`make bench-model`) where it is there, otherwise
or with --demo by the shipped one, each task's adapter merged. With --model the folder's model
answers the same prompts, up to a fixed number of tokens, and is drafted for from the same train
outputs. With --shape random weights are stepped, and nothing else.
Each engine is a process of its own that waits while another runs; peers are in `engine_peers`,
their environments are made by `make bench-env`. Bars: `engine_figures`. Equality of the answers:
`engine_equal`. Ceiling: `engine_ceiling`. Progress goes to stderr; the last line of stdout is one
JSON object.
"""

import json
import sys

from engine_args import arguments, set_threads


def main() -> None:
    asked = arguments(__doc__)
    set_threads(asked.threads)  # before torch is imported, which reads them then
    from engine_run import measured, stepped
    from rich.console import Console

    out = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150)
    found = stepped(asked, out) if asked.shape else measured(asked, out)
    line = json.dumps(found)
    if asked.json:
        asked.json.write_text(line + "\n", encoding="utf-8")
    out.file.flush()
    print(line)


if __name__ == "__main__":
    main()
