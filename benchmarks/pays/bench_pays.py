"""Whether drafting pays: ten tasks, guided and not, each with drafts and without, in paired runs.

    python benchmarks/pays/bench_pays.py [--data DIR] [--model FOLDER] [--tasks NAME,..]

Corpora match the task or are foreign to it; models are fine-tuned for it or not. Each side has an
engine of its own, so that the plain side's answers teach the drafting side nothing. Both answer 200
rows first. Then each pair answers rows that neither side has seen, alternating which side is first.
The figure is drafted over plain speed, the median of all pairs; forwards per answer stand beside
it. The ceiling is the speed with drafts that are the answers themselves: every label is decided in
the prompt's own forward, and no wrong token is verified.

Tasks of the shipped model need nothing. `--model` adds tasks of an instruct model with a chat
template in bfloat16, `--data` names a folder with clinc150. The last line of stdout is one JSON
object.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import (
    Figure,
    about,
    add_data,
    add_json,
    add_repeats,
    at_least,
    finish,
    folder,
    in_turn,
    median_of,
    parser_of,
    read_rows,
    show_figures,
    show_table,
    to_stderr,
    use_one_thread,
)

if TYPE_CHECKING:
    from tasc_serve import LLM

LEAST = 0.97
_CUT = ", slot fills"  # it follows the intent in an answer of massive_en
_LABELS = 77
_SYSTEM = "Classify the request. Answer with the name of its intent and nothing else."

Row = tuple[str, str]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        llm: Arguments of `LLM`.
        corpus: Rows that drafts are made from.
        inputs: The texts to answer.
        max_tokens: The maximum number of tokens of an answer.
    """

    name: str
    llm: dict[str, Any]
    corpus: list[Row]
    inputs: list[str]
    max_tokens: int = 64
    choices: tuple[str, ...] = ()


@dataclass
class Run:
    """One side's answers to the rows of a pair."""

    seconds: float
    forwards: int
    texts: list[str]
    tokens: list[tuple[int, ...]]
    drafted: int = 0
    accepted: int = 0


@dataclass
class Side:
    """An engine that answers with drafts, or one that answers without."""

    task: Task
    draft: bool
    llm: "LLM" = field(init=False)

    def __post_init__(self) -> None:
        from tasc_serve import LLM

        self.llm = LLM(
            corpus=self.task.corpus or None, choices=self.task.choices or None, torch_threads=1,
            **self.task.llm,
        )  # fmt: skip

    def answer(self, inputs: list[str], max_tokens: int | None = None) -> Run:
        most = max_tokens or self.task.max_tokens
        began = time.perf_counter()
        found = self.llm.generate(inputs, max_tokens=most, draft=self.draft, progress=False)
        seconds = time.perf_counter() - began
        return Run(
            seconds,
            sum(answer.steps for answer in found),
            [answer.text for answer in found],
            [answer.tokens for answer in found],
            sum(answer.drafted for answer in found),
            sum(answer.accepted for answer in found),
        )

    def know(self, answers: list[tuple[int, ...]]) -> None:
        """Draft these answers to the next inputs."""
        self.llm.engine.draft_by(Oracle(answers))


class Oracle:
    """Drafts known answers to rows in the order of their start; see `tasc_draft.Proposer`."""

    max_depth = max_tokens = 16

    def __init__(self, answers: list[tuple[int, ...]]) -> None:
        self._answers, self._left = iter(answers), dict[int, tuple[int, ...]]()

    def start(self, row: int, prompt: Any, labels: Any = None) -> None:
        self._left[row] = next(self._answers)

    def observe(self, row: int, tokens: Any, hidden: Any = None) -> None:
        self._left[row] = self._left[row][len(tokens) :]

    def finish(self, row: int) -> None: ...

    def propose(self, rows: Any, budget: Any, least: Any = None) -> Any:
        import numpy as np

        from tasc_draft import Drafts

        chains = [
            self._left[row][: min(most, self.max_depth)]
            for row, most in zip(rows.tolist(), budget.tolist(), strict=True)
        ]
        sizes = [len(chain) for chain in chains]
        depths = np.array([d for size in sizes for d in range(size)], np.int16)
        return Drafts(
            tokens=np.array([token for chain in chains for token in chain], np.int32),
            parents=depths.astype(np.int32) - 1,
            depths=depths + np.int16(1),
            offsets=np.cumsum([0, *sizes]).astype(np.int32),
            logp=np.zeros(sum(sizes), np.float32),
            source=np.zeros(sum(sizes), np.int8),
        )


