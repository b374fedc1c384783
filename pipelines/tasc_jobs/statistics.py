"""How variable is this task? Bigram statistics of its inputs and outputs, from Redis or from files.

The Redis way is a Ray Data job, the file way needs neither Redis nor Ray; both count by the same
pure functions. It knows no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasc_jobs.bigrams import BigramTotal, Statistics, count_bigrams, last_word, statistics
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.rows import BadRow, check_file, read_rows
from tasc_jobs.stages import StageProgress, silent

STAGES = {"count": "rows"}


@dataclass(frozen=True)
class CorpusStatistics:
    """Both sides of a corpus; ``rejected`` lines of its files gave no row and are not counted."""

    input: Statistics
    output: Statistics
    rejected: int = 0


def corpus_statistics(
    url: str, task: str, *, parallelism: int | None = None, progress: StageProgress = silent
) -> CorpusStatistics:
    """Statistics of a task's corpus in Redis, by a Ray Data job on the Ray that is running.

    Args:
        url: The Redis, as every node of the Ray cluster can reach it.
        task: Whose corpus.
        parallelism: Ranges to read it in; by default one for every 20,000 rows.
        progress: Told of one stage, ``count``.

    Raises:
        RaySetupError: Ray is not running in this process.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """
    from tasc_jobs.corpus_counts import count_corpus  # here, since files need no Ray

    counts, rows = count_corpus(url, task, parallelism, progress)
    return CorpusStatistics(statistics(counts["input"], rows), statistics(counts["output"], rows))


def file_statistics(
    paths: Sequence[Path],
    *,
    input_field: str = "input",
    output_field: str = "output",
    id_field: str = "id",
    progress: StageProgress = silent,
) -> CorpusStatistics:
    """Statistics of the rows of files, in the order given.

    Unlike a corpus, files may hold a key twice; both rows count.

    Args:
        progress: Told of one stage, ``count``, whose end nobody knows.

    Raises:
        FileError: A file cannot be read.
        EmptyCorpusError: There are no rows in them.
    """
    for path in paths:
        check_file(path, (input_field, output_field))
    inputs, outputs = _RunningText(), _RunningText()
    rejected = 0
    for path in paths:
        for row in read_rows(path, input_field, output_field, id_field):
            if isinstance(row, BadRow):
                rejected += 1
            else:
                inputs.add(row.input)
                outputs.add(row.output)
                progress("count", outputs.rows, None)
    if not outputs.rows:
        named = ", ".join(map(str, paths)) or "no files"
        raise EmptyCorpusError(f"no rows in {named}; {rejected} lines were refused")
    return CorpusStatistics(inputs.statistics(), outputs.statistics(), rejected)


class _RunningText:
    """One side of the rows so far."""

    def __init__(self) -> None:
        self.rows = 0
        self._total = BigramTotal()
        self._previous: str | None = None

    def add(self, text: str) -> None:
        self.rows += 1
        self._total.add(count_bigrams([text], self._previous))
        self._previous = last_word(text) or self._previous

    def statistics(self) -> Statistics:
        return statistics(self._total.counts(), self.rows)
