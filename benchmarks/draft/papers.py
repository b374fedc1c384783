"""The tables of the papers that we follow, repeated with our implementations in tokens per step.

TASC-spec (Tsur et al. 2026, arXiv 2602.24174): Table 3, Figure 4, Figure 7. "Faster In-Context
Learning for LLMs via N-Gram Trie Speculative Decoding" (Chen et al.): Tables 2 and 3. The papers
give speed-ups over their targets. No target runs here, so the figures are tokens per verified
step. The methods are mixtures of our drafter:

- ``p_corpus`` and ``tasc``: chains of the ``tasc`` mixture, lambda 1 and 0.75, p_min 5;
- ``n-grammys bigram`` (Stewart et al. 2024, arXiv 2411.03786) and ``n-grammys mixed``: chains of
  our ``mixed`` mixture with the target's bigram table alone, or with the table and the prompt. The
  mixture has learnt weights instead of a fixed lambda. The first token of a row has no bigram,
  because the last token of the prompt is not part of the answer;
- ``trie``: trees of the ``trie`` mixture over the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import ticked
from benchmarks.draft.replays import NODES, SETTINGS, Tick, ours
from benchmarks.draft.tasks import Answers, Task
from tasc_draft import BigramTable, DraftIndex, DraftSettings, Tokens, build_index
from tasc_draft.index.bigrams import read_bigrams
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
    """Tokens per step, or rates of acceptance (``figure_4``), of each task.

    Attributes:
        table_3: By method.
        table_3_shipped: The same for the shipped tasks, whose model is available.
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
    tasks: Sequence[Task],
    shipped: Sequence[Task],
    bigrams: BigramTable | None,
    tick: Tick,
) -> Papers:
    """Make all tables.

    Args:
        tasks: The tasks of a folder; empty when only the shipped tasks are measured.
        shipped: The shipped tasks.
        bigrams: The table of the model whose tokenizer made the tokens of ``tasks``.
        tick: It is called after each of ``papers_of(tasks, shipped)`` parts.
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


def papers_of(tasks: Sequence[Task], shipped: Sequence[Task]) -> int:
    """How many parts `papers` has."""
    every = tasks or shipped
    return len(tasks) + len(shipped) + 2 * len(every) + (len(N_MAX) + 1) * len(of_grid(every))


def of_grid(tasks: Sequence[Task]) -> list[Task]:
    """The tasks among GRID_TASKS; all tasks where there is none of them."""
    return [t for t in tasks if t.name in GRID_TASKS] or list(tasks)


def methods(task: Task, bigrams: BigramTable | None) -> Methods:
    """TASC Table 3; None for a method that needs a bigram table where there is none."""
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


def acceptance(task: Task) -> list[float]:
    """TASC Figure 4: the share of chains accepted at a position, of those that reach it."""
    settings = replace(TASC, num_speculative_tokens=POSITIONS)
    index = corpus_of(task, task.outputs)
    found = ours(task, index, settings, task.test, branching=False)
    return [a / r for a, r in zip(found.accepted, found.reached, strict=True)]


def by_lambda(task: Task) -> dict[float, float]:
    """TASC Figure 7: tokens per step by lambda, on the rows to tune on."""
    outputs, rows = task.tuning()
    index = corpus_of(task, outputs)
    return {weight: chain(task, index, with_lambda(weight), rows) for weight in LAMBDAS}


def by_shape(task: Task, tick: Tick) -> dict[int, dict[int, float]]:
    """N-Gram Trie Table 2: tokens per step by n and L_p, num_draft 32; ticks after each n."""
    return {
        n: ticked({p: tree(task, replace(TRIE, n_max=n, prefix=p)) for p in PREFIX}, tick)
        for n in N_MAX
    }


def by_size(task: Task) -> dict[int, float]:
    """N-Gram Trie Table 3: tokens per step by num_draft, n 13 and L_p 3."""
    return {n: tree(task, replace(TRIE, num_speculative_tokens=n)) for n in NUM_DRAFT}


def with_lambda(weight: float) -> DraftSettings:
    return replace(TASC, corpus_weight=weight)


def chain(task: Task, index: DraftIndex, settings: DraftSettings, rows: Answers) -> float:
    return ours(task, index, settings, rows, branching=False).tokens_per_step


def tree(task: Task, settings: DraftSettings) -> float:
    """Tokens per step of the trie over the prompts of the test rows, without a corpus."""
    return ours(task, nothing(task), settings, task.test).tokens_per_step


def corpus_of(task: Task, outputs: Tokens) -> DraftIndex:
    return build_index(outputs, **task.corpus_facts)


def nothing(task: Task) -> DraftIndex:
    return DraftIndex.empty(task.facts["fingerprint"], task.vocab_size)


def demo_bigrams(task: Task) -> BigramTable:
    """The table of the shipped model with a shipped task's adapter."""
    # torch, Ray and what comes with them take seconds to import.
    from tasc_jobs.index.model_bigrams import make_bigrams
    from tasc_jobs.task_inputs import named_source

    record = demo_record(task.name)
    source = named_source(record.model, record.adapter, record.dtype, "cpu")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "bigrams.npz"
        make_bigrams(source, file)
        return read_bigrams(file, task.facts["fingerprint"])
