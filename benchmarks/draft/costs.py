"""The costs of drafting: a step of eight rows, and building an index on one core and on two.

Times are wall-clock times in this process and in two child processes.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.common import ticked
from benchmarks.draft.replays import REPEATS, SETTINGS, Tick, capacity
from benchmarks.draft.tasks import Task
from tasc_draft import DraftIndex, Int32, NgramProposer, build_index
from tasc_draft.index.corpus_build import Documents, assemble, distinct
from tasc_draft.index.corpus_sort import sort_part, splitters

ROWS, NODES = 8, 64
_ARRAYS = ("text", "offsets", "counts")


@dataclasses.dataclass(frozen=True)
class BuildCosts:
    """The costs of one task's index.

    Attributes:
        corpus_tokens, tokens: Tokens of the outputs with their marks; of these and the prompts.
        corpus_s, whole_s: Seconds of each repeat: of the corpus part; of all parts.
        corpus_bytes, whole_bytes: Bytes of the arrays: of the corpus part; of all parts.
    """

    corpus_tokens: int
    tokens: int
    corpus_s: list[float]
    whole_s: list[float]
    corpus_bytes: int
    whole_bytes: int


@dataclasses.dataclass(frozen=True)
class TwoCores:
    """Speed-ups of two processes over one, for each repeat.

    Attributes:
        sorting: Of the sort, by the clock; this needs two idle cores.
        work: Of the sort, by processor time: one process over the longer of two. Idle cores would
            give this speed-up by the clock.
        corpus: Of the whole corpus part, by the clock.
    """

    sorting: list[float]
    work: list[float]
    corpus: list[float]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of all tasks, by task.

    Attributes:
        batch_us: ``[repeats][steps]``, see `batch_us`.
        cores_task: The task with the most output tokens.
        cores: The speed-ups of that task.
    """

    build: dict[str, BuildCosts]
    batch_us: dict[str, list[list[float]]]
    cores_task: str
    cores: TwoCores


def costs(tasks: list[Task], indexes: dict[str, DraftIndex], tick: Tick) -> Costs:
    """Measure; ``tick`` is called after each of ``parts_of(tasks)`` parts."""
    biggest = max(tasks, key=lambda task: len(task.outputs.ids))
    return Costs(
        build={t.name: build_costs(t, indexes[t.name], tick) for t in tasks},
        batch_us={
            t.name: [ticked(batch_us(t, indexes[t.name]), tick) for _ in range(REPEATS)]
            for t in tasks
        },
        cores_task=biggest.name,
        cores=two_cores(biggest, tick),
    )


def parts_of(tasks: list[Task]) -> int:
    return REPEATS * (2 * len(tasks) + 1)


def build_costs(task: Task, index: DraftIndex, tick: Tick) -> BuildCosts:
    """Build a task's index REPEATS times on one core; ``tick`` is called after each repeat."""
    corpus_s, whole_s = [], []
    for _ in range(REPEATS):
        corpus_s.append(seconds(lambda: build_index(task.outputs, **task.corpus_facts)))
        whole_s.append(seconds(lambda: build_index(task.outputs, task.prompts, **task.facts)))
        tick()
    return BuildCosts(
        corpus_tokens=index.corpus.tokens,
        tokens=index.corpus.tokens + len(task.prompts.ids),
        corpus_s=corpus_s,
        whole_s=whole_s,
        corpus_bytes=index.corpus.nbytes,
        whole_bytes=index.nbytes,
    )


def two_cores(task: Task, tick: Tick) -> TwoCores:
    """Build a corpus part in one process, and with two processes that each sort half of it.

    The processes have started and compiled their code before the measurement begins.
    """
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        _one_and_two(task, pool)
        found = [ticked(_one_and_two(task, pool), tick) for _ in range(REPEATS)]
    return TwoCores(*(list(ratios) for ratios in zip(*found, strict=True)))


