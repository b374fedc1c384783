"""Statistics of a task's inputs and outputs, from Redis or from files: how variable the task is.

A corpus in Redis is counted by a Ray Data job; files need neither Redis nor Ray. Both use the same
functions. Words are counted as n-grams, tokens and whole texts singly. N-grams lie within rows
unless all rows of a side are one running text (`Units.across_rows`). With one running text, the
statistics of two of the paper's data sets equal the figures that the paper prints.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.report.document import Curve, Lines, ReportDocument, Table
from tasc_jobs.statistics.distribution import CurvePoint, Distribution, distribution
from tasc_jobs.statistics.ngrams import (
    TEXTS,
    TOKENS,
    WORDS,
    CorpusTotal,
    Lengths,
    NgramHistogram,
    Units,
    row_lengths,
)
from tasc_jobs.words import SIDES, with_previous_words
from tasc_runtime.data.rows import BadRow, Fields, read_tables
from tasc_runtime.progress import StageProgress, silent

_PERCENTILES = {"least": "0", **{f"p{p}": p for p in ("5", "50", "90", "95", "99")}, "most": "100"}
_RANK = "rank, the most frequent first"
_WORDS = (
    "Words are separated by white space, and n-grams lie within rows, unless --across-rows "
    "is given. A whole text is one input or one output. Tokens are counted singly, in the texts "
    "alone, without end-of-sequence. Normalised: entropy divided by log2 of the vocabulary's size "
    "(tokens) or of the number of different n-grams or texts. "
    "Typical set: 2 to the power of the Shannon entropy. For 80 %: number of the most frequent "
    "n-grams that make up 80 % of all. p95: 95 % of rows have at most this length."
)

STAGES = {"count": "rows", "sum": "partitions"}


@dataclass(frozen=True)
class UnitStatistics:
    """The words or tokens of one side: their number, their n-grams, and their number per row."""

    count: int
    ngrams: Distribution
    lengths: Lengths


@dataclass(frozen=True)
class SideStatistics:
    """Inputs or outputs of a corpus; ``tokens`` is None without a tokenizer."""

    rows: int
    words: UnitStatistics
    texts: Distribution
    tokens: UnitStatistics | None

    @property
    def different_share(self) -> float:
        """Number of different texts over the number of rows."""
        return self.texts.unique_ngrams / self.rows

    @property
    def most_frequent_share(self) -> float:
        """Share of the rows that have the most frequent text."""
        return self.texts.curve[0].count / self.rows

    @property
    def as_json(self) -> dict[str, Any]:
        """Fields of words, of whole texts and, with a tokenizer, of tokens; word bigrams have
        further fields."""
        found: dict[str, Any] = {"rows": self.rows, WORDS: self.words.count}
        words = self.words.ngrams
        if words.n == 2:
            found |= {
                "bigrams": words.ngrams,
                "unique_bigrams": words.unique_ngrams,
                "bigram_entropy_bits": words.shannon_bits,
                "bigrams_for_80_percent": words.ngrams_for_80_percent,
            }
        found |= {
            "word_ngrams": asdict(words),
            "word_lengths": asdict(self.words.lengths),
            "different_texts": self.texts.unique_ngrams,
            "different_share": self.different_share,
            "most_frequent_share": self.most_frequent_share,
            TEXTS: asdict(self.texts),
        }
        if self.tokens:
            found |= {
                TOKENS: self.tokens.count,
                "token_ngrams": asdict(self.tokens.ngrams),
                "token_lengths": asdict(self.tokens.lengths),
            }
        return found


@dataclass(frozen=True)
class CorpusStatistics:
    """Both sides of a corpus; ``rejected`` is the number of lines of its files that gave no row."""

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
    """Returns the statistics of a task's corpus in Redis, from a Ray Data job on the running Ray.

    Args:
        url: Address of Redis, as every node of the Ray cluster can reach it.
        task: Name of the corpus's task.
        units: What is counted; word bigrams if None.
        parallelism: Number of ranges to read and of partitions to sum; see `count_corpus`.
        progress: Called for the stage ``count`` and, with several partitions, for ``sum``.

    Raises:
        RaySetupError: Ray is not running in this process.
        ClusterError: The workers died repeatedly.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """
    from tasc_jobs.statistics.corpus_counts import count_corpus  # here, since files need no Ray

    units = units or Units()
    return statistics_of(count_corpus(url, task, units, parallelism, progress), units)


def file_statistics(
    paths: Sequence[Path],
    units: Units | None = None,
    fields: Fields = Fields(),
    progress: StageProgress = silent,
) -> CorpusStatistics:
    """Returns the statistics of the rows of files, in the given order.

    Unlike a corpus, files may contain a key twice; both rows count.

    Args:
        units: What is counted; word bigrams if None.
        progress: Called for one stage, ``count``, without a total.

    Raises:
        FileError: A file cannot be read.
        EmptyCorpusError: The files have no rows.
    """
    units = units or Units()
    total = CorpusTotal(units)
    before = dict.fromkeys(SIDES, "")
    refused: list[BadRow] = []
    rows = 0

    def read(more: int) -> None:
        nonlocal rows
        rows += more
        progress("count", rows, None)

    for found in read_tables(paths, fields, refused.append, read):
        table = found
        if units.words_before:
            table, before = with_previous_words(table, before, units.words_before)
        total.add_rows(table)
    if not rows:
        named = ", ".join(map(str, paths)) or "no files"
        raise EmptyCorpusError(f"no rows in {named}; {len(refused)} lines were refused")
    return statistics_of(total.histograms(), units, len(refused))


def statistics_of(
    found: Mapping[tuple[str, str], NgramHistogram], units: Units, rejected: int = 0
) -> CorpusStatistics:
    """Returns the figures of histograms by side and unit."""
    inputs, outputs = (
        _side({unit: found[side, unit] for unit in units.orders}, units) for side in SIDES
    )
    return CorpusStatistics(inputs, outputs, rejected)


def _side(found: Mapping[str, NgramHistogram], units: Units) -> SideStatistics:
    tokens = found.get(TOKENS)
    return SideStatistics(
        found[WORDS].rows,
        _unit(found[WORDS], units.n, None),
        distribution(found[TEXTS].frequencies, 1),
        _unit(tokens, units.orders[TOKENS], units.vocabulary) if tokens else None,
    )


def _unit(found: NgramHistogram, n: int, vocabulary: int | None) -> UnitStatistics:
    return UnitStatistics(
        found.symbols, distribution(found.frequencies, n, vocabulary), row_lengths(found.lengths)
    )


def stats_page(name: str, found: CorpusStatistics) -> ReportDocument:
    """Returns the report of a corpus; ``name`` is its task or its files."""
    return ReportDocument(
        f"Statistics of {name}",
        tuple(_summary(found)),
        (_ngrams(found), _lengths(found)),
        tuple(plot for plot in _plots(found) if plot.lines),
        _WORDS,
    )


def _sides(found: CorpusStatistics) -> tuple[tuple[str, SideStatistics], ...]:
    return ("inputs", found.input), ("outputs", found.output)


def _units(side: SideStatistics) -> Iterator[tuple[str, Distribution]]:
    n = side.words.ngrams.n
    yield f"word {n}-grams" if n > 1 else "words", side.words.ngrams
    yield "whole texts", side.texts
    if side.tokens:
        yield "tokens", side.tokens.ngrams


def _summary(found: CorpusStatistics) -> Iterator[str]:
    for name, side in _sides(found):
        yield (
            f"Different {name}: {side.texts.unique_ngrams:,} in {side.rows:,} rows "
            f"({side.different_share:.1%}); the most frequent is in "
            f"{side.most_frequent_share:.1%} of the rows."
        )
    for (unit, inputs), (_, outputs) in zip(_units(found.input), _units(found.output), strict=True):
        if not outputs.ngrams:
            yield f"No output has {unit}: every output has fewer than {outputs.n} words."
        elif inputs.shannon_bits:
            change = outputs.shannon_bits / inputs.shannon_bits - 1
            yield (
                f"Entropy of {unit}: {outputs.shannon_bits:.2f} bits in outputs, "
                f"{inputs.shannon_bits:.2f} in inputs ({change:+.1%}); the "
                f"{outputs.ngrams_for_80_percent:,} most frequent make up 80 % in outputs, and the "
                f"{inputs.ngrams_for_80_percent:,} most frequent in inputs."
            )
    if found.rejected:
        yield f"Lines that gave no row and are not counted: {found.rejected:,}."


def _ngrams(found: CorpusStatistics) -> Table:
    rows = (
        {
            "": f"{unit}, {name}",
            "n-grams": f"{ngrams.ngrams:,}",
            "different": f"{ngrams.unique_ngrams:,}",
            "Shannon bits": f"{ngrams.shannon_bits:.2f}",
            "Renyi-2 bits": f"{ngrams.renyi2_bits:.2f}",
            "normalised": f"{ngrams.normalised_entropy:.3f}",
            "typical set": f"{ngrams.typical_set_size:,.0f}",
            "for 80 %": f"{ngrams.ngrams_for_80_percent:,}",
        }
        for name, of in _sides(found)
        for unit, ngrams in _units(of)
    )
    return Table.of("How n-grams are distributed", rows)


def _lengths(found: CorpusStatistics) -> Table:
    rows = (
        {
            "": f"{unit}, {name}",
            "rows": f"{of.rows:,}",
            "in all": f"{side.count:,}",
            "mean": f"{side.lengths.mean:.1f}",
            **{name: f"{side.lengths.percentiles[p]:,}" for name, p in _PERCENTILES.items()},
        }
        for name, of in _sides(found)
        for unit, side in (("words", of.words), ("tokens", of.tokens))
        if side
    )
    return Table.of("How long rows are", rows)


def _plots(found: CorpusStatistics) -> Iterator[Lines]:
    sides = [(name, dict(_units(of))) for name, of in _sides(found)]
    for unit in sides[0][1]:
        of = [(name, units[unit]) for name, units in sides]
        covered = _curves(of, lambda point, total: point.coverage)
        title = f"Share of all {unit} that the most frequent make up"
        yield Lines(title, _RANK, "share", covered, level=0.8, log_x=True)
        shares = _curves(of, lambda point, total: point.count / total)
        yield Lines(f"Frequency of {unit}", _RANK, "share", shares, log_x=True, log_y=True)
    yield _length_plot(found.output)


def _curves(
    sides: list[tuple[str, Distribution]], height: Callable[[CurvePoint, int], float]
) -> tuple[Curve, ...]:
    """Returns a curve for each side that has n-grams."""
    return tuple(
        Curve(
            name,
            [point.rank for point in ngrams.curve],
            [height(point, ngrams.ngrams) for point in ngrams.curve],
        )
        for name, ngrams in sides
        if ngrams.curve
    )


def _length_plot(outputs: SideStatistics) -> Lines:
    lines = (
        Curve(
            name,
            [(each.first + each.last) / 2 for each in unit.lengths.histogram],
            # Words and tokens have bins of different widths.
            [
                each.rows / outputs.rows / (each.last - each.first + 1)
                for each in unit.lengths.histogram
            ],
        )
        for name, unit in (("words", outputs.words), ("tokens", outputs.tokens))
        if unit
    )
    height = "share of outputs, for each length"
    return Lines("How long outputs are", "length, by bins", height, tuple(lines))
