"""What `LLM.generate` costs over the engine's own loop: processor time of the same 1,000 rows.

    python benchmarks/engine/llm_overhead.py

Both answer test rows of massive_en with the shipped model and draft from the train rows. One side
is `LLM.generate`; the other one encodes the prompts and calls `Engine.generate`. Sides alternate,
and the least time of each counts. The last line of stdout is one JSON object.
"""

import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    Figure,
    about,
    add_json,
    add_repeats,
    at_least,
    finish,
    in_turn,
    parser_of,
    show_figures,
    use_one_thread,
)

TASK = "massive_en"
MOST = 0.02  # of the loop's time


class Sides:
    """Both sides with an engine each, of the same index; every run begins without old answers."""

    def __init__(self, inputs: list[str]) -> None:
        from tasc_jobs.demo.run import ENGINE
        from tasc_jobs.demo.tasks import ADAPTERS, MODEL, TEMPLATES, data_file
        from tasc_runtime.engine.builder import EngineBuilder
        from tasc_serve import LLM

        self.inputs, settings = inputs, ENGINE.model_copy(update={"cost_aware": False})
        self.llm = LLM(
            MODEL, adapter=ADAPTERS / TASK, template=TEMPLATES[TASK],
            corpus=data_file(TASK, "train"), **settings.model_dump(),
        )  # fmt: skip
        self.index = self.llm.index
        self.loop = EngineBuilder(self.llm.record, 1, settings, index=self.index)
        self.texts: dict[str, list[str]] = {}

    def by_llm(self) -> float:
        self.llm.draft_from(self.index)
        began = time.process_time()
        answers = self.llm.generate(self.inputs, progress=False)
        spent = time.process_time() - began
        self.texts["llm"] = [answer.text for answer in answers]
        return spent

    def by_loop(self) -> float:
        from tasc_engine import Request

        loop, requests = self.loop, list[Any]()
        loop.draft_from(self.index)
        began = time.process_time()
        for n, text in enumerate(self.inputs):
            ids = tuple(loop.tokenizer.encode_prompt(loop.template.render(text)))
            most = min(loop.record.max_tokens, loop.engine.longest - len(ids))
            requests.append(Request(str(n), ids, most))
        found = {result.id: result.text for result in loop.engine.generate(requests)}
        spent = time.process_time() - began
        self.texts["loop"] = [found[request.id] for request in requests]
        return spent


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=at_least(1), default=1000, help="test rows (1,000)")
    add_repeats(parser, 5)
    add_json(parser)
    options = parser.parse_args()
    use_one_thread()
    from tasc_jobs.demo.tasks import read_split

    rows = read_split(TASK, "test")[: options.rows]
    sides = Sides([row["input"] for row in rows])
    runs = {"llm": sides.by_llm, "loop": sides.by_loop}
    in_turn(runs, 1)  # warms up
    found = in_turn(runs, options.repeats)
    least = {side: min(seconds) for side, seconds in found.items()}
    share = least["llm"] / least["loop"] - 1  # what else the machine does only adds
    changed = sum(map(str.__ne__, sides.texts["llm"], sides.texts["loop"]))
    figures = [
        Figure("LLM.generate over the engine's loop", share, "share", MOST, upwards=False),
        Figure("rows answered otherwise", changed, "", 0, upwards=False),
    ]
    show_figures(figures)
    own = {"figures": [figure.record for figure in figures], "rows": len(rows), "seconds": found}
    finish({**own, **about()}, options.json)


if __name__ == "__main__":
    main()