def _one_and_two(task: Task, pool: ProcessPoolExecutor) -> tuple[float, float, float]:
    times = [time.perf_counter()]
    documents = distinct(task.outputs, vocab_size=task.vocab_size, eos_id=task.eos_id)
    times.append(time.perf_counter())
    worked = time.process_time()
    one = sort_part(documents.text, documents.offsets, documents.counts)
    worked = time.process_time() - worked
    times.append(time.perf_counter())
    with TemporaryDirectory() as folder:
        two, longer = _sorted_by_two(documents, Path(folder), pool)
        times.append(time.perf_counter())
        facts = {name: task.corpus_facts[name] for name in ("fingerprint", "vocab_size")}
        index = assemble(documents, two, **facts)
        times.append(time.perf_counter())
    if not np.array_equal(index.order, one[0]):
        raise RuntimeError("two processes sorted otherwise than one")
    before, by_one, by_two, behind = np.diff(times).tolist()
    corpus = (before + by_one + behind) / (before + by_two + behind)
    return by_one / by_two, worked / longer, corpus


def _sorted_by_two(
    documents: Documents, folder: Path, pool: ProcessPoolExecutor
) -> tuple[list[tuple[Int32, Int32]], float]:
    """Two sorted parts, and the processor seconds of the longer one."""
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(documents, name))
    cuts = pairwise([None, *splitters(documents.text, 2), None])
    jobs = [pool.submit(_sort_file, folder, i, *cut) for i, cut in enumerate(cuts)]
    longer = max(job.result() for job in jobs)
    parts = [(_read(folder, f"order-{i}"), _read(folder, f"sums-{i}")) for i in range(len(jobs))]
    return parts, longer


def _sort_file(folder: Path, part: int, low: int | None, high: int | None) -> float:
    began = time.process_time()
    text, offsets, counts = (_read(folder, name) for name in _ARRAYS)
    order, sums = sort_part(text, offsets, counts, low=low, high=high)
    np.save(folder / f"order-{part}.npy", order)
    np.save(folder / f"sums-{part}.npy", sums)
    return time.process_time() - began


def _read(folder: Path, name: str) -> Int32:
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))


def batch_us(task: Task, index: DraftIndex) -> list[float]:
    """Microseconds of ``propose`` and ``observe`` in each step of eight rows with 64 nodes in all.

    The next row takes the place of one that ends; steps of fewer rows do not count. The nodes go to
    the likeliest paths of the batch, so that one row may have all of them.
    """
    proposer = NgramProposer(
        dataclasses.replace(SETTINGS, num_speculative_tokens=NODES),
        rows=ROWS,
        capacity=capacity(task.test),
        vocab_size=task.vocab_size,
        eos_ids=[task.eos_id],
        index=index,
        nodes=NODES,
    )
    waiting = iter(task.test)
    times: list[float] = []
    batch, limits = np.arange(ROWS, dtype=np.int32), np.full(ROWS, NODES, np.int32)
    places, answers = [0] * ROWS, [np.zeros(0, np.int32)] * ROWS
    while True:
        for row in range(ROWS):
            if places[row] < len(answers[row]):
                continue
            if len(answers[row]):
                proposer.finish(row)
            if (following := next(waiting, None)) is None:
                return times
            places[row], answers[row] = 0, following[1]
            proposer.start(row, following[0])
        times.append(_step_us(proposer, batch, limits, answers, places))


def _step_us(
    proposer: NgramProposer, batch: Int32, limits: Int32, answers: list[Int32], places: list[int]
) -> float:
    began = time.perf_counter()
    drafts = proposer.propose(batch, limits)
    drafted = time.perf_counter()
    taken = []
    for row in batch:
        part = slice(*drafts.offsets[row : row + 2])
        answer, at = answers[row], places[row]
        kept = _kept(drafts.tokens[part], drafts.parents[part], answer[at:])
        taken.append(answer[at : at + kept + 1])
        places[row] += len(taken[row])
    verified = time.perf_counter()
    for row in batch:
        proposer.observe(row, taken[row])
    return (drafted - began + time.perf_counter() - verified) * 1e6


def _kept(tokens: Int32, parents: Int32, answer: Int32) -> int:
    node, kept = -1, 0
    for i, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        if kept < len(answer) and parent == node and token == answer[kept]:
            node, kept = i, kept + 1
    return kept


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
