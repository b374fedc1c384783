"""The tables of the papers that we follow, again, with our implementations and tokens per step.

TASC-spec (Tsur et al. 2026, arXiv 2602.24174): Table 3, Figure 4, Figure 7. "Faster In-Context
Learning for LLMs via N-Gram Trie Speculative Decoding" (Chen et al.): Tables 2 and 3. The papers
give speed-ups over their targets; here no target runs, so the figures are tokens of a verified
step. They are made by name of a mixture:

- ``p_corpus`` and ``tasc``: chains of the ``tasc`` mixture, lambda 1 and 0.75, p_min 5;
- ``n-grammys bigram`` (Stewart et al. 2024, arXiv 2411.03786) and ``n-grammys mixed``: chains of
  our ``mixed`` mixture that may ask only the target's bigram table, or that and the prompt. It
  weighs the two by learnt weights, not by a fixed lambda, and a row's first token has no bigram,
  for the prompt's last token is no part of the answer.
- ``trie``: trees of the ``trie`` mixture over the prompt.

It prints nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from draft_bars import NODES
from draft_replays import SETTINGS, Tick, ours, ticked
from draft_rows import Answers, BenchTask

from tasc_draft import BigramTable, DraftIndex, DraftSettings, Tokens
from tasc_draft.index.bigrams import read_bigrams
from tasc_draft.index.corpus_build import build_corpus
from tasc_jobs.demo.tasks import demo_record

TASC = replace(DraftSettings.published("tasc"), num_speculative_tokens=NODES)
TRIE = DraftSettings.published("trie")
POSITIONS = 16
LAMBDAS = tuple(i / 10 for i in range(11))
GRID_TASKS = ("nq_rag", "eurlex_summaries")
N_MAX, PREFIX = tuple(range(8, 17)), tuple(range(2, 6))
NUM_DRAFT = (8, 16, 32, 64, 128, 256)
METHODS = ("p_corpus", "tasc", "n-grammys bigram", "n-grammys mixed")

Methods = dict[str, float | None]


@dataclass(frozen=True)
class Papers:
    """Tokens per step, or rates of acceptance, by task.

    Attributes:
        table_3: By method.
        table_3_shipped: The same of the shipped tasks, whose model is at hand.
        figure_4: By position.
        figure_7: By lambda.
        trie_2: By n and L_p.
        trie_3: By num_draft.
    """

    table_3: dict[str, Methods]
    table_3_shipped: dict[str, Methods]
    figure_4: dict[str, list[float]]
    figure_7: dict[str, dict[float, float]]
    trie_2: dict[str, dict[int, dict[int, float]]]
    trie_3: dict[str, dict[int, float]]


def papers(
    tasks: Sequence[BenchTask],
    shipped: Sequence[BenchTask],
    bigrams: BigramTable | None,
    tick: Tick,
) -> Papers:
    """All of them.

    Args:
        tasks: Of a folder; none when only the shipped ones are measured.
        shipped: The shipped tasks.
        bigrams: Of the model whose tokenizer made the tokens of ``tasks``.
        tick: Called behind each of ``papers_of(tasks, shipped)`` parts.
    """
    every = tasks or shipped
    grid = of_grid(every)
    return Papers(
        table_3={t.name: ticked(methods(t, bigrams), tick) for t in tasks},
        table_3_shipped={t.name: ticked(methods(t, demo_bigrams(t)), tick) for t in shipped},
        figure_4={t.name: ticked(acceptance(t), tick) for t in every},
        figure_7={t.name: ticked(by_lambda(t), tick) for t in every},
        trie_2={t.name: by_shape(t, tick) for t in grid},
        trie_3={t.name: ticked(by_size(t), tick) for t in grid},
    )


def papers_of(tasks: Sequence[BenchTask], shipped: Sequence[BenchTask]) -> int:
    every = tasks or shipped
    return len(tasks) + len(shipped) + 2 * len(every) + (len(N_MAX) + 1) * len(of_grid(every))


def of_grid(tasks: Sequence[BenchTask]) -> list[BenchTask]:
    """The tasks that the trie is tried on; all where none of GRID_TASKS is there."""
    return [t for t in tasks if t.name in GRID_TASKS] or list(tasks)


def methods(task: BenchTask, bigrams: BigramTable | None) -> Methods:
    """TASC Table 3; None where a method needs a bigram table and there is none."""
    corpus, empty = corpus_of(task, task.outputs), nothing(task)
    grammys = replace(empty, bigrams=bigrams)
    alone = replace(SETTINGS, sources=("bigrams",))
    mixed = replace(SETTINGS, sources=("bigrams", "prompt"))
    return {
        "p_corpus": chain(task, corpus, with_lambda(1.0), task.test),
        "tasc": chain(task, corpus, with_lambda(0.75), task.test),
        "n-grammys bigram": chain(task, grammys, alone, task.test) if bigrams else None,
        "n-grammys mixed": chain(task, grammys, mixed, task.test) if bigrams else None,
    }


def acceptance(task: BenchTask) -> list[float]:
    """TASC Figure 4: of the chains that reach each position, how many are accepted there."""
    settings = replace(TASC, num_speculative_tokens=POSITIONS)
    index = corpus_of(task, task.outputs)
    found = ours(task, index, settings, task.test, branching=False)
    return [a / r for a, r in zip(found.accepted, found.reached, strict=True)]


def by_lambda(task: BenchTask) -> dict[float, float]:
    """TASC Figure 7: tokens per step by lambda, on rows to tune on."""
    outputs, rows = task.tuning()
    index = corpus_of(task, outputs)
    return {weight: chain(task, index, with_lambda(weight), rows) for weight in LAMBDAS}


def by_shape(task: BenchTask, tick: Tick) -> dict[int, dict[int, float]]:
    """N-Gram Trie Table 2: tokens per step by n and L_p, num_draft 32; ticks behind each n."""
    return {
        n: ticked({p: tree(task, replace(TRIE, n_max=n, prefix=p)) for p in PREFIX}, tick)
        for n in N_MAX
    }


def by_size(task: BenchTask) -> dict[int, float]:
    """N-Gram Trie Table 3: tokens per step by num_draft, n 13 and L_p 3."""
    return {n: tree(task, replace(TRIE, num_speculative_tokens=n)) for n in NUM_DRAFT}


def with_lambda(weight: float) -> DraftSettings:
    return replace(TASC, corpus_weight=weight)


def chain(task: BenchTask, index: DraftIndex, settings: DraftSettings, rows: Answers) -> float:
    return ours(task, index, settings, rows, branching=False).tokens_per_step


def tree(task: BenchTask, settings: DraftSettings) -> float:
    """The trie over the prompts of the test rows; it has no corpus."""
    return ours(task, nothing(task), settings, task.test).tokens_per_step


def corpus_of(task: BenchTask, outputs: Tokens) -> DraftIndex:
    return DraftIndex(build_corpus(outputs, **task.corpus_facts))


def nothing(task: BenchTask) -> DraftIndex:
    return DraftIndex.empty(task.facts["fingerprint"], task.vocab_size)


def demo_bigrams(task: BenchTask) -> BigramTable:
    """The table of the shipped model with a shipped task's adapter."""
    # torch, Ray and what comes with them take seconds to import.
    from tasc_jobs.model_bigrams import BigramJob, make_bigrams

    record = demo_record(task.name)
    job = BigramJob(record.model, record.adapter, device="cpu")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "bigrams.npz"
        make_bigrams(job, file)
        return read_bigrams(file, task.facts["fingerprint"])
