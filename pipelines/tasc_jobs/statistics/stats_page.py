"""The report of a task's statistics: tables, curves by rank, and how long outputs are."""

from collections.abc import Callable, Iterator

from tasc_jobs.report.document import Curve, Lines, ReportDocument, Table
from tasc_jobs.statistics.distribution import CurvePoint
from tasc_jobs.statistics.task_statistics import CorpusStatistics, SideStatistics, UnitStatistics

_NGRAMS = (
    "", "n-grams", "different", "Shannon bits", "Renyi-2 bits", "normalised", "typical set",
    "for 80 %",
)  # fmt: skip
_LENGTHS = ("", "rows", "in all", "mean", "least", "p5", "p50", "p90", "p95", "p99", "most")
_SHOWN = ("0", "5", "50", "90", "95", "99", "100")
_RANK = "rank, the most frequent first"
_WORDS = (
    "Words are what stands between white space, and all rows of a side are one running text. "
    "Tokens are single, of the bare texts, without end-of-sequence. Normalised: Shannon entropy "
    "over log2 of the vocabulary's size (tokens) or of the number of different n-grams (words). "
    "Typical set: 2 to the power of the Shannon entropy. For 80 %: how many different n-grams, "
    "the most frequent first, make up 80 % of all. p95: 95 % of rows have so many or fewer."
)


def stats_page(name: str, found: CorpusStatistics) -> ReportDocument:
    """The report of a corpus, by the name of its task or its files."""
    return ReportDocument(
        f"Statistics of {name}",
        tuple(_summary(found)),
        (_ngrams(found), _lengths(found)),
        tuple(plot for plot in _plots(found) if plot.lines),
        _WORDS,
    )


def _sides(found: CorpusStatistics) -> tuple[tuple[str, SideStatistics], ...]:
    return ("inputs", found.input), ("outputs", found.output)


def _units(side: SideStatistics) -> Iterator[tuple[str, UnitStatistics]]:
    n = side.words.ngrams.n
    yield f"word {n}-grams" if n > 1 else "words", side.words
    if side.tokens:
        yield "tokens", side.tokens


def _summary(found: CorpusStatistics) -> Iterator[str]:
    for (unit, asked), (_, answered) in zip(_units(found.input), _units(found.output), strict=True):
        inputs, outputs = asked.ngrams, answered.ngrams
        if inputs.shannon_bits:
            change = outputs.shannon_bits / inputs.shannon_bits - 1
            yield (
                f"Entropy of {unit}: {outputs.shannon_bits:.2f} bits in outputs, "
                f"{inputs.shannon_bits:.2f} in inputs ({change:+.1%}); 80 % are "
                f"{outputs.ngrams_for_80_percent:,} different ones in outputs, "
                f"{inputs.ngrams_for_80_percent:,} in inputs."
            )
    if found.rejected:
        yield f"Lines that gave no row, and are not counted: {found.rejected:,}."


def _ngrams(found: CorpusStatistics) -> Table:
    rows = (
        (
            f"{unit}, {name}",
            f"{side.ngrams.ngrams:,}",
            f"{side.ngrams.unique_ngrams:,}",
            f"{side.ngrams.shannon_bits:.2f}",
            f"{side.ngrams.renyi2_bits:.2f}",
            f"{side.ngrams.normalised_entropy:.3f}",
            f"{side.ngrams.typical_set_size:,.0f}",
            f"{side.ngrams.ngrams_for_80_percent:,}",
        )
        for name, of in _sides(found)
        for unit, side in _units(of)
    )
    return Table("How n-grams are distributed", _NGRAMS, tuple(rows))


def _lengths(found: CorpusStatistics) -> Table:
    rows = (
        (
            f"{unit}, {name}",
            f"{of.rows:,}",
            f"{side.count:,}",
            f"{side.lengths.mean:.1f}",
            *(f"{side.lengths.percentiles[percent]:,}" for percent in _SHOWN),
        )
        for name, of in _sides(found)
        for unit, side in (("words", of.words), ("tokens", of.tokens))
        if side
    )
    return Table("How long rows are", _LENGTHS, tuple(rows))


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
    sides: list[tuple[str, UnitStatistics]], height: Callable[[CurvePoint, int], float]
) -> tuple[Curve, ...]:
    """A line for each side that has n-grams."""
    return tuple(
        Curve(
            name,
            [point.rank for point in side.ngrams.curve],
            [height(point, side.ngrams.ngrams) for point in side.ngrams.curve],
        )
        for name, side in sides
        if side.ngrams.curve
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
