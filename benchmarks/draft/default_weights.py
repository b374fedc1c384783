"""Learn the weights that the package ships with from the train splits of many tasks.

    python benchmarks/draft/default_weights.py --data DIR --tokenizer PATH

DIR has a folder for each task with ``train.jsonl.gz`` (fields input and output) and
``test.jsonl.gz``. Run the script again after a change to the cells of evidence
(`tasc_draft.index.weights`). It writes ``default_weights.npz`` into `tasc_draft.index`.
"""

import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

from benchmarks.common import add_data, parser_of
from benchmarks.draft.tasks import Task, missing_splits, of_folder
from tasc_draft import DraftSettings, NgramProposer, build_index
from tasc_draft.index import weights
from tasc_draft.index.weights import CELLS, LEVELS, OTHER_BASE, Weights
from tasc_draft.replaying import held_out, taught

SETTINGS = DraftSettings(min_prob=0.0, recent_tokens=0)
# A weight counts for its task in proportion to its movement there, up to this much.
MOST = 50.0
# The middle of each level's share. Level 0, no evidence for a candidate, is taken as a small one.
SHARES = (0.003, 0.005, 0.03, 0.1, 0.22, 0.4, 0.62, 0.82, 0.93, 0.985)


def main() -> None:
    parser = parser_of(__doc__)
    add_data(parser, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    names = names_in(options.data)
    learnt = [learnt_from(of_folder(options.data, name, options.tokenizer, 1)) for name in names]
    mean = averaged(learnt)
    path = Path(weights.__file__).with_name("default_weights.npz")
    np.savez_compressed(path, values=mean.values.astype(np.float16))
    print(f"{path}: {path.stat().st_size} bytes from {', '.join(names)}")


def names_in(data: Path) -> list[str]:
    """The tasks of a folder that have both splits."""
    names = sorted(folder.name for folder in data.iterdir() if not missing_splits(folder))
    if not names:
        raise SystemExit(f"{data} has no task with a train.jsonl.gz and a test.jsonl.gz")
    return names


def learnt_from(task: Task) -> NgramProposer:
    kept, held = held_out(len(task.outputs))
    index = build_index(task.outputs.take(kept), task.prompts.take(kept), **task.facts)
    index = dataclasses.replace(index, weights=prior())
    return taught(
        index,
        task.prompts.take(held),
        task.outputs.take(held),
        eos_id=task.eos_id,
        settings=SETTINGS,
    )


def averaged(learnt: list[NgramProposer]) -> Weights:
    before = prior().values
    moved = np.stack([np.minimum(p.moved, MOST) for p in learnt])
    change = (moved * np.stack([p.weights.values - before for p in learnt])).sum(0)
    return Weights(before + change / (0.5 + moved.sum(0)))


def prior() -> Weights:
    """Weights before any learning: about a third of the log of the share, for every source."""
    values = np.full(CELLS, -3.0, np.float32)
    values[:OTHER_BASE] = np.tile(0.35 * np.log(SHARES), OTHER_BASE // LEVELS)
    return Weights(values)


if __name__ == "__main__":
    main()
