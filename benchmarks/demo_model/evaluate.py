"""Quality of the shipped adapters on their full test splits, by our engine with drafts on.

    python benchmarks/demo_model/evaluate.py

Prints one JSON object.
"""

import json
from typing import Any

from tasc_jobs.demo.tasks import TASKS, data_file, demo_record, read_split
from tasc_jobs.statistics.quality import Metrics, quality
from tasc_serve import LLM

MAX_TOKENS = 512
_METRICS: dict[str, Metrics] = {"massive_en": "massive", "pos_ewt": "tags"}


def evaluate(task: str) -> dict[str, Any]:
    """Quality and block efficiency of one task over its whole test split."""
    record, rows = demo_record(task), read_split(task, "test")
    llm = LLM(
        record.model,
        adapter=record.adapter,
        corpus=data_file(task, "train"),
        template=record.template,
        max_tokens=MAX_TOKENS,
    )
    answers = llm.generate([row["input"] for row in rows], progress=True)
    found = quality([a.text for a in answers], [row["output"] for row in rows], _METRICS[task])
    return {"rows": len(rows), "block_efficiency": llm.summary().tokens_per_step, **found}


def main() -> None:
    print(json.dumps({task: evaluate(task) for task in TASKS}))


if __name__ == "__main__":
    main()
