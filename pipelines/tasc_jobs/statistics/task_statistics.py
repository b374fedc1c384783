"""How variable is this task? Statistics of its inputs and outputs, from Redis or from files.

The Redis way is a Ray Data job, the file way needs neither Redis nor Ray; both count by the same
functions. All rows of a side are one running text: a word n-gram may reach from one row into the
next, and counted so, two of the paper's data sets give its figures to every digit printed. Tokens
are counted one by one, row by row. It draws nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.runtime.stages import StageProgress, silent
from tasc_jobs.statistics.distribution import Distribution, distribution
from tasc_jobs.statistics.ngrams import Lengths, NgramHistogram, NgramTotal, row_lengths
from tasc_jobs.statistics.units import SIDES, TOKENS, WORDS, Units
from tasc_runtime.rows import BadRow, Fields, read_corpus
from tasc_store import CorpusRow
from tasc_text.template import last_words

STAGES = {"count": "rows", "sum": "partitions"}


@dataclass(frozen=True)
class UnitStatistics:
    """A side in words or in tokens: how many, their n-grams, how many in a row."""

    count: int
    ngrams: Distribution
    lengths: Lengths


@dataclass(frozen=True)
class SideStatistics:
    """Inputs or outputs of a corpus; ``tokens`` is None where no tokenizer was named."""

    rows: int
    words: UnitStatistics
    tokens: UnitStatistics | None

    @property
    def as_json(self) -> dict[str, Any]:
        """``word_*`` and, with a tokenizer, ``token_*``; of bigrams also their own names."""
        found: dict[str, Any] = {"rows": self.rows, WORDS: self.words.count}
        words = self.words.ngrams
        if words.n == 2:
            found |= {
                "bigrams": words.ngrams,
                "unique_bigrams": words.unique_ngrams,
                "bigram_entropy_bits": words.shannon_bits,
                "bigrams_for_80_percent": words.ngrams_for_80_percent,
            }
        found |= {"word_ngrams": asdict(words), "word_lengths": asdict(self.words.lengths)}
        if self.tokens:
            found |= {
                TOKENS: self.tokens.count,
                "token_ngrams": asdict(self.tokens.ngrams),
                "token_lengths": asdict(self.tokens.lengths),
            }
        return found


@dataclass(frozen=True)
class CorpusStatistics:
    """Both sides of a corpus; ``rejected`` lines of its files gave no row and are not counted."""

    input: SideStatistics
    output: SideStatistics
    rejected: int = 0

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "input": self.input.as_json,
            "output": self.output.as_json,
            "rejected": self.rejected,
        }


def corpus_statistics(
    url: str,
    task: str,
    units: Units | None = None,
    *,
    parallelism: int | None = None,
    progress: StageProgress = silent,
) -> CorpusStatistics:
    """Statistics of a task's corpus in Redis, by a Ray Data job on the Ray that is running.

    Args:
        url: The Redis, as every node of the Ray cluster can reach it.
        task: Whose corpus.
        units: What is counted; word bigrams if None.
        parallelism: Ranges to read it in, and partitions to sum its n-grams in; by default one for
            every 20,000 rows.
        progress: Told of the stage ``count`` and, with several partitions, of ``sum``.

    Raises:
        RaySetupError: Ray is not running in this process.
        ClusterError: The workers that sum a partition died again and again.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """
    from tasc_jobs.statistics.corpus_counts import count_corpus  # here, since files need no Ray

    units = units or Units()
    return statistics_of(count_corpus(url, task, units, parallelism, progress), units)


def file_statistics(
    paths: Sequence[Path],
    units: Units | None = None,
    *,
    input_field: str = "input",
    output_field: str = "output",
    id_field: str = "id",
    progress: StageProgress = silent,
) -> CorpusStatistics:
    """Statistics of the rows of files, in the order given.

    Unlike a corpus, files may hold a key twice; both rows count.

    Args:
        units: What is counted; word bigrams if None.
        progress: Told of one stage, ``count``, whose end nobody knows.

    Raises:
        FileError: A file cannot be read.
        EmptyCorpusError: There are no rows in them.
    """
    units = units or Units()
    running = _RunningCounts(units)
    refused: list[BadRow] = []
    fields = Fields(input_field, output_field, id_field)
    for row in read_corpus(paths, fields, refused.append):
        running.add(row)
        progress("count", running.rows, None)
    if not running.rows:
        named = ", ".join(map(str, paths)) or "no files"
        raise EmptyCorpusError(f"no rows in {named}; {len(refused)} lines were refused")
    return statistics_of(running.histograms(), units, len(refused))


class _RunningCounts:
    """Both sides of the rows so far."""

    def __init__(self, units: Units) -> None:
        self.rows = 0
        self._units = units
        self._totals = {(side, unit): NgramTotal() for side in SIDES for unit in units.orders}
        self._before = dict.fromkeys(SIDES, "")

    def add(self, row: CorpusRow) -> None:
        self.rows += 1
        for side, text in zip(SIDES, (row.input, row.output), strict=True):
            before = self._before[side]
            for unit, n in self._units.orders.items():
                (symbols,) = self._units.symbols(unit, [text])
                self._totals[side, unit].add_row(symbols, n, before if n > 1 else "")
            self._before[side] = last_words(f"{before} {text}", self._units.n - 1)

    def histograms(self) -> dict[tuple[str, str], NgramHistogram]:
        return {key: total.histogram() for key, total in self._totals.items()}


def statistics_of(
    found: Mapping[tuple[str, str], NgramHistogram], units: Units, rejected: int = 0
) -> CorpusStatistics:
    """The figures of histograms by side and unit."""
    inputs, outputs = (
        _side({unit: found[side, unit] for unit in units.orders}, units) for side in SIDES
    )
    return CorpusStatistics(inputs, outputs, rejected)


def _side(found: Mapping[str, NgramHistogram], units: Units) -> SideStatistics:
    tokens = found.get(TOKENS)
    return SideStatistics(
        found[WORDS].rows,
        _unit(found[WORDS], units.n, None),
        _unit(tokens, units.orders[TOKENS], units.vocabulary) if tokens else None,
    )


def _unit(found: NgramHistogram, n: int, vocabulary: int | None) -> UnitStatistics:
    return UnitStatistics(
        found.symbols,
        distribution(found.frequencies, n, vocabulary),
        row_lengths(found.lengths),
    )