def measured(task: Task, warm: int, rows: int, pairs: int) -> tuple[Figure, dict[str, Any]]:
    sides = {"drafted": Side(task, True), "plain": Side(task, False)}
    knowing = Side(task, True)
    for side in (*sides.values(), knowing):
        side.answer(task.inputs[:warm])
    chunks = {k: task.inputs[warm + k * rows : warm + (k + 1) * rows] for k in range(pairs)}
    if len(chunks[pairs - 1]) < rows:
        raise SystemExit(
            f"{task.name} has {len(task.inputs)} rows; {warm + rows * pairs} are asked"
        )
    found: dict[str, list[Run]] = {"drafted": [], "plain": []}
    ceilings = []
    for k, chunk in chunks.items():
        runs = in_turn({name: _asking(side, chunk) for name, side in _order(sides, k)}, 1)
        for name, (run,) in runs.items():
            found[name].append(run)
        knowing.know(found["plain"][-1].tokens)
        ceilings.append(knowing.answer(chunk).seconds)
    ratios = [p.seconds / d.seconds for d, p in zip(found["drafted"], found["plain"], strict=True)]
    answers = rows * pairs
    reached = median_of(ratios)
    ceiling = median_of([p.seconds / c for p, c in zip(found["plain"], ceilings, strict=True)])
    same = sum(
        a == b
        for d, p in zip(found["drafted"], found["plain"], strict=True)
        for a, b in zip(d.texts, p.texts, strict=True)
    )
    record = {
        "rows": answers,
        "speed_up": ratios,
        "ceiling": ceiling,
        "share_of_ceiling": (reached - 1) / (ceiling - 1) if ceiling > 1 else None,
        "plain_rows_per_s": answers / sum(r.seconds for r in found["plain"]),
        "forwards_per_answer": sum(r.forwards for r in found["drafted"]) / answers,
        "plain_forwards_per_answer": sum(r.forwards for r in found["plain"]) / answers,
        "drafted": sum(r.drafted for r in found["drafted"]),
        "accepted": sum(r.accepted for r in found["drafted"]),
        "same_texts": same,
    }
    return Figure.of_runs(f"{task.name}: drafted / plain", ratios, "x", LEAST), record


def _asking(side: Side, chunk: list[str]) -> Callable[[], Run]:
    return lambda: side.answer(chunk)


def _order(sides: dict[str, Side], k: int) -> list[tuple[str, Side]]:
    both = list(sides.items())
    return both if k % 2 == 0 else both[::-1]


# Tasks


