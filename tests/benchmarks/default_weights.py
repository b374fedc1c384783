"""Learn the weights that the package ships with from the train splits of many tasks.

    python tests/benchmarks/default_weights.py --data DIR --tokenizer PATH

DIR holds a folder a task with ``train.jsonl.gz`` (fields input and output). Run it again after a
change to the cells of evidence (`tasc_draft.index.cells`); it writes ``default_weights.npz`` there.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from draft_tasks import Task, load_task, names_of

from tasc_draft import DraftSettings, NgramProposer, build_index
from tasc_draft.index import weights
from tasc_draft.index.weights import Weights
from tasc_draft.learning import held_out, taught

SETTINGS = DraftSettings(min_prob=0.0, recent_tokens=0)
# A weight counts for its task as far as the task moved it, up to this.
MOST = 50.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    arguments = parser.parse_args()
    names = names_of(arguments.data)
    learnt = [of_task(load_task(arguments.data, n, arguments.tokenizer)) for n in names]
    mean = averaged(learnt)
    path = Path(weights.__file__).with_name("default_weights.npz")
    np.savez_compressed(path, values=mean.values.astype(np.float16))
    print(f"{path}: {path.stat().st_size} bytes from {', '.join(names)}")


def of_task(task: Task) -> NgramProposer:
    kept, held = held_out(len(task.outputs))
    index = build_index(task.outputs.take(kept), task.prompts.take(kept), **task.facts)
    index = dataclasses.replace(index, weights=Weights.prior())
    return taught(
        index,
        task.prompts.take(held),
        task.outputs.take(held),
        eos_id=task.facts["eos_id"],
        settings=SETTINGS,
    )


def averaged(learnt: list[NgramProposer]) -> Weights:
    prior = Weights.prior().values
    moved = np.stack([np.minimum(p.moved, MOST) for p in learnt])
    change = (moved * np.stack([p.weights.values - prior for p in learnt])).sum(0)
    return Weights(prior + change / (0.5 + moved.sum(0)))


if __name__ == "__main__":
    main()
