"""How drafting fares with step costs that were measured beside other work, and how fast it mends.

    python benchmarks/engine/stale_costs.py

An engine of the shipped massive_en task measures its step costs on a quiet machine, another one
beside busy loops, one for each processor, which end before requests come. Both answer test rows
again and again, without drafting from earlier answers. Block efficiency is told for each window of
steps; the machine has to be quiet. --loops-stay keeps the loops beside the requests as well.
--costs FILE has the second engine begin with the costs of a file, whoever wrote it, and --keep
FILE writes those that it began with. Progress goes to stderr; the last line of stdout is one JSON
object.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    Figure,
    about,
    add_json,
    at_least,
    finish,
    parser_of,
    show_figures,
    to_stderr,
    use_one_thread,
)

TASK = "massive_en"
EFFICIENT = 6.3  # block efficiency that is required with any file


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Loops of other processes that want all of a processor each."""
    own = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in own:
            process.kill()
            process.wait()


class Served:
    """The demo's engine, whose costs lie in a folder, and what its steps did."""

    def __init__(self, index: Any, folder: Path) -> None:
        from tasc_jobs.demo.run import ENGINE, FORGETFUL
        from tasc_jobs.demo.tasks import demo_record
        from tasc_runtime.engine.builder import EngineBuilder

        self.records: list[tuple[int, int, float, float]] = []
        began = time.perf_counter()
        self.builder = EngineBuilder(
            demo_record(TASK), 1, ENGINE, index=index, draft=FORGETFUL, cost_dir=folder,
            on_step=self._observe, say=to_stderr,
        )  # fmt: skip
        self.start_seconds = time.perf_counter() - began

    def _observe(self, record: Any) -> None:
        error = getattr(record, "cost_error", 0.0)
        own = record.emitted_tokens, record.row_steps, record.verify_seconds, error
        self.records.append(own)

    def run(self, steps: int, inputs: list[str]) -> None:
        """Answer these inputs again and again until so many steps are done."""
        from tasc_protocol import Request

        engine, n = self.builder.engine, 0
        until = len(self.records) + steps

        def calls() -> Iterator[Any]:
            nonlocal n
            while True:
                text = inputs[n % len(inputs)]
                yield self.builder.reader.request(Request(str(n), text, templated=True))
                n += 1

        for _ in engine.generate(calls(), stopped=lambda: len(self.records) >= until):
            pass
        engine.cancel_all()

    def windows(self, size: int) -> list[dict[str, float]]:
        """Block efficiency, tokens a second of forwards, and the costs' error, by window."""
        found = []
        for begin in range(0, len(self.records), size):
            tokens, rows, seconds, errors = zip(*self.records[begin : begin + size], strict=True)
            found.append({
                "steps": begin + len(tokens),
                "block_efficiency": sum(tokens) / sum(rows),
                "tokens_per_s": sum(tokens) / sum(seconds),
                "cost_error": errors[-1],
            })  # fmt: skip
        return found


def measured(options: argparse.Namespace) -> dict[str, Any]:
    from tasc_jobs.demo.tasks import read_split

    index = index_of_train()
    inputs = [row["input"] for row in read_split(TASK, "test")[: options.rows]]
    found: dict[str, Any] = {}
    with TemporaryDirectory(prefix="stale-costs-") as folder:
        quiet, stale = Path(folder) / "quiet", Path(folder) / "stale"
        served = Served(index, quiet)
        served.run(options.quiet_steps, inputs)
        found["quiet"] = {
            "start_s": served.start_seconds,
            "windows": served.windows(options.window),
        }
        with busy(options.loops):
            served = Served(index, stale)
        start_s, (file,) = served.start_seconds, stale.glob("*.json")
        if options.costs:
            begun = json.loads(options.costs.read_bytes())["costs"]
            file.write_text(json.dumps({**json.loads(file.read_bytes()), "costs": begun}))
            served = Served(index, stale)
        if options.keep:
            options.keep.write_bytes(file.read_bytes())
        with busy(options.loops if options.loops_stay else 0):
            served.run(options.steps, inputs)
        found["stale"] = {"start_s": start_s, "windows": served.windows(options.window)}
    return found


def index_of_train() -> Any:
    """The draft index of the task's train split."""
    from tasc_draft import DraftSettings, Tokens, build_learnt_index
    from tasc_jobs.demo.tasks import MODEL, TEMPLATES, read_split
    from tasc_text import PromptTemplate, TaskTokenizer

    tokenizer, template = TaskTokenizer.from_folder(MODEL), PromptTemplate(TEMPLATES[TASK])
    rows = read_split(TASK, "train")
    return build_learnt_index(
        Tokens.of(tokenizer.encode_outputs([row["output"] for row in rows])),
        Tokens.of([tokenizer.encode_prompt(template.render(row["input"])) for row in rows]),
        **tokenizer.index_facts,
        settings=DraftSettings(recent_tokens=0),
    )


def figures_of(found: dict[str, Any]) -> tuple[list[Figure], int | None]:
    """The figures, and the step from which on no window was below the bar."""
    of = {side: found[side]["windows"] for side in ("quiet", "stale")}
    first, last = of["stale"][0], of["stale"][-1]
    below = [w["steps"] for w in of["stale"] if w["block_efficiency"] < EFFICIENT]
    mended = below[-1] if below else 0
    name = "block efficiency"
    rates = [of[side][-1]["tokens_per_s"] for side in ("quiet", "stale")]
    figures = [
        Figure(f"{name}, quiet file", of["quiet"][-1]["block_efficiency"], "tokens"),
        Figure(f"{name}, stale file, first window", first["block_efficiency"], "tokens"),
        Figure(f"{name}, stale file, last window", last["block_efficiency"], "tokens", EFFICIENT),
        Figure("tokens a second of forwards, quiet file, last window", rates[0], "tokens/s"),
        Figure("the same, stale file", rates[1], "tokens/s"),
    ]  # fmt: skip
    return figures, mended if mended < last["steps"] else None


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--steps", type=at_least(1), default=20_000, help="steps with the stale file (20,000)")
    add("--quiet-steps", type=at_least(1), default=2_000, help="steps with the quiet file (2,000)")
    add("--window", type=at_least(1), default=500, help="steps of a window (500)")
    add("--rows", type=at_least(1), default=1024, help="test rows (1,024)")
    add("--loops", type=at_least(0), default=2, help="number of busy loops (2)")
    add("--loops-stay", action="store_true", help="keep the loops while requests are answered")
    add("--costs", type=Path, help="file of step costs to begin with")
    add("--keep", type=Path, help="file to write those costs to")
    add_json(parser)
    options = parser.parse_args()
    use_one_thread()
    found = measured(options)
    figures, mended = figures_of(found)
    show_figures(figures)
    own = {"figures": [figure.record for figure in figures], "efficient_from_step": mended}
    finish({**own, **found, **about()}, options.json)


if __name__ == "__main__":
    main()