def shipped_tasks() -> list[Task]:
    from tasc_jobs.demo.tasks import ADAPTERS, MODEL, TEMPLATES, read_split

    def rows(task: str, split: str) -> list[Row]:
        return [(row["input"], row["output"]) for row in read_split(task, split)]

    def model(adapter: str | None, task: str) -> dict[str, Any]:
        own = {} if adapter is None else {"adapter": ADAPTERS / adapter}
        return {"model": MODEL, "template": TEMPLATES[task], **own}

    massive, tags = rows("massive_en", "train"), rows("pos_ewt", "train")
    asked = [text for text, _ in rows("massive_en", "test")] + [text for text, _ in massive[::3]]
    tagged = [text for text, _ in rows("pos_ewt", "test")] + [text for text, _ in tags[::3]]
    unseen = [row for i, row in enumerate(massive) if i % 3]
    intents = [(text, output.partition(_CUT)[0]) for text, output in unseen]
    labels = tuple(sorted({label for _, label in intents}))
    ours, other = model("massive_en", "massive_en"), model("pos_ewt", "pos_ewt")
    return [
        Task("slots, matching corpus", ours, unseen, asked),
        Task("slots, foreign corpus", ours, tags, asked),
        Task("slots, no corpus", ours, [], asked),
        Task("tags, matching corpus", other, [r for i, r in enumerate(tags) if i % 3], tagged),
        Task("labels, matching corpus", ours, intents, asked, choices=labels),
        Task("labels, foreign corpus", ours, tags, asked, choices=labels),
        Task("labels, unsure model", model(None, "massive_en"), intents, asked, choices=labels),
    ]


def model_tasks(home: Path, data: Path) -> list[Task]:
    read = {
        split: [(row["input"], row["output"]) for row in read_rows(data / f"{split}.jsonl.gz")]
        for split in ("train", "test")
    }
    chat = {
        "model": home, "dtype": "bfloat16", "chat_template": "auto", "system_prompt": _SYSTEM,
    }  # fmt: skip
    labels = tuple(sorted({label for _, label in read["train"]}))
    few = {label.removeprefix("intent: ") for label in labels[:_LABELS]}
    names = [(text, label.removeprefix("intent: ")) for text, label in read["train"]]
    asked = [text for text, _ in read["test"]]
    step = len(asked) // 1200 or 1
    return [
        Task("151 labels, zero-shot", chat, read["train"], asked[::step], choices=labels),
        Task(
            f"{_LABELS} labels, zero-shot", chat, [row for row in names if row[1] in few],
            asked[1::step], choices=tuple(sorted(few)),
        ),
        Task("free text, foreign corpus", chat, read["train"], asked[2::step], max_tokens=24),
    ]  # fmt: skip


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


def main() -> None:
    parser = parser_of(__doc__)
    add_data(parser)
    parser.add_argument("--model", type=folder, help="an instruct model; needs --data")
    parser.add_argument(
        "--tasks", type=_parts, default=(), help="parts of task names, with ; between (all)"
    )
    parser.add_argument("--warm", type=at_least(0), default=200, help="rows before the pairs (200)")
    parser.add_argument("--rows", type=at_least(8), default=48, help="rows of a pair (48)")
    add_repeats(parser, 9)
    add_json(parser)
    options = parser.parse_args()
    if options.model and not options.data:
        parser.error("--model needs --data")
    use_one_thread()
    tasks = shipped_tasks()
    if options.model:
        tasks += model_tasks(options.model, options.data / "clinc150")
    if options.tasks:
        tasks = [t for t in tasks if any(part in t.name for part in options.tasks)]
    figures, found = [], {}
    for task in tasks:
        to_stderr(f"{task.name} ...")
        figure, found[task.name] = measured(task, options.warm, options.rows, options.repeats)
        figures.append(figure)
    show_figures(figures)
    show_table(
        "tasks",
        ["task", "forwards/answer", "plain", "ceiling, x", "of it", "accepted", "drafted", "same"],
        [
            [
                name, f"{f['forwards_per_answer']:.2f}", f"{f['plain_forwards_per_answer']:.2f}",
                f"{f['ceiling']:.2f}",
                "" if f["share_of_ceiling"] is None else f"{f['share_of_ceiling']:.2f}",
                f"{f['accepted']:,}", f"{f['drafted']:,}", f"{f['same_texts']} of {f['rows']}",
            ]
            for name, f in found.items()
        ],
    )  # fmt: skip
    finish({"figures": [f.record for f in figures], "tasks": found, **about()}, options.json)


if __name__ == "__main__":
    main()
