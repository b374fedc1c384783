"""Rows/s of `tasc_serve.data.generate` with one actor, against one `LLM` in this process.

    python benchmarks/batch/bench_ray_data.py
    python benchmarks/batch/bench_ray_data.py --rows 1000 --repeats 3

Both sides answer the rows of the shipped MASSIVE data, repeated, with the shipped model in float32
and drafts from its training rows, on one thread each. Each run has an engine of its own, which has
seen no answers. Its time begins when the first batch is answered, so it includes no start, and ends
with the last row. The dataset is read from one Parquet file. The sides alternate. Rows are
repeated, so drafts from earlier answers are better than on real data: compare the sides with each
other only. The exit code is 1 if their answers differ. The last line of stdout is one JSON object.
"""

import argparse
import os
import sys
import tempfile
import time
from itertools import cycle, islice
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
    median_of,
    parser_of,
    show_figures,
    to_stderr,
    use_one_thread,
)

BAR = 0.85
TASK = "massive_en"


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=at_least(2), default=5000, help="number of rows (5000)")
    parser.add_argument(
        "--batch-size", type=at_least(1), default=256, help="rows of a batch of the dataset (256)"
    )
    add_repeats(parser, 5)
    add_json(parser)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    use_one_thread()
    # Ray's processes get it from `local_ray`; torch reads it once.
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray

    from tasc_jobs.demo.tasks import ADAPTERS, MODEL, TEMPLATES, data_file, read_split
    from tasc_jobs.ray_local import local_ray
    from tasc_serve import LLM, data

    inputs = (row["input"] for row in cycle(read_split(TASK, "test")))
    texts = list(islice(inputs, options.rows))
    first = min(options.batch_size, options.rows // 2)
    engine = {
        "adapter": ADAPTERS / TASK,
        "template": TEMPLATES[TASK],
        "corpus": data_file(TASK, "train"),
        "device": "cpu",
    }
    found: dict[str, list[str]] = {}

    def alone() -> float:
        llm = LLM(MODEL, **engine)
        answers = llm.generate(texts[:first], progress=False)
        begun = time.monotonic()
        answers += llm.generate(texts[first:], progress=False)
        seconds = time.monotonic() - begun
        found["alone"] = [answer.text for answer in answers]
        return (len(texts) - first) / seconds

    def by_ray_data() -> float:
        rows = ray.data.read_parquet(str(file))
        answers = data.generate(rows, MODEL, batch_size=first, engine=engine, preserve_order=True)
        texts_of: list[list[str]] = []
        begun = 0.0
        for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
            begun = begun or time.monotonic()
            texts_of.append(batch["answer"].to_pylist())
        seconds = time.monotonic() - begun
        found["ray data"] = [text for batch in texts_of for text in batch]
        return (len(texts) - len(texts_of[0])) / seconds

    with tempfile.TemporaryDirectory(prefix="bench-ray-data-") as folder, local_ray():
        file = Path(folder) / "rows.parquet"
        pq.write_table(pa.table({"text": texts}), file)
        to_stderr("both sides once, to compile and to measure step costs ...")
        alone(), by_ray_data()
        speeds = in_turn(
            {"alone": alone, "ray data": by_ray_data},
            options.repeats,
            lambda: to_stderr("  a run has ended"),
        )
    ratio = [a / b for a, b in zip(speeds["ray data"], speeds["alone"], strict=True)]
    figures = [
        Figure.of_runs("LLM.generate alone", speeds["alone"], "rows/s"),
        Figure.of_runs("tasc_serve.data.generate", speeds["ray data"], "rows/s"),
        Figure.of_runs("ratio of neighbouring runs", ratio, "", BAR),
    ]
    show_figures(figures)
    equal = found["alone"] == found["ray data"]
    print(f"answers {'equal' if equal else 'DIFFERENT'}")
    of_medians = median_of(speeds["ray data"]) / median_of(speeds["alone"])
    record: dict[str, Any] = {
        "benchmark": "ray_data",
        "rows": options.rows,
        "batch_size": first,
        "figures": [figure.record for figure in figures],
        "ratio_of_medians": of_medians,
        "runs": speeds,
        "equal": equal,
        **about(),
    }
    finish(record, options.json)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
